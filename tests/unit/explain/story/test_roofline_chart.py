"""The roofline: every point is one kind of call, and notes name what is left out."""

from dataclasses import replace

import pytest

from stepscope.explain.story.sections import roofline_chart
from stepscope.explain.story.sections.roofline_chart import draw_roofline
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Missing, Roofline
from tests.unit.recordings import ADD, BF16, FP32, GEMM_BF16, GEMM_FP32, Timeline


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


def test_point_has_all_calls_of_one_shape() -> None:
    profile = products(4096, 2048)
    roofline = drawn(profile)
    assert {point.label for point in roofline.points} == {f"mm {n}×{n} · {n}×{n}" for n in (4096, 2048)}
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


def test_memory_operators_are_noted_but_not_shown() -> None:
    roofline = drawn(products(4096))
    assert any("50.0% of the time, in operators that only move memory" in note for note in roofline.notes)


def test_kernels_of_unknown_cost_are_noted() -> None:
    profile = products(4096)
    ops = profile.recording.ops
    unnamed = ops.with_columns(shapes=ops["shapes"].replace(ops["shapes"][1], None))
    roofline = drawn(make_profile(replace(profile.recording, ops=unnamed)))
    assert any("50.0% of the time, in kernels with unknown FLOPs" in note for note in roofline.notes)


def test_only_the_longest_points_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline_chart, "MOST_POINTS", 2)
    roofline = drawn(products(512, 1024, 2048, 4096, us=100))
    assert len(roofline.points) == 2
    assert any("2 more take 40.0%" in note for note in roofline.notes)


def test_two_runs_share_one_chart() -> None:
    a, b = products(4096), products(4096, us=50)
    roofline = drawn(a, b)
    assert [point.run for point in roofline.points] == [0, 1]
    assert roofline.points[1].flops_per_s == pytest.approx(2 * roofline.points[0].flops_per_s)
    assert roofline.runs == ("A", "B")
    assert {note.partition(":")[0] for note in roofline.notes} == {"A", "B"}


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
        (products(shapes_recorded=False), "operator shapes were not recorded", "record_shapes=True"),
        (products(), "no GEMM, attention or convolution with known shapes", ""),
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
