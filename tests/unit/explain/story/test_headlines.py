"""The headline of every page fits two lines: pages of the committed results, of fixtures, and of ugly names."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from stepscope.api.inputs import read_runs
from stepscope.explain.story import Materials, tell, tell_both
from stepscope.explain.story.comparison.report import say_change
from stepscope.explain.story.comparison.side_by_side import label_sides
from stepscope.explain.story.opening import MOST_HEADLINE, Opening, say_run
from stepscope.explain.trace.profile import make_profile
from stepscope.findings import Report
from stepscope.spec import Scalar, build_case
from tests.unit.explain.story.story_materials import (
    FIXTURES,
    RESULTS,
    all_there,
    communicate,
    memory,
    product,
    record,
    record_ours,
    small_row,
)

TWO_LINES = 160  # characters at 1440 px
REPORTS = [RESULTS / "reports_h200" / name for name in ("medium-fast", "small-fp32", "small-fast")]
FILES = [
    *(RESULTS / "profile_h200").glob("small-*-compiled"),
    *(RESULTS / "memory_h200").glob("small-*"),
    *sorted(FIXTURES.glob("h200_*")),
    FIXTURES.parents[1] / "docs" / "examples" / "trace.json.gz",
]
UGLY = "/very/long/path/to/" + "a_model_with_an_endless_name_" * 20 + ".py"
MODELS: list[dict[str, Scalar]] = [
    {"model": f"{UGLY}:build"},
    {"model": f"{UGLY}:{'TheNetworkOfMyThesis' * 12}"},
    {"hf": UGLY.replace(".py", "/config.json")},
    {"d_model": 65536, "d_ff": 262144, "num_layers": 1000, "num_heads": 512},
]


@cache
def read(path: Path) -> Materials:
    (run,) = read_runs([path], command="", cached=False)
    return run


def check(report: Report) -> None:
    assert MOST_HEADLINE < TWO_LINES
    assert len(report.sentence) <= MOST_HEADLINE
    assert len(report.title) <= MOST_HEADLINE
    assert report.sentence.endswith(".")
    assert "\n" not in report.sentence


@pytest.mark.parametrize("path", [*REPORTS, *FILES], ids=lambda path: path.name)
def test_headline_of_a_committed_run_fits_two_lines(path: Path) -> None:
    said = say_run(Opening(read(path)))
    assert len(said) <= MOST_HEADLINE
    assert str(path.parent) not in said


@pytest.mark.parametrize("pair", [*pairwise(REPORTS)], ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_headline_of_a_committed_comparison_names_both_sides(pair: tuple[Path, Path]) -> None:
    a, b = map(read, pair)
    labels = label_sides(a, b)
    said = say_change(Opening(a), Opening(b), labels)
    assert len(said) <= MOST_HEADLINE
    assert said.startswith(f"{labels[1]} vs {labels[0]}: ")


def test_committed_reports_are_named_by_what_people_say() -> None:
    runs = {path.name: read(path) for path in REPORTS}
    assert say_run(Opening(runs["small-fast"])) == (
        "Small Transformer, 12 layers, d_model 768, 129M parameters: 29.2 ms per training step; the GPU waits for "
        "the CPU 57% of the time."
    )
    assert label_sides(runs["small-fp32"], runs["small-fast"]) == ("fp32 + naive", "bf16 + flash + compile")


@pytest.mark.parametrize("settings", MODELS, ids=["file", "class", "config", "shape"])
@pytest.mark.parametrize("mode", ["train", "forward-backward"])
def test_ugly_names_of_models_fit(settings: dict[str, Scalar], mode: str) -> None:
    case = build_case({**settings, "mode": mode, "compile": True, "attention": "flash", "device": "cuda:0"})
    slow = Materials(name=UGLY, profile=record_ours(product, case=case, host_us=2000))
    report = tell(slow)
    check(report)
    assert "/" not in report.sentence
    assert "/" not in report.title
    failed = small_row(status="crash")
    check(tell(Materials(name=UGLY, bench=(failed,))))
    check(tell_both(slow, Materials(name=f"{UGLY}2", profile=record_ours(product))))


def test_ugly_names_of_files_fit() -> None:
    profile = record(product, communicate, device="NVIDIA " + "B" * 500)
    unmarked = replace(profile.recording, ranges=profile.recording.ranges.head(0))
    for run in (
        Materials(name=UGLY, profile=profile),
        Materials(name=UGLY, profile=make_profile(unmarked)),
        Materials(name=UGLY),
        Materials(name=UGLY, memory=memory()),
        replace(all_there(), name=UGLY, profile=None, bench=(), memory=None),
        replace(all_there(), name=UGLY, profile=None, bench=(), memory=None, precision=None),
    ):
        check(tell(run))
        check(tell_both(run, Materials(name=UGLY + "2", profile=profile)))
