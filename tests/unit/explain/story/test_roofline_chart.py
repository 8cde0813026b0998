"""The roofline: every point is one kind of call, and notes name what is left out."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from stepscope.explain.story.sections import roofline_chart
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Missing, Roofline, RoofPoint
from stepscope.hardware import Hardware
from stepscope.recording.readers.formats import open_recording
from tests.unit.recordings import ADD, BF16, FP32, GEMM_BF16, GEMM_FP32, Timeline
from tests.unit.rows import ENVIRONMENT


def products(*sizes: int, us: float = 100, steps: int = 2, device: str = "NVIDIA H200", **manifest: object) -> Profile:
    """One square GEMM per size and step, and an addition that moves memory."""
    timeline = Timeline(device=device)
    for _ in range(steps):
        with timeline.step(), timeline.phase("forward"):
            for size in sizes:
                shapes = [[size, size], [size, size]]
                timeline.launch(GEMM_BF16, us, op="aten::mm", shapes=shapes, dtypes=[BF16, BF16])
            shapes = [[1024, 1024], [1024, 1024], []]
            timeline.launch(ADD, us, op="aten::add", shapes=shapes, dtypes=[FP32, FP32, "Scalar"])
            timeline.wait()
    return timeline.profile(**manifest)


def drawn(*profiles: Profile) -> Roofline:
    names = [""] if len(profiles) == 1 else ["A", "B"][: len(profiles)]
    result = draw_roofline(profiles, names)
    assert isinstance(result, Roofline)
    return result


def gemms_of(roofline: Roofline) -> list[RoofPoint]:
    return [point for point in roofline.points if point.group == "GEMM"]


def launched(op: str) -> Profile:
    """A kernel of an operator without recorded shapes."""
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, op=op)
    return timeline.profile(shapes_recorded=op != "aten::mm")


def test_point_has_all_calls_of_one_shape() -> None:
    profile = products(4096, 2048)
    roofline = drawn(profile)
    assert {point.label for point in gemms_of(roofline)} == {f"mm {n}×{n} · {n}×{n}" for n in (4096, 2048)}
    large = max(roofline.points, key=lambda point: point.flops_per_s)
    assert large.flops_per_s == pytest.approx(2 * 4096**3 / 100e-6)
    assert large.intensity == pytest.approx(2 * 4096**3 / (3 * 4096**2 * 2))
    assert large.time_ms == pytest.approx(0.1)
    assert large.share == pytest.approx(1 / 3)
    assert large.reached == pytest.approx(large.flops_per_s / 989.4e12)
    assert large.bound == "compute"
    assert large.group == "GEMM"
    assert "[[4096,4096],[4096,4096]]" in large.detail
    assert "1 call per step, 100 µs each" in large.detail


def test_point_labels_are_unique() -> None:
    """One GEMM in two kernels is two points; a preallocated output does not make it another GEMM."""
    timeline = Timeline()
    square = [256, 256]
    with timeline.step():
        for kernel, shapes in ((GEMM_BF16, [square, square]), (GEMM_FP32, [square, square])):
            timeline.launch(kernel, 90, op="aten::mm", shapes=shapes, dtypes=[BF16] * 2)
        timeline.launch(GEMM_BF16, 90, op="aten::mm", shapes=[[512, 256], square, [512, 256]], dtypes=[BF16] * 3)
    labels = {point.label for point in drawn(timeline.profile()).points}
    assert len(labels) == 3
    assert "mm 512×256 · 256×256" in labels
    assert any(label.startswith("mm 256×256 · 256×256, bf16 GEMM") for label in labels)


def test_roofs_match_the_precisions_in_use() -> None:
    roofline = drawn(products(4096))
    assert [(roof.label, roof.flops_per_s) for roof in roofline.roofs] == [("bf16", 989.4e12)]
    assert roofline.bytes_per_s == 4800e9
    timeline = Timeline()
    with timeline.step():
        for kernel, dtype in ((GEMM_BF16, BF16), (GEMM_FP32, FP32)):
            timeline.launch(kernel, 900, op="aten::mm", shapes=[[2048, 2048], [2048, 2048]], dtypes=[dtype, dtype])
    assert [roof.label for roof in drawn(timeline.profile()).roofs] == ["bf16", "fp32"]


def test_memory_operators_are_points_without_flops() -> None:
    roofline = drawn(products(4096))
    (point,) = (point for point in roofline.points if not point.flops_per_s)
    assert point.label == "add 1024×1024 · 1024×1024"
    assert point.group == "elementwise"
    assert point.intensity == 0
    assert point.bytes_per_s == pytest.approx(3 * 4 * 1024**2 / 100e-6)
    assert point.reached == pytest.approx(point.bytes_per_s / 4800e9)
    assert point.share == pytest.approx(0.5)
    assert "125.8 GB/s" in point.detail
    assert "TFLOP/s" not in point.detail
    assert not roofline.notes


def test_memory_operators_alone_make_a_roofline() -> None:
    roofline = drawn(products())
    assert [point.flops_per_s for point in roofline.points] == [0]
    assert roofline.roofs == ()


def record_cpu(path: Path, us: float) -> Profile:
    """A GEMM and an addition on a CPU with measured limits."""
    shapes = {"Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"]}
    events = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": 100 + at * 2 * us,
            "dur": us,
            "args": shapes,
        }
        for at, name in enumerate(("aten::mm", "aten::add"))
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    limits = Hardware(name="Some CPU", peak_flops={"fp32": 1e11}, bandwidth=2e10, source="measured")
    here = msgspec.structs.replace(ENVIRONMENT, hardware=limits, driver_name="Some CPU")
    return make_profile(open_recording(path).with_manifest(environment=here, device="Some CPU"))


def test_cpu_with_measured_limits_has_a_roofline(tmp_path: Path) -> None:
    roofline = drawn(record_cpu(tmp_path / "slow.json", 5_000))
    assert roofline.title == "Roofline of Some CPU"
    assert {(point.group, point.bound) for point in roofline.points} == {("GEMM", "compute"), ("elementwise", "memory")}
    # Faster than the measured peak is still bound by compute, and the overhead of a call is not a limit of the CPU.
    assert {point.bound for point in drawn(record_cpu(tmp_path / "fast.json", 1_000)).points} == {"compute", "memory"}
    idle = record_cpu(tmp_path / "idle.json", 3)
    slow = Hardware(name="Some CPU", peak_flops={"fp32": 1e16}, bandwidth=1e14, source="measured")
    here = msgspec.structs.replace(ENVIRONMENT, hardware=slow)
    assert {point.bound for point in drawn(make_profile(idle.recording.with_manifest(environment=here))).points} == {
        "unknown"
    }


def test_unknown_bandwidth_of_a_cpu_says_when_it_is_measured(tmp_path: Path) -> None:
    profile = record_cpu(tmp_path / "trace.json", 100)
    unknown = Hardware(name="Some CPU", peak_flops={"fp32": 1e11}, source="measured")
    here = msgspec.structs.replace(ENVIRONMENT, hardware=unknown)
    absent = draw_roofline([make_profile(profile.recording.with_manifest(environment=here))], [""])
    assert isinstance(absent, Missing)
    assert "measured only if no other process uses the machine" in absent.why


def test_kernels_of_unknown_cost_are_noted() -> None:
    profile = products(4096)
    ops = profile.recording.ops
    unnamed = ops.with_columns(shapes=ops["shapes"].replace(ops["shapes"][1], None))
    roofline = drawn(make_profile(replace(profile.recording, ops=unnamed)))
    assert any("50.0% of the time, in kernels with unknown FLOPs and bytes" in note for note in roofline.notes)


def test_only_the_longest_points_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_chart, "MOST_POINTS", 2)
    roofline = drawn(products(512, 1024, 2048, 4096, us=100))
    assert len(roofline.points) == 2
    assert any("3 more take 60.0%" in note for note in roofline.notes)


def test_two_runs_share_one_chart() -> None:
    a, b = products(4096), products(4096, us=50)
    roofline = drawn(a, b)
    one, other = gemms_of(roofline)
    assert (one.run, other.run) == (0, 1)
    assert other.flops_per_s == pytest.approx(2 * one.flops_per_s)
    assert roofline.runs == ("A", "B")


def test_run_without_shapes_gets_a_note() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
    roofline = drawn(products(4096), timeline.profile(shapes_recorded=False))
    assert {point.run for point in roofline.points} == {0}
    assert "B: no points: operator shapes were not recorded" in roofline.notes


@pytest.mark.parametrize(
    ("profile", "why", "command"),
    [
        (products(4096, device="Some Chip"), "the limits of `Some Chip` are unknown", ""),
        (products(4096, device=""), "the recording does not name its device", ""),
        (launched("aten::mm"), "operator shapes were not recorded", "record_shapes=True"),
        (launched("my::own"), "no operator with a known cost", ""),
    ],
)
def test_missing_roofline_has_a_reason(profile: Profile, why: str, command: str) -> None:
    missing = draw_roofline([profile], [""])
    assert isinstance(missing, Missing)
    assert why in missing.why
    assert command in missing.command


def test_kernels_without_operators_have_no_roofline() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, op=None)
    missing = draw_roofline([timeline.profile()], [""])
    assert isinstance(missing, Missing)
    assert "does not link kernels to operators" in missing.why


def test_two_devices_have_no_common_roofline() -> None:
    a, b = products(4096), products(4096, device="NVIDIA A100-SXM4-40GB")
    missing = draw_roofline([a, b], ["A", "B"])
    assert isinstance(missing, Missing)
    assert "different limits" in missing.why
    assert drawn(a, a)
