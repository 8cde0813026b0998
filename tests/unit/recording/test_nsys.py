"""Nsight Systems exports become recordings: complete, and with nothing private in them."""

import random
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.recording import store, tables
from stepscope.recording.readers import nsys
from stepscope.recording.store import Recording
from tests.unit.nsys_files import AUTOGRAD, MAIN, PID, Export, training_step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.sqlite"


def read(export: Export, path: Path) -> Recording:
    return nsys.read(export.write(path))


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def notes(recording: Recording) -> str:
    return "\n".join(recording.manifest.notes)


def test_every_table_has_the_columns_of_a_recording(path: Path) -> None:
    recording = read(training_step(), path)
    for name in store.TABLE_NAMES:
        assert dict(getattr(recording, name).schema) == tables.SCHEMAS[name]


def test_kernels_keep_their_times_places_and_sizes(path: Path) -> None:
    recording = read(training_step(), path)
    first = recording.kernels.row(0, named=True)
    assert first == {
        "name": "void gemm<float>(int)",
        "start_ns": 100,
        "end_ns": 300,
        "kind": "kernel",
        "process": PID,
        "device": 0,
        "stream": 7,
        "correlation": 1,
        "graph": False,
        "graph_node": None,
        "bytes": None,
        "collective": None,
        "process_group": None,
        "group_size": None,
        "grid_x": 4,
        "grid_y": 1,
        "grid_z": 1,
        "block_x": 128,
        "block_y": 1,
        "block_z": 1,
        "registers": 32,
        "shared_bytes": 24,
    }


def test_kernel_without_its_long_name_uses_a_shorter_one(path: Path) -> None:
    export = Export()
    export.kernel("x", 0, 1, demangledName=99, shortName=export.string("short name"))
    export.kernel("x", 1, 2, demangledName=99, shortName=99, mangledName=export.string("_Z1k"))
    export.kernel("x", 2, 3, demangledName=99, shortName=99)
    assert read(export, path).kernels["name"].to_list() == ["short name", "_Z1k", "(unnamed kernel)"]


@pytest.mark.parametrize("with_words", [True, False])
def test_copies_and_sets_are_named_like_in_pytorch(path: Path, with_words: bool) -> None:
    export = Export()
    shift = 20 if with_words else 0  # another version with other numbers, and their names
    export.work("MEMCPY", 0, 5, bytes=64, copyKind=1 + shift, srcKind=0 + shift, dstKind=2 + shift)
    export.work("MEMCPY", 5, 6, bytes=64, copyKind=8 + shift, srcKind=2 + shift, dstKind=2 + shift, graphNodeId=3)
    export.work("MEMCPY", 6, 7, bytes=64, copyKind=77, srcKind=None, dstKind=99)
    export.work("MEMSET", 7, 9, bytes=32, value=0, memKind=2 + shift)
    if with_words:
        for number, name in ((21, "CUDA_MEMCPY_KIND_HTOD"), (28, "CUDA_MEMCPY_KIND_DTOD")):
            export.add("ENUM_CUDA_MEMCPY_OPER", id=number, name=name, label="")
        for number, label in ((20, "Pageable"), (22, "Device")):
            export.add("ENUM_CUDA_MEM_KIND", id=number, name="", label=label)
    assert rows(read(export, path).kernels, "name", "kind", "bytes", "graph") == [
        ("Memcpy HtoD (Pageable -> Device)", "memcpy", 64, False),
        ("Memcpy DtoD (Device -> Device)", "memcpy", 64, True),
        ("Memcpy Unknown (Unknown -> Unknown)", "memcpy", 64, False),
        ("Memset (Device)", "memset", 32, False),
    ]


def test_graph_kernels_and_whole_graphs_are_marked(path: Path) -> None:
    export = Export()
    export.kernel("node", 0, 5, graphNodeId=12)
    export.kernel("plain", 5, 6)
    export.work("GRAPH_TRACE", 6, 20, graphId=3, graphExecId=4)
    recording = read(export, path)
    assert rows(recording.kernels, "name", "kind", "graph") == [
        ("node", "kernel", True),
        ("plain", "kernel", False),
        ("CUDA graph 3", "kernel", True),
    ]
    assert "traced as a whole" in notes(recording)


def test_calls_lose_their_version_and_keep_their_thread(path: Path) -> None:
    export = training_step()
    driver = {"eventClass": 1, "globalTid": 111 << 24 | 333, "returnValue": 0, "correlationId": 3}
    export.add("CUPTI_ACTIVITY_KIND_DRIVER", start=900, end=910, nameId=export.string("cuLaunchKernelEx"), **driver)
    assert rows(read(export, path).launches, "name", "start_ns", "end_ns", "process", "thread", "correlation") == [
        ("cudaLaunchKernel", 50, 60, PID, MAIN, 1),
        ("cudaLaunchKernelExC", 450, 460, PID, AUTOGRAD, 2),
        ("cuLaunchKernelEx", 900, 910, PID, 333, 3),
    ]


def test_manifest_has_nothing_private(path: Path) -> None:
    recording = read(training_step(), path)
    manifest = recording.manifest
    assert manifest.source == "nsight systems"
    assert manifest.file == "report.sqlite"
    assert (manifest.device, manifest.device_sms) == ("NVIDIA H200", 132)
    assert manifest.versions == {"nsys": "2026.2.1.210", "nsys export schema": "3.25.0"}
    assert manifest.notes == ()
    told = msgspec.json.encode(manifest).decode() + "".join(
        getattr(recording, one).write_json() for one in store.TABLE_NAMES
    )
    assert "secret" not in told
    assert str(path.parent) not in told


def test_device_is_named_by_its_cuda_number(path: Path) -> None:
    export = training_step()
    export.add("TARGET_INFO_GPU", vmId=1, id=5, name="NVIDIA L4", smCount=58)
    export.add("TARGET_INFO_CUDA_DEVICE", gpuId=5, cudaId=0, pid=PID)
    assert read(export, path).manifest.device == "NVIDIA L4"


def test_launches_of_another_process_do_not_match(path: Path) -> None:
    export = Export()
    export.call("cudaLaunchKernel_v7000", 0, 1, 5, process=PID)
    export.kernel("launched", 10, 20, 5)
    export.kernel("orphan", 10, 40, 5, process=500, device=1)
    recording = read(export, path)
    assert "1 of 2 device activities (75% of device time) have no launch" in notes(recording)
    assert "2 processes in this file" in notes(recording)
    assert "2 devices in this file" in notes(recording)


def test_missing_data_is_noted(path: Path) -> None:
    export = Export()
    export.kernel("k", 0, 1)
    told = notes(read(export, path))
    assert "no NVTX ranges in this file" in told
    assert "no CUDA API calls in this file" in told
    assert "does not name the device" in told


def test_invalid_times_are_left_out_with_a_note(path: Path) -> None:
    export = training_step()
    export.kernel("backwards", 50, 40)
    export.kernel("never", 2**62, 2**62 + 1)
    export.range("backwards", 50, 40)
    recording = read(export, path)
    assert recording.kernels.height == 2
    assert "backwards" not in recording.ranges["name"]
    assert "2 device activities without a valid time" in notes(recording)
    assert "1 NVTX range without a valid time" in notes(recording)


def test_hostile_values_become_null_or_are_cut(path: Path) -> None:
    export = training_step()
    export.kernel("x" * 2**20, 1, 2, gridX=2**40, registersPerThread="many", correlationId=None)
    export.range("y" * 2**20, 1, 2)
    export.range(f"aten::cat, seq = 12, op_id = 3, sizes = [{'[1, 2], ' * 5000}]", 2, 3)
    export.range(b"caf\xe9 \xff", 3, 4)
    recording = read(export, path)
    kernel = recording.kernels.filter(start_ns=1).row(0, named=True)
    assert len(kernel["name"]) == 16 * 1024 + 1
    assert (kernel["grid_x"], kernel["registers"]) == (None, None)
    assert "caf� �" in recording.ranges["name"]
    assert recording.ops.filter(name="aten::cat")["shapes"].to_list() == [None]
    assert "1 device activity with a name longer than 16 KiB" in notes(recording)
    assert "2 NVTX ranges with a name longer" in notes(recording)


def test_file_is_read_in_place_and_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "a b?c#d%20é"
    folder.mkdir()
    path = training_step().write(folder / "report.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")  # other readers create two more files next to it
    before = path.read_bytes()
    assert nsys.read(path).kernels.height == 2
    assert [one.name for one in folder.iterdir()] == ["report.sqlite"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"SQLite", b"{}", b"\x1f\x8b" * 50])
def test_non_sqlite_file_is_rejected(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match="not a SQLite file") as raised:
        nsys.read(path)
    assert "nsys export" in raised.value.hint


def test_missing_file_and_directory_are_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sqlite", tmp_path):
        with pytest.raises(StepscopeError, match="cannot read"):
            nsys.read(path)


def test_other_database_is_rejected_with_the_missing_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE cookies (name TEXT)")
        connection.execute("CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT 1 AS start")
    with pytest.raises(StepscopeError, match="not an Nsight Systems export") as raised:
        nsys.read(path)
    assert "CUPTI_ACTIVITY_KIND_KERNEL" in raised.value.detail


def test_export_without_cuda_is_rejected(path: Path) -> None:
    export = Export()
    export.range("host only", 0, 10)
    with pytest.raises(StepscopeError, match="no CUDA activity") as raised:
        read(export, path)
    assert "--trace cuda" in raised.value.hint


def test_truncated_export_is_rejected(path: Path) -> None:
    training_step().write(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StepscopeError, match="damaged SQLite file"):
        nsys.read(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), flips=st.integers(0, 40), kept=st.floats(0.05, 1), only_pages=st.booleans())
def test_damaged_export_is_read_or_rejected(
    tmp_path: Path, seed: int, flips: int, kept: float, only_pages: bool
) -> None:
    whole = tmp_path / "whole.sqlite"
    if not whole.exists():
        training_step().write(whole)
    content = bytearray(whole.read_bytes())
    chance = random.Random(seed)
    # Most of a small file is empty: half of the examples only damage the used bytes.
    places = [at for at, byte in enumerate(content) if byte and at >= 100] if only_pages else range(len(content))
    for _ in range(flips):
        content[chance.choice(places)] = chance.randrange(256)
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(content[: int(len(content) * kept)] if not only_pages else content)
    with suppress(StepscopeError):
        assert nsys.read(damaged).kernels.height


def test_report_without_nsys_is_rejected_with_the_export_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    (tmp_path / "run.nsys-rep").write_bytes(b"x")
    with pytest.raises(StepscopeError, match="not found on the PATH") as raised:
        nsys.read(tmp_path / "run.nsys-rep")
    assert raised.value.hint == "nsys export --type sqlite --output run.sqlite --force-overwrite true run.nsys-rep"
