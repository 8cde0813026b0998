"""Verbs leave out the parts of a preset that they do not support."""

from typing import get_args

import pytest

from stepscope.jobs.precision import _without_idle_parts, check_settings
from stepscope.jobs.train import build_training
from stepscope.spec import WHOLE_STEP, Strategy, build_case, for_precisions, grid_from_flags


def test_precision_keeps_the_attention_only() -> None:
    grid = grid_from_flags({"preset": "fast", "size": "small"})
    check_settings(grid)
    (case,) = _without_idle_parts(grid).cases()
    assert case == build_case({"size": "small", "attention": "flash"})
    assert case.workload == for_precisions(case.workload)


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_training_applies_what_the_strategy_allows(strategy: Strategy) -> None:
    ranks = 1 if strategy == "single" else 2
    training = build_training(grid_from_flags({"preset": "fast"}), ranks=ranks, strategy=strategy, data="")
    workload = training.workload
    assert (workload.precision, workload.attention) == ("bf16", "flash")
    assert workload.optimizer == "adamw-onelaunch"
    assert {getattr(workload, name) for name in WHOLE_STEP} == {strategy == "single"}
    assert workload.compile == (strategy != "fsdp")
