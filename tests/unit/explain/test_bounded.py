"""A trace read in windows gives the same results, to the nanosecond, as the same trace read at once."""

import errno
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.explain.trace import bounded, profile_tables
from stepscope.explain.trace.attribution import Attribution
from stepscope.explain.trace.profile import make_profile
from stepscope.explain.trace.summary import Summary, summarise
from stepscope.recording import windows
from stepscope.recording.readers import json_blocks, kineto
from stepscope.recording.windows import EventTable, Spill, choose_borders
from tests.unit.kineto_files import AUTOGRAD, MAIN, event, flow, kernel, launch, op, training_step, write_trace

EVALUATE = "autograd::engine::evaluate_function: "
GEMM, ADD = (
    "ampere_sgemm_128x64_nn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >",
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LOADER = 300  # a third thread


def set_sizes(patch: pytest.MonkeyPatch, window: int, run: int = 40, chunk: int = 3) -> None:
    for module in (bounded, windows):
        patch.setattr(module, "WINDOW_ROWS", window)
    patch.setattr(windows, "RUN_ROWS", run)
    patch.setattr(windows, "CHUNK_ROWS", chunk)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, 12)


def check_same(path: Path) -> Summary:
    """Compare both modes, including the tables for the terminal."""
    whole = make_profile(kineto.read(path))
    expected = summarise(whole, ())
    profile = bounded.make_bounded_profile(path, path.parent / "spilled")
    found = summarise(profile, ())
    assert found.notes == (*expected.notes, bounded.NOTE)
    assert msgspec.structs.replace(found, notes=expected.notes) == expected
    for name in bounded.PARTS:
        assert bounded.make_part(profile, name).rows == profile_tables.make_part(whole, name).rows
    for device in found.devices:
        for account in (device.account, *(one.account for one in device.streams)):
            assert sum(account.classes.values()) + account.overlap_ns + account.idle_ns == account.wall_ns
    assert not list((path.parent / "spilled").iterdir())
    return expected


def us(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"


def step(number: int, *, arrows: bool = True, delay_us: int = 0, marked: bool = True) -> list[str]:
    """One training step of 1 ms: a model of two blocks, its loss, its backward, gradients reduced on a second stream
    and an optimizer. Kernels run `delay_us` after their launch."""
    at = 10_000 + 1_000 * number
    first = 1_000 * number
    events = [event("user_annotation", f"ProfilerStep#{number}", f"{at}.000", "990.001")] if marked else []
    events.append(event("python_function", "nn.Module: Model_0", f"{at + 5}.000", "200.000"))
    events.append(event("user_annotation", "train", f"{at + 1}.000", "700.000"))

    def work(name: str, start: int, correlation: int, kernel_name: str, length_ns: int, **more: int) -> list[str]:
        thread = more.pop("thread", MAIN)
        ran = 1000 * (at + start + delay_us + 30) + correlation % 7
        return [
            op(
                name,
                f"{at + start}.000",
                "8.000",
                thread=thread,
                **{key.replace("_", " "): v for key, v in more.items()},
            ),
            launch(f"{at + start + 1}.000", "3.000", first + correlation, thread=thread),
            kernel(kernel_name, us(ran), us(length_ns), first + correlation, stream=7 + correlation % 2),
        ]

    for block in (0, 1):
        begin, sequence = 10 + 90 * block, 10 * number + block
        events.append(event("python_function", f"nn.Module: Block_{block}", f"{at + begin}.000", "80.000"))
        events.append(event("user_annotation", f"part {block}", f"{at + begin + 1}.000", "60.000"))
        events.append(event("python_function", f"nn.Module: Linear_{block}", f"{at + begin + 5}.000", "40.000"))
        events += work("aten::mm", begin + 6, 1 + block, GEMM, 31_007, Sequence_number=sequence)
        events += work("aten::relu", begin + 50, 3 + block, ADD, 9_001, Sequence_number=sequence + 5)
        backward = 400 + 50 * (1 - block)
        node = {"Sequence number": sequence, "Fwd thread id": 1}
        events.append(op(EVALUATE + "MmBackward0", f"{at + backward}.000", "20.000", thread=AUTOGRAD, **node))
        events += work("aten::mm", backward + 2, 5 + block, GEMM, 62_013, thread=AUTOGRAD)
        gather = {"Sequence number": 2**64 - 1, "Fwd thread id": 0}
        name = EVALUATE + "torch::autograd::AccumulateGrad"
        events.append(op(name, f"{at + backward + 21}.000", "20.000", thread=AUTOGRAD, **gather))
        events += work("aten::add_", backward + 21, 7 + block, ADD, 1_501, thread=AUTOGRAD)
        if arrows:
            events.append(flow("s", sequence, f"{at + begin + 6}.000", MAIN))
            events.append(flow("f", sequence, f"{at + backward}.000", AUTOGRAD))
    events += work(
        "aten::nll_loss", 210, 9, "nll_loss_forward_reduce_cuda_kernel_2d", 2_003, Sequence_number=10 * number + 8
    )
    events += work("c10d::allreduce_", 480, 10, NCCL, 400_001, thread=AUTOGRAD)  # from the hook of the last gradient
    events += work("aten::empty", 530, 11, ADD, 999, thread=AUTOGRAD)  # backward only because its thread is autograd's
    events.append(event("user_annotation", "Optimizer.step#AdamW.step", f"{at + 600}.000", "100.000"))
    events += work("aten::_foreach_add_", 610, 12, "void at::native::multi_tensor_apply_kernel<x>", 55_555)
    events += work("aten::to", 800, 13, "Memcpy HtoD (Pageable -> Device)", 5_005, thread=LOADER)
    return events


def steps(count: int, **options: bool | int) -> list[str]:
    return [one for number in range(count) for one in step(number, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("window", "arrows"), [(12, True), (60, True), (10_000, True), (12, False)])
def test_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, arrows: bool) -> None:
    set_sizes(monkeypatch, window)
    found = check_same(write_trace(tmp_path / "t.json", steps(8, arrows=arrows)))
    assert {one.phase for one in found.phases} >= {"forward", "loss", "backward", "optimizer"}
    assert {one.module for one in found.modules} >= {"Model_0.Block_1.Linear_1", "(communication)", "(optimizer)"}
    assert found.steps == 8
    assert found.overlap_ns > 0
    whole = make_profile(kineto.read(tmp_path / "t.json"))
    inside = {row[0]: (row[1], row[6]) for row in profile_tables.make_part(whole, "ranges").rows}
    assert inside["part 0"] == ("train", 0.062_013)  # its GEMM in backward


def test_there_are_many_small_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other tests compare one window with itself."""
    counts: list[int] = []

    def choose(tables: Sequence[EventTable], rows: int) -> list[int]:
        borders = choose_borders(tables, rows)
        counts.append(len(borders))
        return borders

    for module in (bounded, windows):
        monkeypatch.setattr(module, "choose_borders", choose)
    bounded.make_bounded_profile(write_trace(tmp_path / "t.json", steps(8)), tmp_path / "spilled")
    assert len(counts) == 10  # launches, flow arrows, operators, and seven over time
    assert min(counts) >= 1
    assert max(counts) >= 20


def test_trace_without_steps(tmp_path: Path) -> None:
    assert check_same(write_trace(tmp_path / "t.json", steps(5, marked=False))).steps == 1


def test_kernels_launched_many_windows_earlier(tmp_path: Path) -> None:
    """The CPU is four steps ahead of the device."""
    found = check_same(write_trace(tmp_path / "t.json", steps(6, delay_us=4_000)))
    assert [one.launched for one in found.launched] == ["op"]
    assert found.coverage.phase > 0.9


def test_kernels_launched_before_the_trace_are_those_of_later_steps(tmp_path: Path) -> None:
    hidden = [f'"correlation": {number}}}' for number in range(1, 9)]
    events = [one for one in steps(6) if '"cuda_runtime"' not in one or not any(part in one for part in hidden)]
    found = check_same(write_trace(tmp_path / "t.json", events))
    assert next(one for one in found.launched if one.launched == "before").count == 8
    assert found.coverage == check_same(write_trace(tmp_path / "t.json", steps(6))).coverage


def test_the_order_of_events_in_the_file_does_not_matter(tmp_path: Path) -> None:
    events = steps(4)
    random.Random(3).shuffle(events)
    check_same(write_trace(tmp_path / "t.json", events))


def test_kernels_across_borders_and_streams(tmp_path: Path) -> None:
    long = [
        kernel(NCCL, "10100.007", "4000.001", 90_001, stream=20),
        kernel(GEMM, "10050.003", "2500.500", 90_002, stream=21),
    ]
    found = check_same(write_trace(tmp_path / "t.json", [*steps(5), *long, kernel(ADD, "12345.678", "0", 90_003)]))
    account = found.devices[0].account
    assert account.communication_hidden_ns > 0
    assert account.communication_exposed_ns > 0
    assert next(one for one in found.launched if one.launched == "before").count == 3


def test_backward_many_windows_after_its_forward(tmp_path: Path) -> None:
    """All backward passes run at the end: operators and their nodes are never in one window."""
    events = []
    for number in range(25):
        at = 1_000 + 100 * number
        events.append(event("python_function", f"nn.Module: Layer_{number % 5}", f"{at}.000", "50.000"))
        events.append(op("aten::mm", f"{at + 5}.000", "20.000", **{"Sequence number": number}))
        events += [launch(f"{at + 6}.000", "2.000", number), kernel(GEMM, f"{at + 20}.000", "30.000", number)]
        back, node = 20_000 + 100 * (25 - number), {"Sequence number": number, "Fwd thread id": 1}
        events.append(op(EVALUATE + "MmBackward0", f"{back}.000", "50.000", thread=AUTOGRAD, **node))
        events.append(launch(f"{back + 6}.000", "2.000", 100 + number, thread=AUTOGRAD))
        events.append(kernel(GEMM, f"{back + 20}.000", "61.000", 100 + number))
    found = check_same(write_trace(tmp_path / "t.json", events))
    assert found.coverage.module == 1
    assert len(found.modules) == 5


def test_range_over_the_whole_trace_is_seen_in_every_window(tmp_path: Path) -> None:
    """stepscope's annotation around everything, in one call longer than any window."""
    events = [
        event("user_annotation", "module:(Model)", "9000.000", "20000.000"),
        event("user_annotation", "phase:forward", "9000.000", "5000.000"),
    ]
    events += [
        event("user_annotation", f"module:blocks.{n % 3}.mlp", f"{10_100 + n * 500}.000", "100.000") for n in range(10)
    ]
    found = check_same(write_trace(tmp_path / "t.json", [*steps(5), *events]))
    assert {one.module for one in found.modules} >= {"(Model)", "blocks.2.mlp"}


def test_module_recomputed_in_backward(tmp_path: Path) -> None:
    again = [
        event("python_function", "nn.Module: Block_0", f"{10_400 + 1_000 * n}.500", "15.000", tid=AUTOGRAD)
        for n in range(4)
    ]
    check_same(write_trace(tmp_path / "t.json", [*steps(4), *again]))


def test_backward_of_the_loss_without_any_module(tmp_path: Path) -> None:
    events = [one for one in steps(4) if "nn.Module" not in one]
    events += [event("user_annotation", "phase:loss", f"{10_000 + 1_000 * n}.000", "60.000") for n in range(4)]
    assert "(loss)" in {one.module for one in check_same(write_trace(tmp_path / "t.json", events)).modules}


def test_named_ranges_that_cross_between_threads(tmp_path: Path) -> None:
    """Which of two open ranges applies depends on one that ended before the window."""
    events = [
        event("user_annotation", "forward", "0.000", "100.000"),
        event("user_annotation", "backward", "10.000", "900.000", tid=LOADER),
        event("user_annotation", "Optimizer.step#A", "20.000", "900.000", tid=AUTOGRAD),
    ]
    for n in range(40):
        events += [launch(f"{30 + 20 * n}.000", "1.000", n, thread=400), kernel(ADD, f"{32 + 20 * n}.000", "5.000", n)]
    assert len(check_same(write_trace(tmp_path / "t.json", events)).phases) == 2


def test_evidence_of_backward_applies_to_all_windows(tmp_path: Path) -> None:
    """The phase of the first kernels depends on a backward pass at the end of the file."""
    events = []
    for n in range(30):
        events += [op("aten::add", f"{100 + 10 * n}.000", "5.000"), launch(f"{101 + 10 * n}.000", "1.000", n)]
        events.append(kernel(ADD, f"{103 + 10 * n}.000", "2.000", n))
    path = write_trace(tmp_path / "t.json", events)
    assert [one.phase for one in check_same(path).phases] == ["forward"]
    write_trace(path, [*events, event("user_annotation", "backward", "5000.000", "10.000")])
    assert [one.phase for one in check_same(path).phases] == ["unknown"]


def test_forward_and_backward_inside_the_optimizer(tmp_path: Path) -> None:
    around = [event("user_annotation", "Optimizer.step#B", f"{10_000 + 1_000 * n}.000", "900.000") for n in range(4)]
    events = [one for one in steps(4) if "nn.Module" not in one and "AdamW" not in one]
    found = check_same(write_trace(tmp_path / "t.json", [*events, *around]))
    assert {one.phase for one in found.phases} == {"forward", "loss", "backward", "optimizer"}


def test_a_trace_without_a_device(tmp_path: Path) -> None:
    events = []
    for n in range(25):
        at = 1_000 + 200 * n
        events += [op("aten::linear", f"{at}.000", "100.000"), op("aten::mm", f"{at + 1}.000", "98.000")]
        events += [op("aten::resolve_conj", f"{at + 2}.000", "1.000"), op("aten::add", f"{at + 120}.000", "10.000")]
        events.append(op("aten::mul", f"{at + 125}.000", "30.000", thread=LOADER))
    found = check_same(write_trace(tmp_path / "t.json", [*events, op("outer", "900.000", "5000.000")]))
    assert sum(one.count for one in found.kernels) == 75


def test_a_graph_replay(tmp_path: Path) -> None:
    events = []
    for n in range(9):
        events.append(launch(f"{100 + 50 * n}.000", "5.000", n, name="cudaGraphLaunch"))
        events += [kernel(GEMM, f"{110 + 50 * n + i}.000", "1.500", n, stream=7 + i % 2) for i in range(30)]
    assert [one.launched for one in check_same(write_trace(tmp_path / "t.json", events)).launched] == ["graph"]


def test_graphs_of_a_model_in_pieces(tmp_path: Path) -> None:
    """The pieces of a pass are in several windows; the second pass is launched one by one."""
    events = []
    for number in range(3):
        at, first = 1_000 * number, 100 * number
        events.append(event("python_function", "nn.Module: Model_0", f"{at}.000", "900.000"))
        for n in range(8):
            call = first + 10 * n
            is_graph = number != 1
            name = "cudaGraphLaunch" if is_graph else "cudaLaunchKernel"
            for i, one in enumerate((GEMM, ADD, GEMM, ADD, NCCL)):
                correlation = call if is_graph else call + i
                if i == 0 or not is_graph:
                    events.append(launch(f"{at + 100 * n + 10 * i + 1}.000", "1.000", correlation, name=name))
                    events += [] if is_graph else [op("aten::mm", f"{at + 100 * n + 10 * i}.000", "5.000")]
                events.append(kernel(one, f"{at + 100 * n + 10 * i + 5}.000", "2.000", correlation))
            events.append(op("aten::softmax", f"{at + 100 * n + 80}.000", "5.000"))
            events.append(launch(f"{at + 100 * n + 81}.000", "1.000", call + 9))
            events.append(kernel("softmax", f"{at + 100 * n + 90}.000", "2.000", call + 9))
    found = check_same(write_trace(tmp_path / "t.json", events))
    assert [(one.matched, one.count) for one in found.graphs] == [("eager", 80)]
    without = [one for one in events if not re.search(r'"correlation": 1\d\d\b', one)]
    found = check_same(write_trace(tmp_path / "u.json", without))
    assert [one.matched for one in found.graphs] == ["repetition"]


def test_repeated_correlation_refers_to_the_first_call(tmp_path: Path) -> None:
    events = [launch("10.000", "1.000", 5), *steps(5), launch("10600.000", "1.000", 5)]
    check_same(write_trace(tmp_path / "t.json", events))


def test_blocks_and_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Text that looks like the end of one event and the start of the next, so that cuts go through events.
    tricky: dict[str, Any] = {"list": [{"name": "a"}, {"name": "b"}] * 30, "Sequence number": 7}
    cut = [op(f"aten::cut{n}", f"{20_000 + 10 * n}.000", "9.000", **tricky) for n in range(12)]
    calls = [launch(f"{20_001 + 10 * n}.000", "1.000", 90_000 + n) for n in range(12)]
    kernels = [kernel(ADD, f"{20_005 + 10 * n}.000", "1.000", 90_000 + n) for n in range(12)]
    path = write_trace(tmp_path / "t.json.gz", [*steps(4), *cut, *calls, *kernels])
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 1_500)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 1_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 500)
    monkeypatch.setattr("stepscope.recording.readers.kineto_stream._BLOCKS_PER_BATCH", 2)
    check_same(path)


@pytest.mark.parametrize("share", [0.4, 0.97, 1])
def test_damage_gives_the_same_notes(tmp_path: Path, share: float) -> None:
    events = steps(4)
    events.insert(3, '{"ph": "X", "cat": "cpu_op", "name": "bad \\x escape", "ts": 5.000}')
    events.insert(40, kernel(GEMM, "10.000", "-3.000", 1))
    events.insert(50, event("user_annotation", "odd", "10.000", "-3.000"))
    events.insert(60, event("strange", "Command Buffer Full", "10.000", "3.000"))
    path = write_trace(tmp_path / "t.json", events)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    if share == 1:
        notes = list(check_same(path).notes)
    else:  # in memory, a truncated file is read up to its last kernel
        *notes, cut, _ = summarise(bounded.make_bounded_profile(path, tmp_path / "spilled"), ()).notes
        assert cut == bounded.CUT_NOTE
        assert kineto.read(path).manifest.notes[:-1] == tuple(notes)
    assert len(notes) == (3 if share == 1 else 4)
    assert notes[-1].startswith("2 events")


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_random_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Calls that nest on each of three threads, named ranges that cross between threads, kernels anywhere."""
    chance = random.Random(seed)
    set_sizes(monkeypatch, chance.choice([8, 25]), run=chance.choice([10, 50]), chunk=chance.choice([1, 4]))
    events: list[str] = []
    correlation = most = 0

    def call(thread: int, start: int, end: int, depth: int) -> None:
        nonlocal correlation
        while start < end and len(events) < most:
            start += chance.randrange(1, 3_000)
            stop = min(end, start + chance.randrange(1, 40_000 // (1 + depth)))
            if stop <= start:
                return
            begin, length, number = us(start), us(stop - start), chance.randrange(12)
            kind = chance.randrange(8)
            if kind == 0:
                name = chance.choice(["nn.Module: Block_0", "nn.Module: Block_1", "nn.Module: Linear_0"])
                events.append(event("python_function", name, begin, length, tid=thread))
            elif kind == 1:
                name = chance.choice(
                    ["forward", "Optimizer.step#A", "backward", "loss", "phase:loss", "ProfilerStep#3"]
                )
                events.append(event("user_annotation", name, begin, length, tid=thread))
            elif kind == 2:
                node = {"Sequence number": number, "Fwd thread id": chance.choice([0, 1, 2, thread])}
                name = EVALUATE + chance.choice(["MmBackward0", "torch::autograd::AccumulateGrad"])
                events.append(op(name, begin, length, thread=thread, **node))
            else:
                events.append(
                    op(
                        chance.choice(["aten::mm", "aten::nll_loss"]),
                        begin,
                        length,
                        thread=thread,
                        **{"Sequence number": number},
                    )
                )
            if chance.random() < 0.7:
                correlation += 1
                events.append(launch(begin, "0.001", correlation, thread=thread))
                ran = us(start + chance.randrange(90_000))
                name, length = chance.choice([GEMM, ADD, NCCL, "Memcpy HtoD"]), us(chance.randrange(30_000))
                events.append(kernel(name, ran, length, correlation, stream=chance.choice([7, 20])))
            if depth < 3:
                call(thread, start, stop, depth + 1)
            start = stop

    for thread in (MAIN, AUTOGRAD, LOADER):
        most = len(events) + 30
        call(thread, 1_000, 300_000, 0)
    # One forward thread is clearly the busiest: without flow arrows, thread numbers refer to it.
    events += [op("aten::add", us(400_000 + 10 * n), "0.001", **{"Sequence number": 99}) for n in range(30)]
    chance.shuffle(events)
    check_same(write_trace(tmp_path / "t.json", [*events, kernel(GEMM, "1.000", "1.000", 0)]))


def test_findings_and_single_kernels_are_not_available(tmp_path: Path) -> None:
    profile = bounded.make_bounded_profile(write_trace(tmp_path / "t.json", training_step()), tmp_path)
    assert "findings" in profile_tables.headline(profile)
    assert summarise(profile, ()).findings == ()
    assert [table.title for table in bounded.make_page(profile).tables] == [
        "Time by class",
        "Time by phase",
        "Kernels by time",
    ]
    with pytest.raises(StepscopeError, match="`findings` is not available"):
        bounded.make_part(profile, "findings")


@pytest.mark.parametrize(
    ("events", "said"), [([], "no readable events"), ([event("user_annotation", "a", "1", "2")], "no kernel timeline")]
)
def test_trace_without_kernels_is_an_error(tmp_path: Path, events: list[str], said: str) -> None:
    path = write_trace(tmp_path / "t.json", events)
    with pytest.raises(StepscopeError, match=said):
        bounded.make_bounded_profile(path, tmp_path / "spilled")
    assert not list((tmp_path / "spilled").iterdir())


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a mistake of ours")])
def test_temporary_files_are_removed_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    beside = tmp_path / "spilled"
    seen: list[Path] = []

    def fail(*_: object) -> None:
        seen.extend(path for path in beside.rglob("*") if path.is_file())
        raise failure

    monkeypatch.setattr(Attribution, "kernel_windows", fail)
    with pytest.raises(type(failure)):
        bounded.make_bounded_profile(write_trace(tmp_path / "t.json", steps(3)), beside)
    assert seen
    assert not list(beside.iterdir())


def test_a_full_disk_is_a_clean_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_ipc(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_ipc", write_ipc)
    with pytest.raises(StepscopeError, match="No space left") as caught:
        bounded.make_bounded_profile(write_trace(tmp_path / "t.json", steps(3)), tmp_path / "spilled")
    assert "needs disk space" in str(caught.value)
    assert not list((tmp_path / "spilled").iterdir())


def test_unwritable_directory_is_a_clean_error(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", training_step())
    with pytest.raises(StepscopeError, match="cannot write"):
        bounded.make_bounded_profile(path, path / "inside-a-file")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(-9, 9), max_size=60),
    st.lists(st.integers(-12, 12), unique=True, max_size=6),
    st.integers(1, 9),
)
def test_windows_return_every_row_once(tmp_path: Path, keys: list[int], borders: list[int], size: int) -> None:
    with windows.spilling(tmp_path) as disk, pytest.MonkeyPatch.context() as patch:
        set_sizes(patch, 10, run=2 * size, chunk=size)
        table = Spill(disk, "t", pl.col("key"), ("key", "place"))
        table.add(pl.DataFrame(schema={"key": pl.Int64, "place": pl.Int64}))
        for place, key in enumerate(keys):
            table.add(pl.DataFrame({"key": [key], "place": [place], "more": [0]}))
        edges = [-100, *sorted(borders), 100]
        for _ in range(2):
            found = list(table.windows(sorted(borders)))
            for low, high, window in zip(edges[:-1], edges[1:], found, strict=True):
                expected = sorted((key, place) for place, key in enumerate(keys) if low <= key < high)
                # Equal keys keep their order.
                assert window.sort("key", maintain_order=True).rows() == expected
        chosen = choose_borders([table], 5)
        assert chosen == sorted(set(chosen))
