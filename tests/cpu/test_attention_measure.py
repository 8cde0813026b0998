"""Attention measured on a CPU: the check that can fail, the memory to the byte, and what a case leaves for the next."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.cost.attention import need_of_attention
from stepscope.kernels.attention import backends, hopper_launch, triton_launch
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
def test_right_results_pass_the_check(implementation: Implementation, precision: Precision, causal: bool) -> None:
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
def test_wrong_results_do_not(attend: Callable[[Tensor, Tensor, Tensor], Tensor], results: str) -> None:
    said = say_wrong(check(problem_of(attend)))
    assert said.startswith(f"{results} has a relative error of")


def test_a_wrong_gradient_of_the_last_sequence_alone_is_found() -> None:
    """Where an offset would overflow."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = functional.attention(q, k, v, causal=True)
        return torch.cat((out[:-1], out[-1:] + 0.01 * v[-1:]))

    assert say_wrong(check(problem_of(attend))) != ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_memory_of_the_reference_is_its_closed_form_to_the_byte(precision: Precision, causal: bool) -> None:
    case = make_case(precision=precision, causal=causal, heads=3)
    problem = make_problem(case, CPU)
    problem.backward(problem.forward())
    memory, need = weigh(problem), need_of_attention(case)
    assert memory.input_bytes == 4 * case.tensor_bytes
    assert memory.before_backward_bytes == need.before_backward_bytes
    assert memory.peak_bytes == need.peak_bytes
    assert memory.peak_reserved_bytes is None


@pytest.mark.parametrize("implementation", ["tiled", "sdpa"])
def test_flash_keeps_what_its_closed_form_says_and_peaks_above_it(implementation: Implementation) -> None:
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
    """What becomes of cases when attention is computed by `attend`, which is given the length too."""

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


def test_running_out_of_memory_costs_its_own_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if length == 32:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB")
        return reference(q, k, v)

    statuses = outcomes(monkeypatch, attend, 16, 32, 64)
    assert [status for status, _ in statuses] == ["ok", "oom", "ok"]
    assert "Tried to allocate 32.00 GiB" in statuses[1][1]


def test_what_an_implementation_cannot_do_is_said_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if length == 32:
            raise UnsupportedError("`backend` `hopper` cannot run this: D 80")
        return reference(q, k, v)

    assert outcomes(monkeypatch, attend, 16, 32)[1] == ("unsupported", "`backend` `hopper` cannot run this: D 80")


def test_a_wrong_result_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference(q, k, v) * (1.01 if length == 32 else 1)

    statuses = outcomes(monkeypatch, attend, 16, 32, 64)
    assert [status for status, _ in statuses] == ["ok", "wrong", "ok"]
    assert statuses[1][1].startswith("output has a relative error of 0.01")


def test_a_compiler_forgets_each_shape_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compile for varying shapes from the second on, and refuse the ninth."""
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


def test_what_cannot_fit_by_far_is_not_tried() -> None:
    case = make_case(length=2**20, batch=8, head_dim=1)
    (outcome,) = measure_cases([case], on_stage=lambda _: pytest.fail("it was tried"))
    assert outcome.status == "oom"
    assert outcome.reason.startswith("not tried: it takes 197,632 GiB")


class Launched:
    """In the place of a kernel: takes its arguments and leaves memory as it is."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.mark.parametrize("length", [100, 128, 130])
@pytest.mark.parametrize("implementation", ["triton", "hopper"])
def test_launchers_take_the_memory_of_the_closed_form(
    implementation: Implementation, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel works in is its launcher's, so without a GPU the launchers can be weighed without their kernels."""
    for module in (hopper_launch, triton_launch):
        for name in [name for name in vars(module) if name.startswith("attention_")]:
            monkeypatch.setattr(module, name, Launched())
    monkeypatch.setattr(hopper_launch, "_count_multiprocessors", lambda _: 132)
    functions = backends.FUNCTIONS[implementation]._replace(refuse=lambda _: None)
    monkeypatch.setitem(backends.FUNCTIONS, implementation, functions)
    case = make_case(implementation=implementation, length=length, head_dim=64, precision="bf16")
    memory, need = weigh(make_problem(case, CPU)), need_of_attention(case)
    assert (need.before_backward_bound, need.peak_bound) == ("exact", "exact")
    assert (memory.before_backward_bytes, memory.peak_bytes) == (need.before_backward_bytes, need.peak_bytes)
