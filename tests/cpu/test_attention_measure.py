"""Attention measured on a CPU: the correctness check can fail, memory is exact to the byte, and cases do not affect
each other.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.cost.attention import need_of_attention
from stepscope.kernels.attention import backends, triton_launch
from stepscope.kernels.attention.hopper import launch as hopper_launch
from stepscope.kernels.attention.problem import UnsupportedError
from stepscope.measure.attention import cases as measure
from stepscope.measure.attention.cases import measure_cases
from stepscope.measure.attention.memory import weigh
from stepscope.measure.attention.problem import RandomAttention, check, make_problem, say_wrong
from stepscope.measure.attention.timing import time_attention
from stepscope.nn import functional
from stepscope.recording.rows.attention_case import AttentionCase
from stepscope.spec import Precision
from stepscope.spec.backends import Implementation

CPU = torch.device("cpu")


def make_case(
    implementation: Implementation = "naive", *, precision: Precision = "fp32", length: int = 96, **more: Any
) -> AttentionCase:
    settings: dict[str, Any] = {"batch": 2, "head_dim": 16, "repetitions": 2, "seconds": 0.01} | more
    return AttentionCase(implementation=implementation, precision=precision, length=length, device="cpu", **settings)


def problem_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *, causal: bool = True) -> RandomAttention:
    plain = make_problem(make_case(causal=causal, heads=2), CPU)
    return RandomAttention(q=plain.q, k=plain.k, v=plain.v, upstream=plain.upstream, causal=causal, attend=attend)


@pytest.mark.parametrize("implementation", ["naive", "tiled", "sdpa"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_correct_results_pass_the_check(implementation: Implementation, precision: Precision, causal: bool) -> None:
    case = make_case(implementation, precision=precision, causal=causal, length=100)
    accuracies = check(make_problem(case, CPU))
    assert [one.result for one in accuracies] == ["output", "dq", "dk", "dv"]
    assert say_wrong(accuracies) == ""
    assert all(0 < one.limit < 0.2 for one in accuracies)


def wrong_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.attention(q, k, v, causal=False)


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.attention(q, k.detach() + 0 * k, v, causal=True)


def not_a_number(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.attention(q, k, v, causal=True) * float("nan")


@pytest.mark.parametrize(
    ("attend", "results"),
    [(wrong_output, "output"), (wrong_gradient, "dk"), (not_a_number, "output")],
)
def test_wrong_results_fail_the_check(attend: Callable[[Tensor, Tensor, Tensor], Tensor], results: str) -> None:
    said = say_wrong(check(problem_of(attend)))
    assert said.startswith(f"{results} has a relative error of")


def test_wrong_gradient_only_in_the_last_sequence_is_found() -> None:
    """Where an offset would overflow."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = functional.attention(q, k, v, causal=True)
        return torch.cat((out[:-1], out[-1:] + 0.01 * v[-1:]))

    assert say_wrong(check(problem_of(attend))) != ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_memory_of_the_reference_matches_the_formula_to_the_byte(precision: Precision, causal: bool) -> None:
    case = make_case(precision=precision, causal=causal, heads=3)
    problem = make_problem(case, CPU)
    problem.backward(problem.forward())
    memory, need = weigh(problem), need_of_attention(case)
    assert memory.input_bytes == 4 * case.tensor_bytes
    assert memory.before_backward_bytes == need.before_backward_bytes
    assert memory.peak_bytes == need.peak_bytes
    assert memory.peak_reserved_bytes is None


@pytest.mark.parametrize("implementation", ["tiled", "sdpa"])
def test_flash_saves_what_the_formula_says_and_peaks_above_it(implementation: Implementation) -> None:
    case = make_case(implementation, length=300)
    memory, need = weigh(make_problem(case, CPU)), need_of_attention(case)
    assert memory.before_backward_bytes == need.before_backward_bytes
    assert memory.peak_bytes >= need.peak_bytes


def test_repetitions_or_seconds_whichever_comes_first() -> None:
    problem = make_problem(make_case(length=8), CPU)
    by_number = time_attention(problem, repetitions=7, seconds=60)
    assert [len(one.samples_ns) for one in by_number] == [7, 7, 7]
    by_time = time_attention(problem, repetitions=10**9, seconds=0.002)
    assert all(5 <= len(one.samples_ns) < 10_000 for one in by_time)


def test_backward_is_timed_without_its_forward() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time.sleep(0.02)
        return q + k + v

    _, backward, both = time_attention(problem_of(attend), repetitions=3, seconds=10)
    assert min(both.samples_ns) > 20_000_000 > min(backward.samples_ns)


def outcomes(monkeypatch: pytest.MonkeyPatch, attend: Callable[..., Tensor], *lengths: int) -> list[tuple[str, str]]:
    """Return the outcome of cases when attention is computed by `attend`, which also gets the length."""

    def make(case: AttentionCase, device: torch.device) -> RandomAttention:
        plain = make_problem(case, device)
        return RandomAttention(
            q=plain.q,
            k=plain.k,
            v=plain.v,
            upstream=plain.upstream,
            causal=case.causal,
            attend=functools.partial(attend, case.length),
        )

    monkeypatch.setattr(measure, "make_problem", make)
    cases = [make_case(length=length) for length in lengths]
    return [(one.status, one.reason) for one in measure_cases(cases, on_stage=lambda _: None)]


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.attention(q, k, v, causal=True)


def test_oom_case_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB")
        return reference(q, k, v)

    statuses = outcomes(monkeypatch, attend, 16, 32, 64)
    assert [status for status, _ in statuses] == ["ok", "oom", "ok"]
    assert "Tried to allocate 32.00 GiB" in statuses[1][1]


def test_unsupported_case_has_the_reason_of_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if length == 32:
            raise UnsupportedError("`backend` `hopper` cannot run this: D 80")
        return reference(q, k, v)

    assert outcomes(monkeypatch, attend, 16, 32)[1] == ("unsupported", "`backend` `hopper` cannot run this: D 80")


def test_wrong_result_fails_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v) * (1.01 if length == 32 else 1)

    statuses = outcomes(monkeypatch, attend, 16, 32, 64)
    assert [status for status, _ in statuses] == ["ok", "wrong", "ok"]
    assert statuses[1][1].startswith("output has a relative error of 0.01")


def test_compiler_cache_is_reset_between_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compile for dynamic shapes from the second on, and refuse the ninth."""
    forgotten: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(1))
    cases = [make_case("compiled", length=2**20, head_dim=1, batch=8 + number) for number in range(3)]
    assert [one.status for one in measure_cases(cases, on_stage=lambda _: None)] == ["oom"] * 3
    assert len(forgotten) == 3


def test_any_other_failure_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        outcomes(monkeypatch, attend, 16)


def test_hopeless_case_is_not_tried() -> None:
    case = make_case(length=2**20, batch=8, head_dim=1)
    (outcome,) = measure_cases([case], on_stage=lambda _: pytest.fail("it was tried"))
    assert outcome.status == "oom"
    assert outcome.reason.startswith("not tried: needs an estimated 197,632 GiB")


class Launched:
    """Replaces a kernel: takes its arguments and leaves memory unchanged."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize("length", [100, 128, 130])
@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_launchers_allocate_what_the_formula_says(
    implementation: Implementation, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel's workspace belongs to its launcher, so launchers can be measured without their kernels and a GPU."""
    for name in [name for name in vars(triton_launch) if name.startswith("attention_")]:
        monkeypatch.setattr(triton_launch, name, Launched())
    monkeypatch.setattr(hopper_launch, "Launch", lambda *_, **__: lambda *_: None)
    monkeypatch.setattr(hopper_launch, "_plans", {})
    monkeypatch.setattr(hopper_launch, "_count_multiprocessors", lambda _: 132)
    functions = backends.FUNCTIONS[implementation]._replace(refuse=lambda _: None)
    monkeypatch.setitem(backends.FUNCTIONS, implementation, functions)
    case = make_case(implementation=implementation, length=length, head_dim=64, precision="bf16")
    memory, need = weigh(make_problem(case, CPU)), need_of_attention(case)
    assert (need.before_backward_bound, need.peak_bound) == ("exact", "exact")
    assert (memory.before_backward_bytes, memory.peak_bytes) == (need.before_backward_bytes, need.peak_bytes)
