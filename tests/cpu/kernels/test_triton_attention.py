"""Runs the files of tests that need a process in which Triton interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# A process per group, because importing torch takes longer than most of these files.
ATTENTION = ("triton_attention", "triton_extras", "hopper_sums")
OTHERS = ("adamw", "norms", "gated", "rotary", "cross_entropy")


@pytest.mark.parametrize("names", [ATTENTION, OTHERS], ids=["attention", "others"])
def test_triton_kernels_match_the_reference_in_the_interpreter(names: tuple[str, ...]) -> None:
    files = [str(Path(__file__).with_name(f"interpreted_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *files]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def test_every_interpreted_file_is_run() -> None:
    there = {path.stem.removeprefix("interpreted_") for path in Path(__file__).parent.glob("interpreted_*.py")}
    assert there == {*ATTENTION, *OTHERS}
