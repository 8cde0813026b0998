"""Nsight Compute CSV files become recordings, whatever the program printed in between."""

import gzip
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.recording import store, tables
from stepscope.recording.readers import ncu
from stepscope.recording.store import Recording

IDENTITY = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
HEADER = [
    *IDENTITY,
    *("Grid Size", "Device", "CC", "device__attribute_display_name", "device__attribute_multiprocessor_count"),
    *("device__attribute_uuid", "gpu__time_duration.sum", "launch__func_cache_config"),
    *("launch__registers_per_thread", "launch__shared_mem_per_block_dynamic", "launch__shared_mem_per_block_static"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
]
UNITS = [*[""] * 14, "ns", "", "register/thread", "Kbyte/block", "byte/block", "%"]
PREAMBLE = "==WARNING== Note: Running with unmodified GPU clocks.\n==PROF== Connected to process 485 (python3.12)\n"


def line(values: list[str]) -> str:
    return ",".join(f'"{value}"' for value in values) + "\n"


def kernel(number: int, name: str = "void k<float>(int, T1 *)", duration: str = "3,200", share: str = "12.5") -> str:
    place = [
        str(number),
        "485",
        "python3.12",
        "secret-host",
        name,
        "1",
        "7",
        "(128, 2, 1)",
        "(1056, 1, 1)",
        "0",
        "9.0",
    ]
    device = ["NVIDIA H200", "132", "GPU-secret"]
    return line([*place, *device, duration, "CachePreferNone", "32", "24.58", "16", share])


def raw(*kernels: str, units: list[str] = UNITS) -> str:
    return PREAMBLE + line(HEADER) + line(units) + "".join(kernels)


def read(path: Path, content: str | bytes) -> Recording:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ncu.read(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernels.csv"


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return frame.select(columns).rows()


def notes(recording: Recording) -> str:
    return "\n".join(recording.manifest.notes)


def test_every_table_has_the_columns_of_a_recording(path: Path) -> None:
    recording = read(path, raw(kernel(0)))
    for name in store.TABLE_NAMES:
        assert dict(getattr(recording, name).schema) == tables.SCHEMAS[name]


@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())])
def test_kernels_are_placed_end_to_end(path: Path, pack: Any) -> None:
    recording = read(path, pack(raw(kernel(0), kernel(1, duration="1,000,000"), kernel(2))))
    assert rows(recording.kernels, "start_ns", "end_ns") == [(0, 3200), (3200, 1_003_200), (1_003_200, 1_006_400)]
    first = recording.kernels.row(0, named=True)
    assert first == {
        "name": "void k<float>(int, T1 *)",
        "start_ns": 0,
        "end_ns": 3200,
        "kind": "kernel",
        "process": 485,
        "device": 0,
        "stream": 7,
        "correlation": 0,
        "graph": None,
        "graph_node": None,
        "bytes": None,
        "collective": None,
        "process_group": None,
        "group_size": None,
        "grid_x": 1056,
        "grid_y": 1,
        "grid_z": 1,
        "block_x": 128,
        "block_y": 2,
        "block_z": 1,
        "registers": 32,
        "shared_bytes": 24_580 + 16,
    }
    assert "placed end to end" in notes(recording)


def test_counters_are_numbers_or_text(path: Path) -> None:
    recording = read(path, raw(kernel(0), kernel(1, share="1,234.5")))
    second = recording.counters.filter(kernel=1)
    assert rows(second, "metric", "unit", "value", "text") == [
        ("device__attribute_display_name", "", None, "NVIDIA H200"),
        ("device__attribute_multiprocessor_count", "", 132.0, None),
        ("gpu__time_duration.sum", "ns", 3200.0, None),
        ("launch__func_cache_config", "", None, "CachePreferNone"),
        ("launch__registers_per_thread", "register/thread", 32.0, None),
        ("launch__shared_mem_per_block_dynamic", "Kbyte/block", 24.58, None),
        ("launch__shared_mem_per_block_static", "byte/block", 16.0, None),
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", 1234.5, None),
    ]


@pytest.mark.parametrize(
    ("unit", "said", "duration_ns"),
    [
        ("ns", "3,200", 3200),
        ("nsecond", "3,200", 3200),
        ("us", "3.20", 3200),
        ("usecond", "1,003.2", 1_003_200),
        ("ms", "1.5", 1_500_000),
        ("s", "2", 2_000_000_000),
        ("second", "2", 2_000_000_000),
    ],
)
def test_durations_are_read_in_their_unit(path: Path, unit: str, said: str, duration_ns: int) -> None:
    units = [unit if name == "ns" else name for name in UNITS]
    assert read(path, raw(kernel(0, duration=said), units=units)).kernels["end_ns"].to_list() == [duration_ns]


@pytest.mark.parametrize("said", ["", "n/a", "nan", "inf"])
def test_kernel_without_a_duration_is_counted(path: Path, said: str) -> None:
    recording = read(path, raw(kernel(0), kernel(1, duration=said)))
    assert rows(recording.kernels, "start_ns", "end_ns") == [(0, 3200), (3200, 3200)]
    assert "1 of 2 kernels have no duration" in notes(recording)


@pytest.mark.parametrize("said", ["1e17", "-5", "-1e300", "1e300", str(tables.LONGEST_KERNEL_NS + 1)])
def test_kernel_with_an_invalid_duration_keeps_its_row(path: Path, said: str) -> None:
    recording = read(path, raw(kernel(0), kernel(1, duration=said, share="7"), kernel(2, share="8")))
    assert rows(recording.kernels, "start_ns", "end_ns") == [(0, 3200), (3200, 3200), (3200, 6400)]
    shares = recording.counters.filter(pl.col("metric").str.starts_with("sm__"))
    assert rows(shares, "kernel", "value") == [(0, 12.5), (1, 7.0), (2, 8.0)]
    assert "1 kernel has an invalid duration" in notes(recording)
    assert "no duration" not in notes(recording)


def test_the_longest_kernel_keeps_its_duration(path: Path) -> None:
    recording = read(path, raw(kernel(0, duration=str(tables.LONGEST_KERNEL_NS))))
    assert rows(recording.kernels, "start_ns", "end_ns") == [(0, tables.LONGEST_KERNEL_NS)]
    assert "invalid" not in notes(recording)


def test_kernels_beyond_the_range_of_times_keep_their_rows(path: Path) -> None:
    fit = tables.FARTHEST_NS // tables.LONGEST_KERNEL_NS
    longest = str(tables.LONGEST_KERNEL_NS)
    body = "".join(f'"{at}","k","{longest}"\n' for at in range(fit + 2))
    recording = read(path, line(["ID", "Kernel Name", "gpu__time_duration.sum"]) + line(["", "", "ns"]) + body)
    assert recording.kernels.height == fit + 2
    assert recording.counters["kernel"].max() == fit + 1
    assert recording.kernels["end_ns"].tail(3).to_list() == [tables.FARTHEST_NS] * 3
    assert "2 kernels have invalid durations" in notes(recording)


@pytest.mark.parametrize("said", ["-5", "1e300", "-1e300"])
@pytest.mark.parametrize(("old", "column"), [('"32","24.58"', "registers"), ('"24.58","16"', "shared_bytes")])
def test_impossible_launch_settings_are_null_and_counted(path: Path, old: str, column: str, said: str) -> None:
    new = f'"{said}",{old.split(",")[1]}'
    recording = read(path, raw(kernel(0), kernel(1).replace(old, new)))
    assert recording.kernels[column].is_null().to_list() == [False, True]
    assert f"1 value of `{column}` in `kernels`" in notes(recording)


def test_manifest_has_the_device_and_nothing_private(path: Path) -> None:
    recording = read(path, raw(kernel(0)))
    manifest = recording.manifest
    assert (manifest.source, manifest.file) == ("nsight compute", "kernels.csv")
    assert (manifest.device, manifest.device_sms) == ("NVIDIA H200", 132)
    told = msgspec.json.encode(manifest).decode() + recording.kernels.write_json() + recording.counters.write_json()
    assert "secret" not in told
    assert "python3.12" not in told


def test_output_of_the_program_is_counted_and_left_out(path: Path) -> None:
    content = raw(kernel(0), "loss 3.2\n", "\n", '"quoted", but no row\n', kernel(1), "==PROF== Disconnected\n")
    recording = read(path, "epoch 1\n" + content)
    assert recording.kernels.height == 2
    assert "2 lines are not CSV" in notes(recording)
    assert "1 row with too few or too many fields" in notes(recording)


def test_rows_that_are_left_out_are_lost(path: Path) -> None:
    assert not ncu.has_lost_rows(read(path, raw(kernel(0))).manifest.notes)
    assert ncu.has_lost_rows(read(path, raw(kernel(0), '"1","other columns"\n', kernel(1))).manifest.notes)


def test_files_have_a_size_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small gzip file can contain any number of rows and lines."""
    monkeypatch.setattr(ncu, "_MOST_CELLS", 3 * len(HEADER) - 1)
    recording = read(path, raw(*map(kernel, range(5))))
    assert recording.kernels.height == 3
    assert "2 rows beyond the size limit left out" in notes(recording)
    assert ncu.has_lost_rows(recording.manifest.notes)
    monkeypatch.setattr(ncu, "_MOST_OTHER_LINES", 100)
    with pytest.raises(StepscopeError, match="too many lines: "):
        read(path, gzip.compress((raw(kernel(0)) + "\n" * 200).encode()))


def test_text_has_a_size_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes can contain gigabytes of a single letter."""
    monkeypatch.setattr(ncu, "_MOST_TEXT", 3 * ncu._NAME_BYTES)
    recording = read(path, gzip.compress(raw(*(kernel(number, name=100_000 * "k") for number in range(5))).encode()))
    assert recording.kernels["name"].str.len_chars().to_list() == 3 * [ncu._NAME_BYTES]
    assert "2 rows beyond the size limit left out" in notes(recording)


def test_kernel_without_an_id_is_a_kernel(path: Path) -> None:
    unnumbered = kernel(1, name="other").replace('"1"', '""', 1)
    recording = read(path, raw(kernel(0), unnumbered, kernel(2)))
    assert rows(recording.kernels, "name", "correlation")[1] == ("other", None)
    assert recording.kernels.height == 3


def test_two_outputs_in_one_file_are_one_recording(path: Path) -> None:
    assert read(path, raw(kernel(0)) + raw(kernel(0))).kernels.height == 2


@pytest.mark.parametrize("cut", [3, 40, 100, 150])
def test_truncated_last_row_is_left_out_with_a_note(path: Path, cut: int) -> None:
    recording = read(path, raw(kernel(0), kernel(1)[:-cut]))
    assert recording.kernels.height == 1
    assert "ends in the middle of a row" in notes(recording)
    assert "too few" not in notes(recording)


def test_last_row_without_a_newline_is_a_row(path: Path) -> None:
    recording = read(path, raw(kernel(0), kernel(1)).rstrip())
    assert recording.kernels.height == 2
    assert "middle of a row" not in notes(recording)


def test_truncated_gzip_file_keeps_its_beginning(path: Path) -> None:
    chance = random.Random(0)
    packed = gzip.compress(raw(*(kernel(at, share=f"{chance.random():.6f}") for at in range(3000))).encode())
    recording = read(path, packed[: len(packed) // 2])
    assert 500 < recording.kernels.height < 2500
    assert "ends in the middle" in notes(recording)


def test_many_kernels_keep_their_counters(path: Path) -> None:
    recording = read(path, raw(*(kernel(at, share=f"{at}") for at in range(5000))))
    shares = recording.counters.filter(pl.col("metric").str.starts_with("sm__"))
    assert shares["kernel"].to_list() == list(range(5000))
    assert shares["value"].to_list() == [float(at) for at in range(5000)]


def test_pages_with_one_row_per_metric_are_read(path: Path) -> None:
    columns = [*IDENTITY, "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]
    content = PREAMBLE + line([*columns, "Rule Name"])
    for number, name in enumerate(("gemm", "softmax")):
        place = [str(number), "485", "python", "secret-host", name, "1", "7", "(32, 1, 1)", "(8, 4, 1)", "0", "9.0"]
        for metric in (
            ["Speed", "Duration", "us", "5.25"],
            ["Launch", "Registers Per Thread", "register/thread", "40"],
        ):
            content += line([*place, *metric, ""])
        content += line([*place, "Scheduler", "Duration", "us", "5.25", ""])  # in a second section
        content += line([*place, "Launch", "", "", "", "use more blocks"])
    recording = read(path, content)
    assert rows(recording.kernels, "name", "start_ns", "end_ns", "grid_y", "registers") == [
        ("gemm", 0, 5250, 4, 40),
        ("softmax", 5250, 10500, 4, 40),
    ]
    assert rows(recording.counters, "kernel", "metric", "value") == [
        (0, "Duration", 5.25),
        (0, "Registers Per Thread", 40.0),
        (1, "Duration", 5.25),
        (1, "Registers Per Thread", 40.0),
    ]


@pytest.mark.parametrize(
    ("duration", "share", "other"),
    [
        ("1,003,200", "9,876.25", "1,234"),
        ("1.003.200", "9.876,25", "1.234"),
        ("1\u202f003\u202f200", "9\u202f876,25", "1\u202f234"),
        ("1'003'200", "9'876.25", "1'234"),
        ("1003200", "9876,25", "1234"),
    ],
)
def test_numbers_are_read_in_the_notation_of_their_file(path: Path, duration: str, share: str, other: str) -> None:
    content = raw(kernel(0, duration=duration, share=share), kernel(1, share=other))
    recording = read(path, content.replace("24.58", "24,58") if share.endswith(",25") else content)
    assert recording.kernels["end_ns"][0] == 1_003_200
    assert recording.kernels["shared_bytes"].to_list() == [24_596, 24_596]
    shares = recording.counters.filter(pl.col("metric").str.starts_with("sm__"))["value"]
    assert shares.to_list() == [9876.25, 1234.0]


@pytest.mark.parametrize("duration", ["3.488", "3,488"])
def test_single_groups_show_the_notation_if_nothing_else_does(path: Path, duration: str) -> None:
    content = raw(kernel(0, duration=duration, share="12"), kernel(1, duration="960", share="7"))
    recording = read(path, content.replace("24.58", "24"))
    assert recording.kernels["end_ns"].to_list() == [3488, 4448]


def test_a_metric_may_have_any_name(path: Path) -> None:
    names = ["row", "kernel", "metric", "unit", "said", "row", "name", "kind"]
    content = line(["ID", "Kernel Name", *names]) + line([""] * 10) + line(["0", "k", *map(str, range(8))])
    assert read(path, content).counters["value"].to_list() == [float(at) for at in range(8)]


@pytest.mark.parametrize("content", ["", "\n", "hello\n", PREAMBLE, '"a","b"\n"1","2"\n', "\0" * 5000])
def test_other_csv_is_rejected(path: Path, content: str) -> None:
    with pytest.raises(StepscopeError, match="not an Nsight Compute CSV") as raised:
        read(path, content)
    assert "ncu --csv --page raw" in raised.value.hint


def test_report_is_rejected_with_the_export_command(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError) as raised:
        read(tmp_path / "run.ncu-rep", b"NVR\0\1\2\3")
    assert raised.value.hint == "ncu --import run.ncu-rep --csv --page raw > run.csv"


def test_header_without_kernels_is_rejected_with_the_error_of_ncu(path: Path) -> None:
    complaint = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Counters\n"
    with pytest.raises(StepscopeError, match="no kernels") as raised:
        read(path, complaint + raw())
    assert "ERR_NVGPUCTRPERM" in raised.value.detail


def test_missing_file_and_damaged_gzip_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="cannot read"):
        ncu.read(tmp_path / "none.csv")
    packed = bytearray(gzip.compress(raw(kernel(0)).encode()))
    packed[20:40] = b"\xff" * 20
    with pytest.raises(StepscopeError, match="damaged gzip"):
        read(tmp_path / "bad.csv.gz", bytes(packed))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), flips=st.integers(0, 20), kept=st.floats(0, 1), packed=st.booleans())
def test_damaged_file_is_read_or_rejected(tmp_path: Path, seed: int, flips: int, kept: float, packed: bool) -> None:
    content = bytearray(raw(kernel(0), "loss 3.2\n", kernel(1), kernel(2)).encode())
    content = bytearray(gzip.compress(content)) if packed else content
    chance = random.Random(seed)
    for _ in range(flips):
        content[chance.randrange(len(content))] = chance.choice([chance.randrange(256), ord('"'), ord(","), 10])
    with suppress(StepscopeError):
        assert read(tmp_path / "damaged", bytes(content[: int(len(content) * kept)])).kernels.height
