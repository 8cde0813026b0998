"""A preset fills in what was not given, and leaves out what would not work."""

from pathlib import Path

import pytest

from stepscope.spec import (
    PRESETS,
    RUN_SETTINGS,
    WHOLE_STEP,
    SpecError,
    build_case,
    grid_from_flags,
    grid_from_settings,
    grid_from_toml,
)

FAST = {name: RUN_SETTINGS[name].show(value) for name, value in PRESETS["fast"].items()}


def applied(**flags: str) -> set[str]:
    """The parts of the preset in the only case of these flags."""
    (case,) = grid_from_flags({"preset": "fast", **flags}).cases()
    return {name for name, value in FAST.items() if RUN_SETTINGS[name].read(case.workload) == value}


def test_flags_toml_and_python_give_the_same_case(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('preset = "fast"\nsize = "small"\n')
    settings = {"size": "small", "preset": "fast"}
    (case,) = grid_from_toml(file).cases()
    assert grid_from_flags(settings).cases() == grid_from_settings(settings).cases() == (case,)
    assert case == build_case({"size": "small", **PRESETS["fast"]})
    assert applied() == set(FAST)


def test_preset_is_an_axis() -> None:
    plain, fast = grid_from_flags({"preset": "none,fast"}).cases()
    assert plain == build_case({})
    assert fast == build_case(PRESETS["fast"])
    assert len(grid_from_flags({"preset": "none,fast", "batch": "2,4"}).cases()) == 4


def test_given_settings_win() -> None:
    (case,) = grid_from_flags({"preset": "fast", "compile": "no", "attention": "sdpa"}).cases()
    assert (case.workload.compile, case.workload.attention, case.workload.graph) == (False, "sdpa", True)
    cases = grid_from_flags({"preset": "fast", "graph": "no,yes"}).cases()
    assert [case.workload.graph for case in cases] == [False, True]


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [
        ({"precision": "fp32"}, {"precision", "working_weights", "merge"}),
        ({"precision": "fp16"}, {"precision", *WHOLE_STEP}),
        ({"optimizer": "sgd"}, {"optimizer", "working_weights", "merge"}),
        ({"optimizer": "adamw-fused"}, {"optimizer"}),
        ({"working_weights": "no"}, {"working_weights", "merge"}),
        ({"mode": "forward"}, {"optimizer", *WHOLE_STEP}),
        ({"mode": "inference"}, {"optimizer", *WHOLE_STEP}),
        ({"hf": "gpt2"}, {"attention"}),
        ({"model": "mine:build"}, {"attention", "optimizer"}),
    ],
)
def test_parts_that_do_not_fit_are_left_out(flags: dict[str, str], left_out: set[str]) -> None:
    assert applied(**flags) == set(FAST) - left_out


def test_conflict_between_given_settings_is_still_an_error() -> None:
    with pytest.raises(SpecError, match="graph cannot be used with mode `forward`"):
        grid_from_flags({"preset": "fast", "mode": "forward", "graph": "yes"}).cases()


@pytest.mark.parametrize("value", ["fasst", "3"])
def test_unknown_preset_is_rejected(value: str) -> None:
    with pytest.raises(SpecError, match="unknown preset"):
        grid_from_flags({"preset": value}).cases()
    with pytest.raises(SpecError, match="unknown preset"):
        build_case({"preset": value})
