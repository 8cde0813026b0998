"""bench/fused_kernels.py without a GPU: every kind of case runs, is checked, and has no times."""

import pytest
import torch

from fused_cases import Case, cases
from fused_kernels import count_bytes, measure

CPU = torch.device("cpu")
TINY = {case.name: case for case in cases(tiny=True)}


@pytest.mark.parametrize("case", TINY.values(), ids=list(TINY))
def test_every_case_is_accurate(case: Case) -> None:
    rows = measure(case, CPU, peers=["eager", "copy"])
    assert {row["implementation"] for row in rows} == {"ours", "eager", "copy"}
    assert {row["direction"] for row in rows} == {"forward", "backward", "both"}
    assert all(row["accurate"] and row["us"] is None for row in rows)


def test_bytes_count_each_tensor_once() -> None:
    """x, branch, weight; sum, y. Backward: the gradients of the results, the sum, the gradients of the inputs."""
    elements, width = 6 * 24, 24
    moved = count_bytes(TINY["add_rms_norm mixed 6x24"], CPU)
    inputs, results = elements * (4 + 2) + width * 4, elements * (4 + 2)
    assert moved["forward"] == inputs + results
    assert moved["backward"] == results + elements * 4 + inputs
    assert moved["both"] == moved["forward"] + moved["backward"]


def test_names_are_unique() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) > 40


def test_a_wrong_result_is_noticed() -> None:
    case = TINY["swiglu bf16 6x20"]
    wrong = Case(
        op=case.op,
        dtype=case.dtype,
        size=case.size,
        shapes=case.shapes,
        dtypes=case.dtypes,
        ours=lambda gate, up: (1.02 * case.ours(gate, up)[0],),
        eager=case.eager,
        peers={},
        saved=case.saved,
    )
    assert not any(row["accurate"] for row in measure(wrong, CPU, peers=[]))
