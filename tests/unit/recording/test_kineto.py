"""PyTorch profiler traces: exact times, any layout, and notes about what is missing."""

import gzip
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.explain.trace.profile import make_profile
from stepscope.recording.readers import json_blocks, kineto, kineto_events, kineto_stream
from stepscope.recording.readers.python_frames import name_user_frame
from stepscope.recording.store import Recording
from tests.unit.kineto_files import event, kernel, launch, op, training_step, write_trace


def read(path: Path) -> Recording:
    return kineto.read(path)


def test_events_are_sorted_into_tables(tmp_path: Path) -> None:
    recording = read(write_trace(tmp_path / "t.json", training_step()))
    heights = {name: getattr(recording, name).height for name in ("kernels", "launches", "ops", "ranges", "links")}
    assert heights == {"kernels": 7, "launches": 6, "ops": 8, "ranges": 4, "links": 1}
    assert recording.manifest.device == "NVIDIA H200"
    assert recording.manifest.device_sms == 132
    assert recording.manifest.modules_recorded
    assert recording.manifest.shapes_recorded


def test_epoch_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    """A double holds 1712195495519689.123 as ….000 or ….250."""
    start = "1712195495519689.123"
    recording = read(write_trace(tmp_path / "t.json", [kernel("k", start, "0.007", 1), kernel("l", start, "5", 2)]))
    assert recording.kernels["start_ns"].to_list() == [1712195495519689123] * 2
    assert recording.kernels["end_ns"].to_list() == [1712195495519689130, 1712195495519694123]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5000),
        ("5.1", 5100),
        ("5.12", 5120),
        ("5.1239", 5123),
        ("1e3", 1_000_000),
        ('"7.5"', 7500),
        ("-1.5", -1500),
    ],
)
def test_a_time_is_read_in_any_form(text: str, expected: int) -> None:
    from msgspec import Raw

    for neighbours in ([], [Raw(b"1.000")], [Raw(b"12"), Raw(b"0.5")]):
        assert kineto_events.nanoseconds([*neighbours, Raw(text.encode())])[-1] == expected


@given(
    st.lists(st.tuples(st.integers(0, 9 * 10**15), st.one_of(st.none(), st.text("0123456789", min_size=1, max_size=3))))
)
def test_times_are_exact_for_all_digits(parts: list[tuple[int, str | None]]) -> None:
    from msgspec import Raw

    texts = [str(whole) if fraction is None else f"{whole}.{fraction}" for whole, fraction in parts]
    expected = [whole * 1000 + int(((fraction or "") + "000")[:3]) for whole, fraction in parts]
    assert kineto_events.nanoseconds([Raw(text.encode()) for text in texts]).tolist() == expected


def test_gzip_and_plain_read_the_same(tmp_path: Path) -> None:
    plain = read(write_trace(tmp_path / "t.json", training_step()))
    packed = read(write_trace(tmp_path / "t.json.gz", training_step()))
    assert plain.kernels.equals(packed.kernels)
    assert plain.ops.equals(packed.ops)


def test_old_category_names_and_stream_texts_are_read(tmp_path: Path) -> None:
    old = event("Kernel", "k", "10", "5", pid=0, tid="stream 7", args={"correlation": 3, "device": 0})
    events = [
        old,
        event("Runtime", "cudaLaunchKernel", "1", "2", args={"correlation": 3}),
        event("Operator", "aten::add", "0", "9"),
    ]
    recording = read(write_trace(tmp_path / "t.json", events))
    assert recording.kernels.select("name", "stream", "start_ns").rows() == [("k", 7, 10_000)]
    assert recording.launches.height == recording.ops.height == 1


def test_ranges_of_old_traces_are_not_operators(tmp_path: Path) -> None:
    """Before PyTorch 1.12, `record_function` ranges have the operators' category."""
    ranges = ["ProfilerStep#5", "Optimizer.step#SGD.step", "enumerate(DataLoader)#_Iter.__next__", "my range"]
    operators = ["aten::add", "detach_", "AddmmBackward", "torch::autograd::AccumulateGrad"]
    events = [event("Operator", name, f"{10 * i}", "9") for i, name in enumerate([*ranges, *operators])]
    events.append(event("Operator", "MyFunction", "100", "9", args={"Sequence number": 3}))
    recording = read(write_trace(tmp_path / "t.json", [*events, kernel("k", "120", "5", 1)]))
    assert recording.ranges.select("name", "source").rows() == [(name, "user") for name in ranges]
    assert recording.ops["name"].to_list() == [*operators, "MyFunction"]


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("[" + ",".join(training_step()) + "]")
    assert read(path).kernels.height == 7


def test_lists_in_the_properties_are_not_events(tmp_path: Path) -> None:
    properties = (
        ', "distributedInfo": {"rank": 3, "world_size": 8, "pg_config": [{"name": "a"}, {"name": "b"}]}, "x": [{}]'
    )
    recording = read(write_trace(tmp_path / "t.json", training_step(), properties=properties))
    assert (recording.manifest.rank, recording.manifest.world_size) == (3, 8)
    assert recording.kernels.height == 7
    assert not any("unreadable" in note for note in recording.manifest.notes)


def test_nothing_private_is_kept(tmp_path: Path) -> None:
    properties = ', "username": "somebody", "host_name": "box17", "traceName": "/home/somebody/t.json"'
    recording = read(write_trace(tmp_path / "t.json", training_step(), properties=properties))
    assert "somebody" not in repr(recording.manifest)
    assert "box17" not in repr(recording.manifest)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("packed", [False, True])
def test_truncated_trace_is_read_with_a_note(tmp_path: Path, share: float, packed: bool) -> None:
    whole = write_trace(tmp_path / "t.json", training_step() * 20).read_bytes()
    content = gzip.compress(whole) if packed else whole
    path = tmp_path / ("cut.json.gz" if packed else "cut.json")
    path.write_bytes(content[: int(len(content) * share)])
    recording = read(path)
    assert any("ends early" in note for note in recording.manifest.notes)
    assert recording.kernels.height + recording.ops.height > 0


def test_damaged_event_keeps_the_others(tmp_path: Path) -> None:
    events = training_step()
    events.insert(3, '{"ph": "X", "cat": "cpu_op", "name": "bad \\x escape", "ts": 5.000}')
    events.insert(9, '{"ph": "X", "cat": "cpu_op", "name": "nan", "ts": nan}')
    recording = read(write_trace(tmp_path / "t.json", events))
    assert recording.kernels.height == 7
    assert recording.ops.height == 8
    assert any(note.startswith("2 unreadable events") for note in recording.manifest.notes)


def test_event_survives_values_of_unexpected_types(tmp_path: Path) -> None:
    odd = event("kernel", "odd", "10.5", "1", pid=0, tid=7, args={"correlation": "none", "stream": 7, "device": None})
    recording = read(write_trace(tmp_path / "t.json", [odd, *training_step()]))
    assert recording.kernels.filter(pl.col("name") == "odd")["start_ns"].to_list() == [10_500]


def test_metadata_of_collectives_is_read(tmp_path: Path) -> None:
    message = {"In msg nelems": 100, "Out msg nelems": 800, "Group size": 8, "Process Group Name": "tp"}
    told: list[dict[str, Any]] = [
        {"Collective name": "_allgather_base", "dtype": "BFloat16", **message},
        {"Collective name": "_allgather_base", "dtype": "Novel", **message},
        {},
        {"Collective name": 3, "Group size": "many", "In msg nelems": None},
    ]
    events = [kernel("ncclDevKernel_AllGather", f"{place}0", "1", place, **args) for place, args in enumerate(told, 1)]
    kernels = read(write_trace(tmp_path / "t.json", [*training_step(), *events])).kernels
    ours = kernels.filter(pl.col("name").str.starts_with("nccl"))
    assert ours.select("collective", "process_group", "group_size", "bytes").rows() == [
        ("_allgather_base", "tp", 8, 1600),
        ("_allgather_base", "tp", 8, None),
        (None, None, None, None),
        (None, None, None, None),
    ]


def test_event_that_ends_before_it_starts_is_left_out_with_a_note(tmp_path: Path) -> None:
    recording = read(write_trace(tmp_path / "t.json", [kernel("k", "10.000", "-3.000", 1), *training_step()]))
    assert recording.kernels.height == 7
    assert any("invalid times" in note for note in recording.manifest.notes)


def test_blocks_and_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows whether a file is read as one block here or as many in processes."""
    events = [kernel(f"k{i % 7}", f"{i}.{i % 1000:03}", "0.500", i) for i in range(4000)]
    events += [launch(f"{i}.000", "0.100", i) for i in range(4000)]
    path = write_trace(tmp_path / "t.json", events)
    whole = read(path)
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 2_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 1_000)
    pieces = read(path)
    for table in ("kernels", "launches"):
        assert getattr(whole, table).equals(getattr(pieces, table))


@pytest.mark.parametrize("indent", [None, 1])
def test_parts_and_forgotten_texts_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    """A block is decoded in parts, and its decoder forgets texts after a while."""
    events = []
    for number in range(300):
        shapes = {"Input Dims": [[number % 50, 2], []], "Input type": ["float", ""]} if number % 3 else {}
        tricky = {"list": [{"name": "a"}, {"name": "b"}]} if number % 7 == 0 else {}
        events.append(op(f"aten::op{number % 40}", f"{number}.{number % 1000:03}", "0.500", **shapes, **tricky))
        events.append(kernel("" if number % 5 == 0 else f"k{number % 60}", f"{number}.250", "0.125", number))
    path = write_trace(tmp_path / "t.json", events)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=indent))
    whole = read(path)
    assert whole.ops["shapes"].n_unique() > 40
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 2_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 1_000)
    monkeypatch.setattr(kineto_events, "_PART_BYTES", 700)
    monkeypatch.setattr(kineto_events, "_MOST_TEXTS", 20)
    monkeypatch.setattr(kineto_stream, "_INLINE_BLOCKS", 1_000)
    pieces = read(path)
    for table in ("kernels", "ops"):
        assert getattr(whole, table).equals(getattr(pieces, table))


def test_event_cut_between_blocks_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of an event can contain text that looks like the boundary between two events."""
    tricky = {"list": [{"name": "a"}, {"name": "b"}] * 30}
    events = [op(f"aten::op{i}", f"{i}.000", "0.500", **tricky) for i in range(200)]
    path = write_trace(tmp_path / "t.json", events)
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 7_000)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 1_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 500)
    recording = read(path)
    assert recording.ops["name"].to_list() == [f"aten::op{i}" for i in range(200)]
    assert recording.manifest.notes == () or not any("unreadable" in one for one in recording.manifest.notes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"   \n", "empty"),
        (b"hello", "not a trace"),
        (b'{"a": 1}', "not a PyTorch profiler trace"),
        (b'{"traceEvents": []}', "no readable events"),
        (b'{"traceEvents": [1, 2, 3]}', "no readable events"),
        (b'{"traceEvents": [' + b"[" * 100_000, "no readable events"),
        (b'{"traceEvents": [{"args": ' + b'{"a":' * 50_000 + b"1", "no readable events"),
        (b"[" * 1_000_000, "not a trace"),
        (b"[\x93\x07 garbage }, {", "not a trace"),
        (b"[", "not a trace"),
        (b"\x1f\x8b\x08\x00garbage", "empty"),
    ],
)
def test_non_trace_is_an_error_without_traceback(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match=said):
        read(path)


def test_gzip_bomb_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_blocks, "_BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (64 << 20)))
    with pytest.raises(StepscopeError, match="× its size"):
        read(path)


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    recording = read(write_trace(tmp_path / "t.json", [kernel("A" * 1_000_000, "1", "2", 3)]))
    assert recording.kernels["name"].str.len_chars().to_list() == [16_384]


def test_operators_count_as_kernels_without_a_device(tmp_path: Path) -> None:
    """A GEMM counts although it calls an operator; an operator that only calls others does not."""
    events = [
        op("aten::matmul", "0.000", "100.000"),
        op("aten::mm", "1.000", "98.000"),
        op("aten::resolve_conj", "2.000", "1.000"),
        op("aten::add", "120.000", "10.000"),
    ]
    recording = read(write_trace(tmp_path / "t.json", events))
    assert recording.kernels.select("name", "kind").rows() == [("aten::mm", "cpu"), ("aten::add", "cpu")]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(1, 30))
@example(19761564, 6)  # a launch without a correlation, in a file without an end
def test_random_damage_is_survived(tmp_path: Path, seed: int, flips: int) -> None:
    content = bytearray(write_trace(tmp_path / "whole.json", training_step()).read_bytes())
    chance = random.Random(seed)
    for _ in range(flips):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    try:
        recording = read(path)
    except StepscopeError:
        return
    assert (recording.kernels["end_ns"] >= recording.kernels["start_ns"]).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: json.dumps({"traceEvents": [text]}).encode()))
def test_any_bytes_are_a_recording_or_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.json"
    path.write_bytes(content)
    with suppress(StepscopeError):
        read(path)


@pytest.mark.parametrize("ending", ["closed", "open"])
def test_a_string_longer_than_many_blocks_does_not_stop_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It once looped forever, waiting for a cut in a buffer that no longer grew."""
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 2_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 1_000)
    events = [
        kernel("a", "1.000", "1.000", 1),
        op("aten::x", "2.000", "1.000", s="y" * 100_000),
        kernel("b", "5", "1", 2),
    ]
    path = write_trace(tmp_path / "t.json", events)
    if ending == "open":
        path.write_bytes(path.read_bytes()[:60_000])
    recording = read(path)
    assert recording.kernels["name"].to_list() == (["a", "b"] if ending == "closed" else ["a"])


def test_extremely_long_event_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_blocks, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(json_blocks, "_TAIL_BYTES", 2_000)
    monkeypatch.setattr(json_blocks, "_READ_BYTES", 1_000)
    monkeypatch.setattr(json_blocks, "_LONGEST_EVENT", 50_000)
    with pytest.raises(StepscopeError, match="an event is longer than"):
        read(write_trace(tmp_path / "t.json", [op("aten::x", "2.000", "1.000", s="y" * 100_000)]))


@pytest.mark.parametrize("bad", ["1e999999999", "1" * 200, "1e30", "nan"])
def test_events_with_invalid_times_are_left_out(tmp_path: Path, bad: str) -> None:
    events = [kernel("good", "10.000", "5.000", 1), kernel("bad", bad, "5.000", 2), kernel("worse", "20.000", bad, 3)]
    recording = read(write_trace(tmp_path / "t.json", events))
    assert recording.kernels["name"].to_list() == ["good"]
    assert recording.manifest.notes


def test_truncated_gpu_trace_is_not_read_as_a_cpu_trace(tmp_path: Path) -> None:
    """The profiler writes kernels last: without them, operators must not count as kernels."""
    content = write_trace(
        tmp_path / "t.json", [op(f"aten::op{i}", f"{i}.000", "0.500") for i in range(100)]
    ).read_bytes()
    path = tmp_path / "cut.json"
    path.write_bytes(content[: len(content) // 2])
    assert read(path).kernels.height == 0


@pytest.mark.parametrize("has_loops", [True, False])
def test_compiled_code_works_in_its_loops_if_they_are_recorded(tmp_path: Path, *, has_loops: bool) -> None:
    """Otherwise its own time is that of the loops."""
    wrappers = ["Torch-Compiled Region: 0/0", "TorchDynamo Cache Lookup", "CompiledFunction"]
    spans = [("1", "99"), ("2", "97"), ("3", "95")]
    events = [op(name, start, lasts) for name, (start, lasts) in zip(wrappers, spans, strict=True)]
    events += [op("cpp_fused_add_0", "10", "5")] if has_loops else []
    found = read(write_trace(tmp_path / "t.json", [*events, op("aten::mm", "40", "20")])).kernels
    assert found["name"].to_list() == (["cpp_fused_add_0", "aten::mm"] if has_loops else ["CompiledFunction"])


def test_perfetto_exports_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "picture.json"
    path.write_text('{"displayTimeUnit":"ns","stepscope":"a picture","traceEvents":[' + training_step()[0] + "]}")
    with pytest.raises(StepscopeError, match="--perfetto"):
        read(path)


@pytest.mark.parametrize("launches_are_last", [False, True])
def test_truncated_gpu_trace_ends_with_its_kernels(tmp_path: Path, launches_are_last: bool) -> None:
    """Four steps of two kernels, cut before the first kernel of the third."""
    before: list[str] = []
    after: list[str] = []
    for step in range(4):
        start = 1000 + 100 * step
        before.append(event("user_annotation", f"ProfilerStep#{step}", f"{start}", "100"))
        for place in range(2):
            number, at = 2 * step + place, start + 48 * (place + 1)
            before.append(op("aten::mm", f"{at}", "2"))
            pair = [launch(f"{at}", "1", number), kernel("gemm", f"{at + 2}", "40", number)]
            (after if launches_are_last else before).append(pair[0])
            after.append(pair[1])
    path = write_trace(tmp_path / "t.json", [*before, *after])
    content = path.read_text()
    cut = after.index(kernel("gemm", "1250", "40", 4))
    path.write_text(content[: content.index(after[cut])].rstrip(", \n"))
    recording = read(path)
    assert recording.kernels["correlation"].to_list() == [0, 1, 2, 3]
    assert recording.ranges["name"].to_list() == ["ProfilerStep#0", "ProfilerStep#1"]
    assert recording.manifest.notes[-1] == (
        "only what came before the last known kernel is read, without 2 incomplete steps"
    )
    assert make_profile(recording).clock.num_steps == 2


def test_launches_without_kernels_are_not_a_cpu_trace(tmp_path: Path) -> None:
    events = [one for one in training_step() if '"cat": "kernel"' not in one]
    recording = read(write_trace(tmp_path / "t.json", events))
    assert recording.kernels.height == 0
    with pytest.raises(StepscopeError, match="no kernel timeline") as raised:
        make_profile(recording)
    assert "kernels were launched, but the profiler recorded none" in raised.value.detail


def host_calls(*calls: tuple[str, str, list[int], list[int]]) -> list[str]:
    """Operators without a GPU: the name of one, the name of one that it calls, and the microseconds of both in each
    call."""
    events = []
    for kind, (outer, inner, outer_us, inner_us) in enumerate(calls):
        for number, (long, short) in enumerate(zip(outer_us, inner_us, strict=True)):
            at = 10_000 * kind + 1_000 * number
            events += [op(outer, f"{at}.000", f"{long}.000"), op(inner, f"{at + 1}.000", f"{short}.000")]
    return events


def test_all_calls_of_a_cpu_operator_count_alike(tmp_path: Path) -> None:
    """Neither an interruption inside one call nor small inputs of most calls make a difference."""
    events = host_calls(
        ("aten::linear", "aten::addmm", [90, 90, 900], [80, 80, 890]),
        ("aten::mm", "aten::expand", [90, 90, 900], [5, 5, 890]),  # interrupted
        ("aten::div", "aten::to", [10, 10, 900], [8, 8, 8]),  # two scalars
        ("aten::abs", "aten::abs", [90, 90, 90], [80, 80, 80]),  # with an `out` argument
        ("c10d::_reduce_scatter_base_", "aten::clone", [90, 90, 90], [80, 80, 80]),  # queues a collective
    )
    kernels = kineto.read(write_trace(tmp_path / "t.json", events)).kernels
    names = ("aten::addmm", "aten::mm", "aten::div", "aten::abs", "c10d::_reduce_scatter_base_")
    assert kernels["name"].to_list() == [name for name in names for _ in range(3)]
    assert kernels["kind"].unique().to_list() == ["cpu"]


# --- Lines of the user's code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        ("train.py(12): train_step", "train.py:12 (train_step)"),
        ("lab/model.py(30): forward", "lab/model.py:30 (forward)"),
        ("/home/alice/secret/train.py(12): main", "train.py:12 (main)"),
        (r"C:\Users\alice\train.py(12): main", "train.py:12 (main)"),
        ("../../alice/train.py(12): main", "train.py:12 (main)"),
        ("alice/deep/project/train.py(3): <lambda>", "project/train.py:3 (<lambda>)"),
        ("train.py(1): <module>", ""),
        ("torch/nn/modules/module.py(1751): _call_impl", ""),
        ("/opt/venv/lib/python3.11/site-packages/foo/bar.py(3): run", ""),
        ("transformers/trainer.py(2345): training_step", ""),
        ("threading.py(982): run", ""),
        ("<built-in method mm of type object at 0x7f>", ""),
        ("nn.Module: Linear_0", ""),
    ],
)
def test_frames_of_the_user_are_named_without_private_directories(frame: str, expected: str) -> None:
    assert name_user_frame(frame) == expected


def test_operators_have_the_innermost_frame_of_the_user(tmp_path: Path) -> None:
    events = [
        *(one for one in training_step() if "helper" not in one),
        event("python_function", "/home/alice/train.py(5): main", "1000.000", "1000.000"),
        event("python_function", "lab/model.py(30): forward", "1015.000", "30.000"),
        event("python_function", "torch/nn/functional.py(8): linear", "1018.000", "20.000"),
    ]
    ops = kineto.read(write_trace(tmp_path / "trace.json", events)).ops
    assert dict(ops.select("name", "source").iter_rows())["aten::relu"] == "train.py:5 (main)"
    lines = ops.filter(pl.col("name") == "aten::linear")["source"].to_list()
    assert lines == ["lab/model.py:30 (forward)"]
    # In backward, the line of the operator that created the node.
    node = ops.filter(pl.col("name").str.ends_with("MmBackward0"))["source"].to_list()
    assert node == ["lab/model.py:30 (forward)"]
    assert ops.filter(pl.col("name").str.ends_with("AccumulateGrad"))["source"].to_list() == [None]


def test_operators_have_no_lines_without_stacks(tmp_path: Path) -> None:
    plain = [one for one in training_step() if "helper" not in one]
    assert kineto.read(write_trace(tmp_path / "trace.json", plain)).ops["source"].is_null().all()
