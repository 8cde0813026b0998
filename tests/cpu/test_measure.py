"""The timer, the peak memory and the quality checks."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.measure import environment
from stepscope.measure.environment import check_torch, describe, resolve_device
from stepscope.measure.failures import is_out_of_memory, mentions_out_of_memory
from stepscope.measure.soundness import MachineWatch, doubt_numbers, doubt_samples
from stepscope.measure.timing import Samples, time_steps
from stepscope.recording.rows.bench import Doubt
from stepscope.spec import build_case
from stepscope.step import Step, build

MS = 1_000_000


@dataclass
class Sleeper:
    """Replaces a step, with phases of a known duration."""

    phases: tuple[tuple[str, Callable[[], None]], ...]
    device: torch.device


def sleeper(**phases_s: float) -> Step:
    phases = tuple((name, lambda s=seconds: time.sleep(s)) for name, seconds in phases_s.items())
    return Sleeper(phases, torch.device("cpu"))  # type: ignore[return-value]


def samples(
    *step_ns: int, host_ns: tuple[int, ...] | None = None, enqueue_ns: tuple[int, ...] | None = None
) -> Samples:
    return Samples(
        phases_ns={"forward": list(step_ns)},
        step_ns=list(step_ns),
        host_step_ns=list(host_ns or step_ns),
        enqueue_ns=list(enqueue_ns or step_ns),
    )


def codes(found: Samples, warmup: int = 5) -> set[str]:
    return {doubt.code for doubt in doubt_samples(found, warmup=warmup)}


def test_phases_add_up_to_the_step() -> None:
    found = time_steps(sleeper(forward=0.002, backward=0.004), 3)
    assert len(found.step_ns) == 3
    for forward, backward, step in zip(
        found.phases_ns["forward"], found.phases_ns["backward"], found.step_ns, strict=True
    ):
        assert forward + backward == step
        assert forward >= 2 * MS
        assert backward >= 4 * MS


def test_repeated_phase_counts_as_the_sum_of_its_runs() -> None:
    once = sleeper(forward=0.002, backward=0.004)
    again = Sleeper((*once.phases, *once.phases, ("optimizer", lambda: None)), once.device)
    found = time_steps(again, 2)
    assert {name: len(values) for name, values in found.phases_ns.items()} == dict.fromkeys(found.phases_ns, 2)
    assert list(found.phases_ns) == ["forward", "backward", "optimizer"]
    assert [sum(step) for step in zip(*found.phases_ns.values(), strict=True)] == found.step_ns
    assert min(found.phases_ns["forward"]) >= 4 * MS
    assert min(found.phases_ns["backward"]) >= 8 * MS


def test_work_between_steps_is_not_timed() -> None:
    began = time.perf_counter_ns()
    found = time_steps(sleeper(forward=0.001), 3, after_step=lambda: time.sleep(0.05))
    assert sum(found.step_ns) <= time.perf_counter_ns() - began - 3 * 50 * MS


def test_quiet_run_has_no_remarks() -> None:
    assert codes(samples(*[100 * MS] * 10)) == set()


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (samples(*[100 * MS] * 3), "few"),
        (samples(*[100 * MS, 130 * MS] * 5), "spread"),
        (samples(200 * MS, *[100 * MS] * 9), "cold"),
        (samples(*[100 * MS] * 10, host_ns=(105 * MS,) * 10, enqueue_ns=(90 * MS,) * 10), "clocks"),
        (samples(*[100 * MS] * 10, enqueue_ns=(100 * MS - 65_000,) * 10), "host-bound"),
    ],
)
def test_each_remark_has_exactly_one_cause(found: Samples, code: str) -> None:
    assert codes(found) == {code}


def test_wait_of_microseconds_is_not_a_clock_disagreement() -> None:
    assert codes(samples(*[1 * MS] * 10, host_ns=(1 * MS + 60_000,) * 10, enqueue_ns=(MS // 2,) * 10)) == set()


def test_cpu_blocked_by_a_full_launch_queue_is_not_the_bottleneck() -> None:
    """It spends 98% of the step in launches, but the device is still 2 ms behind at the last launch."""
    assert codes(samples(*[100 * MS] * 10, enqueue_ns=(98 * MS,) * 10)) == set()


def test_numbers_that_a_step_leaves_behind() -> None:
    step = build(build_case({"size": "nano", "device": "cpu"}).workload, torch.device("cpu"))
    step.run()
    assert doubt_numbers(step) == []
    with torch.no_grad():
        parameter = next(step.module.parameters())
        parameter.fill_(1e-40)
        assert [doubt.code for doubt in doubt_numbers(step)] == ["denormal"]
        parameter.fill_(0.0)  # zero is not denormal
        assert doubt_numbers(step) == []
        parameter.grad = torch.full_like(parameter, 1e-40).to_sparse()  # of an embedding with sparse=True
        assert doubt_numbers(step) == []
        assert step.loss is not None
        step.loss.fill_(torch.inf)
        assert [doubt.code for doubt in doubt_numbers(step)] == ["not-finite"]


def test_requested_device_exists_or_raises() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    if not torch.cuda.is_available():
        assert resolve_device("auto") == torch.device("cpu")
        with pytest.raises(StepscopeError, match="no CUDA device"):
            resolve_device("cuda")


def test_cpu_has_a_measured_peak() -> None:
    hardware = describe(torch.device("cpu"), {"fp32"}).hardware
    assert hardware.source == "measured"
    assert set(hardware.peak_flops) == {"fp32"}
    assert 1e8 < hardware.peak_flops["fp32"] < 1e14


def test_cpu_has_a_measured_bandwidth_if_nothing_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineWatch, "doubts", lambda _: [])
    quiet = describe(torch.device("cpu"), {"fp32"}).hardware.bandwidth
    assert quiet is not None
    assert 1e8 < quiet < 1e13
    shared = Doubt(code="shared", text="other processes used 40% of the CPU")
    monkeypatch.setattr(MachineWatch, "doubts", lambda _: [shared])
    assert describe(torch.device("cpu"), {"fp32"}).hardware.bandwidth is None


def test_bandwidth_is_not_measured_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_bytes", lambda: 2**29)
    assert describe(torch.device("cpu"), {"fp32"}).hardware.bandwidth is None


def test_unsupported_torch_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch()
    for version in ("2.10.1", "2.14.0+cu130", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(StepscopeError, match="unsupported torch version"):
            check_torch()


def test_oom_is_distinguished_from_other_failures() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("the allocation of heads"))
    assert mentions_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")


def in_a_process(code: str) -> str:
    """Limits and peaks belong to a process; each test uses a new one."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_peak_counts_freed_memory_but_not_what_was_there_before() -> None:
    out = in_a_process(
        "import torch\n"
        "before = torch.ones(50_000_000)\n"
        "from stepscope.measure.memory.limits import HostMemory\n"
        "host = HostMemory()\n"
        "for _ in range(3):\n"
        "    tensor = torch.ones(25_000_000); del tensor\n"
        "print(host.peak_bytes())\n"
    )
    # The kernel sums resident pages over its cores lazily, some tens of kilobytes late.
    assert 99e6 <= int(out) < 130e6


def test_library_code_mapped_by_a_forked_process_does_not_count() -> None:
    """A fork starts without the libraries' pages and faults them in as it runs: tens of megabytes for a tiny model."""
    out = in_a_process(
        "import os, torch\n"
        "from stepscope.measure.memory.limits import HostMemory\n"
        "if os.fork() == 0:\n"
        "    host = HostMemory()\n"
        "    layer = torch.nn.Linear(64, 64); layer(torch.randn(8, 64)).sum().backward()\n"
        "    print(host.peak_bytes(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    assert int(out) < 12e6


def test_memory_limit_allows_what_fits_and_stops_what_does_not() -> None:
    out = in_a_process(
        "import torch\n"
        "from stepscope.measure.failures import is_out_of_memory\n"
        "from stepscope.measure.memory.limits import limit_memory\n"
        "limit_memory(torch.device('cpu'), 200_000_000)\n"
        "small = torch.ones(25_000_000); del small\n"
        "try:\n"
        "    torch.ones(75_000_000)\n"
        "except RuntimeError as error:\n"
        "    print('oom' if is_out_of_memory(error) else error)\n"
    )
    assert out == "oom"
