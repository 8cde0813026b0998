"""Runs the files of tests that need a process in which Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_triton_kernels_match_the_reference_in_the_interpreter() -> None:
    """In one process, because importing torch takes longer than most of these files."""
    files = [str(path) for path in sorted(Path(__file__).parent.glob("interpreted_*.py"))]
    assert files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
