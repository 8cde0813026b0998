"""The registry of attention backends, and whether other lists agree with it."""

from itertools import groupby
from pathlib import Path

import pytest

from stepscope.jobs.experiments.flag_grids import AttentionGrid
from stepscope.recording.rows.attention_case import IMPLEMENTATIONS
from stepscope.spec.backends import BACKENDS, AttentionBackend, DeviceKind, compared_on

DOCS = Path(__file__).parents[3] / "docs"


def quote(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def summary_of(backend: AttentionBackend) -> str:
    return backend.summary


def test_documentation_quotes_the_summary_of_every_backend() -> None:
    lines = (DOCS / "attention.md").read_text().splitlines()
    start = lines.index("| implementation | description |") + 2
    rows = [
        f"| {quote(tuple(one.name for one in alike))} | {summary} |"
        for summary, alike in groupby(BACKENDS.values(), summary_of)
    ]
    assert lines[start : start + len(rows) + 1] == [*rows, ""]


@pytest.mark.parametrize("page", ["attention.md", "kernels.md"])
@pytest.mark.parametrize("name", BACKENDS)
def test_both_pages_name_every_backend(page: str, name: str) -> None:
    assert f"`{name}`" in (DOCS / page).read_text()


def test_documentation_lists_the_default_backends_of_each_device() -> None:
    (row,) = (line for line in (DOCS / "attention.md").read_text().splitlines() if line.startswith("| `--impl"))
    assert row.split(" | ")[2:] == [quote(compared_on("cuda")), f"{quote(compared_on('cpu'))} |"]


@pytest.mark.parametrize(
    ("device", "fast", "half", "expected"),
    [
        ("cpu", False, True, {"naive", "sdpa", "tiled"}),
        ("cpu", True, False, {"naive", "sdpa", "tiled"}),
        ("cuda", False, True, set(IMPLEMENTATIONS) - {"sdpa", "sdpa-math", "fa4"}),
        ("cuda", True, True, {"naive", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "triton", "hopper"}),
        ("cuda", True, False, {"naive", "sdpa-efficient", "triton"}),
    ],
)
def test_default_backends_depend_on_device_time_and_precision(
    device: DeviceKind, fast: bool, half: bool, expected: set[str]
) -> None:
    found = compared_on(device, fast=fast, half=half)
    assert set(found) == expected
    assert list(found) == [name for name in IMPLEMENTATIONS if name in found]


def test_default_grid_limits_the_length_of_slow_backends() -> None:
    cases = AttentionGrid().cases("cuda")
    longest = {name: max(case.length for case in cases if case.implementation == name) for name in compared_on("cuda")}
    assert longest == {name: 8192 if name == "tiled" else 65536 for name in compared_on("cuda")}
