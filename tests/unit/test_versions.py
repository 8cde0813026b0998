"""Versions that are declared twice agree."""

import re
import tomllib
from pathlib import Path

import stepscope

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_the_package_knows_its_version() -> None:
    assert stepscope.__version__ == PROJECT["version"]


def test_torch_range_matches_the_checked_one() -> None:
    source = (Path(stepscope.__file__).parent / "measure/environment.py").read_text()
    low, high = re.findall(r"\((\d+), (\d+)\)", re.search(r"TORCH_RANGE = (.*)", source)[1])  # type: ignore[index]
    (torch,) = (line for line in PROJECT["optional-dependencies"]["train"] if line.startswith("torch"))
    assert torch == f"torch>={'.'.join(low)},<{'.'.join(high)}"
