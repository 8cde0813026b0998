"""Files of other tools with impossible values: explained as far as possible, at once or in windows, or rejected."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.cost import operator_cost
from stepscope.errors import StepscopeError
from stepscope.explain.kernel_names import decode
from stepscope.explain.questions import answer
from stepscope.explain.rules import find
from stepscope.explain.trace import bounded, counters, profile_tables
from stepscope.explain.trace.profile import make_profile, no_time
from stepscope.explain.trace.summary import Summary, summarise
from stepscope.recording.readers import kineto, ncu, nsys
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, Recording, Source
from tests.unit import nsys_files
from tests.unit.kineto_files import event, kernel, launch, op, training_step, write_trace

DEEP = "9" * 5000
NCU = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size"),
    *("Device", "CC"),
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def explain(path: Path) -> Summary:
    """Run every analysis, which must not raise, and return the summary."""
    profile = make_profile(open_recording(path))
    answer([profile])
    for part in profile_tables.PARTS:
        profile_tables.make_part(profile, part)
    return summarise(profile, find(profile))


def explain_bounded(path: Path) -> Summary:
    return summarise(bounded.make_bounded_profile(path), ())


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Return the training step with the first event of a name changed."""
    events = [json.loads(one) for one in training_step()]
    change(next(one for one in events if one["name"] == name))
    return [json.dumps(one) for one in events]


def changed_kernels(fields: Sequence[str], value: object, *, part: str = "") -> list[str]:
    """Return the training step with each field changed in another kernel."""
    events = [json.loads(one) for one in training_step()]
    kernels = [one for one in events if one.get("cat") == "kernel"]
    for field, one in zip(fields, kernels, strict=False):
        (one[part] if part else one)[field] = value
    return [json.dumps(one) for one in events]


@pytest.mark.parametrize("value", [True, None, 1.5, [], {}, "x", -1, 2**64])
def test_ids_of_any_type(scratch: Path, value: object) -> None:
    path = write_trace(scratch / "t.json", changed_kernels(("pid", "tid", "id"), value))
    summary = explain(path)
    assert sum(one.count for one in summary.kernels) == 7
    assert explain_bounded(path).gpu_time_ns == summary.gpu_time_ns


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        (("device", "stream", "registers per thread", "shared memory"), 7),
        # Without its launch, it follows a kernel from before the recording and looks like another one.
        (("correlation",), 5),
    ],
    ids=["numbers", "correlation"],
)
@pytest.mark.parametrize("value", [2**31, 2**63, -5, True, "seven", None, 1.5])
def test_numbers_of_a_kernel_of_any_size_and_type(
    scratch: Path, fields: tuple[str, ...], count: int, value: object
) -> None:
    path = write_trace(scratch / "t.json", changed_kernels(fields, value, part="args"))
    summary = explain(path)
    assert sum(one.count for one in summary.kernels) == count
    assert explain_bounded(path).gpu_time_ns == summary.gpu_time_ns


def test_kernel_without_a_device_counts_on_the_first(scratch: Path) -> None:
    def forget(one: dict[str, Any]) -> None:
        del one["args"]["device"], one["pid"]

    path = write_trace(scratch / "t.json", changed("ampere_sgemm_128x64_tn", forget))
    recording = kineto.read(path)
    assert recording.kernels["device"].to_list() == [0] * 7
    assert any("device 0" in note for note in recording.manifest.notes)
    assert explain_bounded(path).notes[:-1] == recording.manifest.notes


@pytest.mark.parametrize("field", ["Input Dims", "Input type", "Input Strides", "Concrete Inputs"])
@pytest.mark.parametrize("value", [5, "x", {}, [[int(DEEP[:600])]], [None], [[True]], [[-1]], [[1.5]], [[[[1]]]]])
def test_invalid_shapes(scratch: Path, field: str, value: object) -> None:
    events = changed("aten::mm", lambda one: one["args"].update({field: value}))
    explain(write_trace(scratch / "t.json", events))


def test_sizes_beyond_any_device_have_no_cost() -> None:
    shapes = json.dumps([[2**30, 2**30], [2**30, 2**30]])
    assert operator_cost("aten::mm", shapes, '["float", "float"]', None) is None


def test_kernels_with_impossible_times_do_not_make_it_a_cpu_trace(scratch: Path) -> None:
    events = [op("aten::mm", "1000", "5"), launch("1001", "1", 1), kernel("k", "1010", "-5", 1)]
    path = write_trace(scratch / "t.json", events)
    for explain_it in (explain, explain_bounded):
        with pytest.raises(StepscopeError, match="no kernel timeline") as error:
            explain_it(path)
        assert "1 event has invalid times" in error.value.detail


def test_ranges_whose_times_are_all_impossible_are_left_out(scratch: Path) -> None:
    path = write_trace(scratch / "t.json", [kernel("k", "10", "5", 1), event("user_annotation", "step:0", "10", "-5")])
    assert explain(path).notes == ("1 event has invalid times and is left out",)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_kernels_without_durations_are_an_error(scratch: Path, is_bounded: bool) -> None:
    path = write_trace(scratch / "t.json", [kernel("k", "10", "0", 1)])
    with pytest.raises(StepscopeError, match="has a duration"):
        (explain_bounded if is_bounded else explain)(path)


@pytest.mark.parametrize("name", [f"module:blocks.{DEEP}.attn", "module:9999999999", f"step:{DEEP}", "module:", DEEP])
def test_names_with_any_number_in_them(scratch: Path, name: str) -> None:
    events = [*training_step(), event("user_annotation", name, "1000.000", "1000.000")]
    explain(write_trace(scratch / "t.json", events))


def test_modules_nested_without_end_have_paths_of_bounded_length(scratch: Path) -> None:
    label = "nn.Module: " + "B" * 500
    nested = [event("python_function", f"{label}_{at}", f"{1000 + at}.000", f"{900 - 2 * at}.000") for at in range(60)]
    profile = make_profile(kineto.read(write_trace(scratch / "t.json", [*training_step()[4:], *nested])))
    assert 0 < (profile.kernels["module"].str.len_chars().max() or 0) <= 4096  # type: ignore[operator]


@pytest.mark.parametrize("tile", ["tilesize128", "tilesize0x64x8", f"tilesize{DEEP[:900]}x1", "tilesize1x2x3x4"])
def test_tile_has_two_or_three_sizes_or_is_missing(scratch: Path, tile: str) -> None:
    name = f"sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_{tile}_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel"
    sizes = decode(name).tile
    assert sizes is None or (len(sizes) in (2, 3) and all(0 < size <= 2**16 for size in sizes))
    explain(write_trace(scratch / "t.json", [kernel(name, "10", "5", 1)]))


@pytest.mark.parametrize("value", [2**31, -1, "x", True, None])
@pytest.mark.parametrize("field", ["rank", "world_size"])
def test_ranks_beyond_32_bits_are_unknown(scratch: Path, field: str, value: object) -> None:
    properties = f', "distributedInfo": {json.dumps({field: value})}'
    path = write_trace(scratch / "t.json", training_step(), properties=properties)
    assert getattr(kineto.read(path).manifest, field) is None


# --- Nsight Compute


def counted(folder: Path, metric: str, *rows: tuple[str, str, str], unit: str = "ns") -> Path:
    """One row per kernel: stream, device and the value of one metric."""
    lines = [[*NCU, metric], [*[""] * len(NCU), unit]]
    for at, (stream, device, value) in enumerate(rows):
        lines.append([str(at), "1", "python", "h", "k", "1", stream, "(128, 1, 1)", "(10, 1, 1)", device, "8.0", value])
    path = folder / "kernels.csv"
    path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("row", [("7", "", "1000"), ("", "0", "1000"), ("7", str(2**31), "5"), ("-", "x", "5")])
def test_counted_kernels_without_a_device_or_stream(scratch: Path, row: tuple[str, str, str]) -> None:
    path = counted(scratch, "gpu__time_duration.sum", ("7", "0", "1000"), row)
    assert explain(path).kernels[0].count == 2
    assert ncu.read(path).kernels["device"].null_count() == 0


def test_counters_without_times_are_shown_and_the_missing_metric_is_named(scratch: Path) -> None:
    path = counted(scratch, "dram__bytes_read.sum", ("7", "0", "1000"), unit="byte")
    with pytest.raises(StepscopeError, match="has a duration") as error:
        explain(path)
    assert "gpu__time_duration.sum" in error.value.hint
    assert len(counters.kernels_table(make_profile(ncu.read(path)).recording).rows) == 1


@pytest.mark.parametrize("value", ["9" * 400, "1e300", "-1e300", "inf", "nan"])
def test_counters_out_of_range_are_unknown(scratch: Path, value: str) -> None:
    metric = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum"
    recording = ncu.read(counted(scratch, metric, ("7", "0", value), unit="inst"))
    assert not recording.counters["value"].is_infinite().any()
    counters.kernels_table(recording)


# --- Without durations


@pytest.mark.parametrize(
    ("source", "file", "command", "hint"),
    [
        ("nsight systems", "a.sqlite", "", "nsys export --type sqlite"),
        ("nsight compute", "my a.csv", "", "stepscope explain 'my a.csv' --table counters"),
        (
            "pytorch profiler",
            "a.json",
            "",
            "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        ),
        ("pytorch profiler", "", "stepscope profile --size small", "stepscope profile --size small"),
        ("nsight systems", "", "stepscope profile --nsys", "stepscope profile --nsys"),
    ],
)
def test_hint_on_missing_durations_matches_the_profiler(source: Source, file: str, command: str, hint: str) -> None:
    error = no_time(Recording(manifest=Manifest(source=source, file=file, command=command)))
    assert hint in error.hint
    assert (f"`{file}`" in error.message) == bool(file)
    assert "``" not in error.message


def test_recording_without_kernels_is_not_named_by_an_empty_file() -> None:
    with pytest.raises(StepscopeError, match="no kernel timeline") as error:
        make_profile(Recording(manifest=Manifest(source="pytorch profiler")))
    assert "``" not in error.value.detail


def test_recording_whose_kernels_are_in_the_missing_part_of_a_file_asks_for_the_whole_file() -> None:
    cut = Manifest(source="pytorch profiler", notes=("the compressed file ends early; the rest is missing",))
    with pytest.raises(StepscopeError, match="no kernel timeline") as error:
        make_profile(Recording(manifest=cut))
    assert error.value.hint.startswith("copy the whole file")


# --- Nsight Systems


@pytest.mark.parametrize("value", [None, 2**40, -(2**40), "x", b"\xff"])
def test_exported_kernels_with_odd_numbers(scratch: Path, value: nsys_files.Value) -> None:
    export = nsys_files.training_step()
    columns = ("deviceId", "streamId", "registersPerThread", "gridX", "dynamicSharedMemory")
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0].update(dict.fromkeys(columns, value))
    path = scratch / "export.sqlite"
    layout = {table: text.replace(" NOT NULL", "") for table, text in nsys_files.LAYOUT.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nsys_files, "LAYOUT", layout)
        export.write(path)
    assert sum(one.count for one in explain(path).kernels) == 2
    kernels = nsys.read(path).kernels
    assert kernels["device"].null_count() == kernels["stream"].null_count() == 0
    assert kernels.schema["device"] == pl.Int32
