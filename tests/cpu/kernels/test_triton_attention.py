"""Runs `interpreted_triton_attention.py`, whose tests need a process in which Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

INTERPRETED = Path(__file__).with_name("interpreted_triton_attention.py")
ROOT = Path(__file__).parents[3]


def test_triton_kernels_match_the_reference_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(INTERPRETED)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
