"""The workloads of bench/prediction.py can be built, so that a rented GPU does not find out that they cannot."""

from typing import Any

import pytest

from prediction import OUT_OF_MEMORY, is_expected
from prediction_cases import GROUPS, TRUTHS, Truth, shrink
from stepscope.spec import build_case

PROPOSALS = [one for one in TRUTHS.values() if one.group == "proposals"]
MOST_CONTEXT_BYTES = 2 << 30


def row(name: str, failure: str | None) -> dict[str, Any]:
    return {"name": name, "failure": failure}


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=lambda one: one.name)
def test_every_case_is_a_workload(truth: Truth) -> None:
    assert truth.group in GROUPS
    assert build_case(truth.settings).workload.batch > 0
    assert build_case(shrink(truth.settings) | {"device": "cpu"}).workload.context == 32


def test_proposals_run_under_a_limit_in_bytes_and_two_of_them_must_not_fit() -> None:
    limits = [build_case(one.settings).timing.memory_limit for one in PROPOSALS]
    assert all(isinstance(limit, int) and limit > MOST_CONTEXT_BYTES for limit in limits)
    assert sum(one.fits for one in PROPOSALS) >= 3
    assert sum(not one.fits for one in PROPOSALS) >= 2


def test_a_workload_that_is_too_large_must_run_out_of_memory() -> None:
    large, small = (next(one.name for one in PROPOSALS if one.fits == fits) for fits in (False, True))
    assert is_expected(row(large, OUT_OF_MEMORY), is_tiny=False)
    assert not is_expected(row(large, None), is_tiny=False)
    assert not is_expected(row(large, "no time left"), is_tiny=False)
    assert is_expected(row(large, None), is_tiny=True)
    assert is_expected(row(small, None), is_tiny=False)
    assert not is_expected(row(small, OUT_OF_MEMORY), is_tiny=False)
