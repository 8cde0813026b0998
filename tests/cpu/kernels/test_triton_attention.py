"""Runs the files of tests that need a process in which Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "name",
    [
        "interpreted_triton_attention.py",
        "interpreted_triton_extras.py",
        "interpreted_hopper_sums.py",
        "interpreted_adamw.py",
        "interpreted_norms.py",
        "interpreted_gated.py",
        "interpreted_rotary.py",
        "interpreted_cross_entropy.py",
    ],
)
def test_triton_kernels_match_the_reference_in_the_interpreter(name: str) -> None:
    interpreted = Path(__file__).with_name(name)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", str(interpreted)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
