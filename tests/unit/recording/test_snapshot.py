"""Memory snapshots become tables; hostile or damaged ones are errors, and nothing in them is run."""

import copyreg
import gc
import gzip
import os
import pickle
import pickletools
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.recording.memory import snapshot_pickle
from stepscope.recording.memory.snapshot import EVENT_SCHEMA, AllocatorSettings, Snapshot, read_snapshot, shorten_path
from tests.unit.snapshot_files import MIB, Entry, Model, empty, event, frame, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshot.pickle"


def read(content: object, path: Path) -> Snapshot:
    return read_snapshot(write(content, path))


def refusal(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    with pytest.raises(StepscopeError) as caught:
        read_snapshot(path)
    return str(caught.value)


def short_programme() -> Model:
    model = Model(frames=[frame("/home/alice/work/deep/run/train.py", 12, "step"), frame("/usr/lib/python3/x.py", 3)])
    kept = model.malloc(3 * MIB, metadata="layer 1")
    model.free(model.malloc(100, stream=7))
    model.free(model.malloc(5000), complete=False)
    model.run_out(10**12)
    assert model.live() == [kept]
    return model


# Valid snapshots


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read_plain_or_gzipped(path: Path, protocol: int, zipped: bool) -> None:
    model = short_programme()
    trace = read_snapshot(write(model.snapshot(), path, protocol=protocol, zipped=zipped)).traces[0]
    assert dict(trace.events.schema) == EVENT_SCHEMA
    assert trace.events["action"].cast(pl.String).to_list() == [entry["action"] for entry in model.entries]
    assert trace.events["bytes"].to_list() == [entry["size"] for entry in model.entries]
    assert trace.events["time_ns"].to_list() == [entry["time_us"] * 1000 for entry in model.entries]
    assert trace.events["stream"].to_list() == [entry["stream"] for entry in model.entries]


def test_oom_event_has_no_address(path: Path) -> None:
    model = short_programme()
    events = read(model.snapshot(), path).traces[0].events
    assert events["address"].to_list() == [entry.get("addr") for entry in model.entries]
    assert events["address"].null_count() == 1


def test_segments_and_blocks_are_from_the_end(path: Path) -> None:
    model = short_programme()
    segments = read(model.snapshot(), path).traces[0].segments_at_end
    assert [(one.address, one.bytes, one.stream, one.small) for one in segments] == [
        (part.address, part.size, part.stream, part.small) for part in model.parts
    ]
    states = [(block.state, block.requested_bytes) for one in segments for block in one.blocks]
    assert states == [("allocated", 3 * MIB), ("free", 0), ("free", 100), ("pending", 5000), ("free", 0)]
    assert [block.stack for block in segments[0].blocks] == [0, None]


def test_stacks_are_stored_once_without_home_directories(path: Path) -> None:
    ours = frame("/home/alice/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", 134, "forward")
    theirs = [frame("/home/alice/train.py", 7, "main\nloop"), ours]
    content = empty(event(frames=[ours]), event(frames=theirs), event(frames=list(theirs)), event(frames=[dict(ours)]))
    snapshot = read(content, path)
    assert snapshot.stacks == (
        "torch/nn/modules/linear.py:134 forward",
        "train.py:7 main loop\ntorch/nn/modules/linear.py:134 forward",
    )
    assert snapshot.traces[0].events["stack"].to_list() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/a/b/dist-packages/numpy/core/x.py", "numpy/core/x.py"),
        ("/venv/site-packages/p/site-packages/q.py", "q.py"),
        ("/opt/project/models/gpt/block.py", "models/gpt/block.py"),
        ("/home/alice/train.py", "train.py"),
        ("/data/users/alice/lab/run.py", "lab/run.py"),
        ("/home/alice", "alice"),
        ("C:\\Users\\Alice\\code\\train.py", "code/train.py"),
        ("/tmp/torchinductor_alice/ab/cab.py", "torchinductor/ab/cab.py"),
        ("<eval_with_key>.12", "<eval_with_key>.12"),
        ("??", "??"),
        ("model/layer.py", "model/layer.py"),
    ],
)
def test_shortened_paths_identify_code_but_not_users(name: str, short: str) -> None:
    assert shorten_path(name) == short


def test_metadata_and_labels_are_kept(path: Path) -> None:
    told = [event(user_metadata=text) for text in ("step 1", "", "step 2", "step 1")]
    snapshot = read({**empty(*told), "stepscope": {"phases": [1, 2]}}, path)
    assert snapshot.metadata == ("step 1", "step 2")
    assert snapshot.traces[0].events["metadata"].to_list() == [0, None, 1, 0]
    assert snapshot.labels == {"phases": [1, 2]}
    assert read(empty(), path).labels is None


def test_two_devices_are_two_traces(path: Path) -> None:
    model = short_programme()
    content = {
        "segments": [*model.segments(device=2), *model.segments(device=0)],
        "device_traces": [[event()], [], [event(size=7), event(size=9)], []],
    }
    traces = read(content, path).traces
    assert [(trace.device, trace.events.height, len(trace.segments_at_end)) for trace in traces] == [
        (0, 1, 3),
        (2, 2, 3),
    ]


def test_device_with_only_segments_is_a_trace(path: Path) -> None:
    content = {"segments": short_programme().segments(device=1), "device_traces": []}
    (trace,) = read(content, path).traces
    assert (trace.device, trace.events.height) == (1, 0)


def test_old_snapshots_lack_times_frames_and_addresses_of_blocks(path: Path) -> None:
    content = short_programme().snapshot()
    del content["allocator_settings"]
    for entry in content["device_traces"][0]:
        for key in ("time_us", "frames", "user_metadata"):
            del entry[key]
    for segment in content["segments"]:
        for key in ("device", "frames", "is_expandable"):
            del segment[key]
        for block in segment["blocks"]:
            for key in ("address", "requested_size", "frames"):
                del block[key]
    (trace,) = read(content, path).traces
    for name in ("time_ns", "stack", "metadata"):
        assert trace.events[name].null_count() == trace.events.height
    blocks = trace.segments_at_end[0].blocks
    assert blocks[1].address == blocks[0].address + blocks[0].bytes
    assert blocks[0].requested_bytes is None
    assert trace.settings == AllocatorSettings()


def test_settings_define_how_blocks_are_split(path: Path) -> None:
    expandable = Model(expandable=True)
    expandable.malloc(5)
    assert read(expandable.snapshot(), path).traces[0].settings.expandable_segments
    untold = expandable.snapshot()
    del untold["allocator_settings"]
    assert read(untold, path).traces[0].settings.expandable_segments
    limited = Model(max_split=64 * MIB, divisions=4)
    limited.malloc(5)
    assert read(limited.snapshot(), path).traces[0].settings == AllocatorSettings(
        max_split_bytes=64 * MIB, roundup_divisions=(4,) * 16
    )


def test_an_action_of_a_later_version_is_kept_as_other(path: Path) -> None:
    later = event("defragment")
    del later["addr"]
    events = read(empty(later, event()), path).traces[0].events
    assert events["action"].to_list() == ["other", "alloc"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_of_a_dict_is_recognized_by_its_first_bytes(protocol: int) -> None:
    assert snapshot_pickle.begins_like_pickle(pickle.dumps(empty(), protocol=protocol))
    for other in (b"", b"{", b"[1]", b"SQLite format 3\0", b"==PROF==", b'"Kernel Name"', b"(hello)"):
        assert not snapshot_pickle.begins_like_pickle(other)


# Hostile files


class Creates:
    """Creates a directory if it is unpickled unsafely."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._target),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("zipped", [False, True])
def test_functions_in_a_pickle_are_not_called(tmp_path: Path, path: Path, protocol: int, zipped: bool) -> None:
    target = tmp_path / "created"
    hostile = {**empty(), "extra": Creates(target)}
    write(hostile, path, protocol=protocol, zipped=zipped)
    with pytest.raises(StepscopeError, match=r"tries to import `(posix|os)\.mkdir`") as caught:
        read_snapshot(path)
    assert "nothing was run" in str(caught.value)
    assert not target.exists()
    pickle.loads(pickle.dumps(hostile))  # plain unpickling calls it
    assert target.exists()


@pytest.mark.parametrize("name", ["builtins.getattr", "collections.OrderedDict", "numpy.ndarray", "torch.Tensor"])
def test_every_name_is_rejected(path: Path, name: str) -> None:
    module, _, member = name.partition(".")
    assert f"tries to import `{name}`" in refusal(f"c{module}\n{member}\n.".encode(), path)
    assert f"tries to import `{name}`" in refusal(f"(i{module}\n{member}\n.".encode(), path)


@pytest.mark.parametrize("opcode", [b"\x82\xf0", b"\x83\xf0\x00", b"\x84\xf0\x00\x00\x00"])
@pytest.mark.parametrize("used_before", [False, True])
def test_extension_codes_are_rejected_like_names(tmp_path: Path, path: Path, opcode: bytes, used_before: bool) -> None:
    target = tmp_path / "created"
    content = b"\x80\x04" + opcode + b"\x8c" + bytes([len(str(target))]) + str(target).encode() + b"\x85R."
    copyreg.add_extension("os", "mkdir", 240)
    try:
        if used_before:  # pickle then returns the cached function
            pickle.loads(b"\x80\x04" + opcode + b".")
        assert "tries to import `os.mkdir`" in refusal(content, path)
    finally:
        copyreg.remove_extension("os", "mkdir", 240)
    assert not target.exists()
    assert "unregistered extension code" in refusal(content, path)


@pytest.mark.parametrize("content", [b"Psomething\n.", b"\x80\x04K\x01Q."])
def test_external_objects_are_rejected(path: Path, content: bytes) -> None:
    assert "refers to an external object" in refusal(content, path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x04Nr\xff\xff\xff\xff.", id="a table of 64 GiB"),
        pytest.param(b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"), id="bytes of 1 TiB"),
        pytest.param(b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little"), id="text of 1 TiB"),
        pytest.param(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little"), id="a bytearray of 1 TiB"),
        pytest.param(b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little"), id="a frame of 1 TiB"),
    ],
)
def test_few_bytes_cannot_allocate_all_memory(path: Path, content: bytes) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "does not fit in memory" in refusal(content, path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20  # KiB


def test_gzip_bomb_is_stopped(path: Path) -> None:
    """In a separate process, because memory that other tests freed here would not count."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"\x80\x04](")
        file.write(b"]" * (8 * MIB))  # one list per byte
    assert path.stat().st_size < MIB
    code = (
        "import pathlib, sys; from stepscope.recording.memory import snapshot, snapshot_pickle;"
        f"snapshot_pickle.LIMIT_BYTES = {128 * MIB}; snapshot.read_snapshot(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert "StepscopeError" in done.stderr
    assert "does not fit in memory" in done.stderr


def test_memory_limit_and_garbage_collector_are_restored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_pickle, "LIMIT_BYTES", 64 * MIB)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    read(empty(), path)
    refusal(b"\x80\x04Nr\xff\xff\xff\xff.", path)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert gc.isenabled()
    gc.disable()
    try:
        read(empty(), path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_shared_list_is_rejected(path: Path) -> None:
    segment = short_programme().segments()[0]
    shared = {"segments": [segment, {**segment, "address": 1 << 40}], "device_traces": []}
    assert "segments[1].blocks: expected a separate list" in refusal(pickle.dumps(shared), path)
    entries = [event()]
    assert "a separate list" in refusal(pickle.dumps({"segments": [], "device_traces": [entries, entries]}), path)


# Damaged and other files


def test_unopenable_file_is_an_error(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent", "No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(StepscopeError, match=reason):
            read_snapshot(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StepscopeError, match="not a regular file"):
        read_snapshot(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello", "not a pickle"),
        (b'{"traceEvents": []}', "not a pickle"),
        (b"\x80", "truncated"),
        (b"\x80\x09.", "unsupported pickle protocol"),
        (b"\x80\x04.", "not a pickle"),
        (b"I" + b"9" * 5000 + b"\n.", "not a pickle"),
        (b"\x1f\x8bnonsense", "damaged"),
        (gzip.compress(pickle.dumps(empty()), mtime=0)[:-9], "truncated"),
        (gzip.compress(pickle.dumps(empty()), mtime=0)[:-8] + b"\0" * 8, "damaged"),
        (gzip.compress(b"", mtime=0), "truncated"),
        (pickle.dumps([1, 2]), "it contains a list"),
        (pickle.dumps(7), "it contains an int"),
        (pickle.dumps({"segments": []}), "no list `device_traces`"),
        (pickle.dumps({"segments": {}, "device_traces": []}), "no list `segments`"),
        (b"\x80\x04]}R.", "not a pickle"),
        (b"\x80\x05\x97.", "not a pickle"),
    ],
)
def test_other_content_is_rejected(path: Path, content: bytes, said: str) -> None:
    assert said in refusal(content, path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda one: one["device_traces"].append(7), "device_traces[1]"),
        (lambda one: one["device_traces"].extend([] for _ in range(2000)), "device_traces"),
        (lambda one: one.update(stepscope=[]), "stepscope"),
        (lambda one: one["device_traces"][0].insert(1, "alloc"), "device_traces[0][1]"),
        (lambda one: one["device_traces"][0][2].update(action=5), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].pop("action"), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(size=-1), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(size=1.5), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(size=2**70), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].pop("size"), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(addr="0x10"), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(addr=2**63), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].pop("addr"), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(stream=None), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(time_us=2**62), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].pop("time_us"), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(user_metadata={}), "device_traces[0][2]"),
        (lambda one: one["device_traces"][0][2].update(frames="here"), "frames"),
        (lambda one: one["device_traces"][0][2].update(frames=[7]), "frames[0]"),
        (lambda one: one["device_traces"][0][2].update(frames=[{}]), "frames[0]"),
        (lambda one: one["device_traces"][0][2].update(frames=[frame("a", -1)]), "frames[0].line"),
        (lambda one: one["device_traces"][0][2].update(frames=[frame("a")] * 5000), "frames"),
        (lambda one: one["segments"].append(7), "segments[3]"),
        (lambda one: one["segments"][1].pop("address"), "segments[1].address"),
        (lambda one: one["segments"][1].update(address=True), "segments[1].address"),
        (lambda one: one["segments"][1].update(total_size=-5), "segments[1].total_size"),
        (lambda one: one["segments"][1].update(device=9999), "segments[1].device"),
        (lambda one: one["segments"][1].update(device=None), "segments[1].device"),
        (lambda one: one["segments"][1].update(stream=2**64), "segments[1].stream"),
        (lambda one: one["segments"][1].update(segment_type=[]), "segments[1].segment_type"),
        (lambda one: one["segments"][1].update(is_expandable=1), "segments[1].is_expandable"),
        (lambda one: one["segments"][1].update(blocks={}), "segments[1].blocks"),
        (lambda one: one["segments"][1].update(address=one["segments"][0]["address"], blocks=[]), "segments"),
        (lambda one: one["segments"][1]["blocks"].append(7), "segments[1].blocks[1]"),
        (lambda one: one["segments"][1]["blocks"][0].update(size=0), "segments[1].blocks[0].size"),
        (lambda one: one["segments"][1]["blocks"][0].update(size=2**40), "segments[1].blocks[0]"),
        (lambda one: one["segments"][1]["blocks"][0].update(address=0), "segments[1].blocks[0]"),
        (lambda one: one["segments"][1]["blocks"][0].update(state=[]), "segments[1].blocks[0].state"),
        (lambda one: one["segments"][1]["blocks"][0].update(requested_size=-2), "segments[1].blocks[0].requested_size"),
        (lambda one: one.update(allocator_settings=[]), "allocator_settings"),
        (
            lambda one: one["allocator_settings"].update(expandable_segments="no"),
            "allocator_settings.expandable_segments",
        ),
        (lambda one: one["allocator_settings"].update(max_split_size="no"), "allocator_settings.max_split_size"),
        (
            lambda one: one["allocator_settings"].update(roundup_power2_divisions=4),
            "allocator_settings.roundup_power2_divisions",
        ),
        (
            lambda one: one["allocator_settings"].update(roundup_power2_divisions={"4": []}),
            "allocator_settings.roundup_power2_divisions.4",
        ),
    ],
)
def test_invalid_field_is_named_with_its_place(path: Path, change: Callable[[Entry], object], place: str) -> None:
    content = short_programme().snapshot()
    change(content)
    assert f"at {place}" in refusal(pickle.dumps(content), path).replace("device_traces[0].frames", "frames")


def test_damage_is_always_a_clean_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_pickle, "LIMIT_BYTES", 256 * MIB)
    whole = pickletools.optimize(pickle.dumps(short_programme().snapshot(), protocol=2))
    rng = random.Random(7)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
        try:
            read_snapshot(path)
        except StepscopeError:
            continue
