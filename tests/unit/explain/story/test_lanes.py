"""The timeline: which step it shows, the order of its tracks, and the position of every span."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.story.sections import lanes
from stepscope.explain.story.sections.lanes import MOST_STREAMS, draw_step
from stepscope.explain.trace.attribution.names import LONGEST_NAME
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Lanes, Track
from stepscope.recording.store import Overhead
from tests.unit.question_recordings import COPY, EXP, GEMM, Tape, model_profile
from tests.unit.recordings import ALL_REDUCE, FUSED_ADAM, GEMM_BF16, INDUCTOR, TO_DEVICE, Timeline


def track_of(drawn: Lanes, label: str) -> Track:
    return next(track for track in drawn.tracks if track.label == label)


def spans_of(drawn: Lanes, label: str) -> list[tuple[int, int, str]]:
    """Start, end and name of each span."""
    spans = track_of(drawn, label).spans
    rows = zip(spans.starts_ns, spans.lengths_ns, spans.names, strict=True)
    return [(start, start + length, drawn.names[name]) for start, length, name in rows]


def steps_of(*durations: int) -> Profile:
    tape = Tape()
    for step, ns in enumerate(durations):
        with tape.inside(f"step:{step}"):
            with tape.inside("phase:forward"), tape.operator("aten::mm"):
                tape.kernel(GEMM, ns)
            tape.synchronise()
    return tape.profile()


@pytest.mark.parametrize("mode", ["train", "forward"])
def test_spans_do_not_overlap_and_lie_in_the_step(mode: str) -> None:
    drawn = draw_step(model_profile(mode=mode, steps=3))
    for track in drawn.tracks:
        spans = track.spans
        ends = [start + length for start, length in zip(spans.starts_ns, spans.lengths_ns, strict=True)]
        assert all(end <= start for end, start in zip(ends, spans.starts_ns[1:], strict=False)), track.label
        assert spans.starts_ns[0] >= 0
        assert ends[-1] <= drawn.span_ns
        assert max(spans.groups) < len(drawn.groups)


def test_phases_layers_and_modules_cover_their_kernels() -> None:
    """Every kernel of the step is shown once, below the phase, layer and module it is attributed to."""
    profile = model_profile(steps=3)
    drawn = draw_step(profile)
    begin = next(start for start, end in profile.step_windows if end - start == drawn.span_ns)
    inside = profile.kernels.filter(pl.col("start_ns").is_between(begin, begin + drawn.span_ns, closed="left"))
    kernels = spans_of(drawn, "stream 7")
    assert len(kernels) == inside.height > 50
    by_label = {label: spans_of(drawn, label) for label in ("phases", "layers", "modules")}
    for row in inside.iter_rows(named=True):
        start, end = row["start_ns"] - begin, row["end_ns"] - begin
        assert (start, end, row["short"]) in kernels
        layer = f"blocks.{row['layer']}" if row["layer"] is not None else None
        for label, expected in (("phases", row["phase"]), ("layers", layer), ("modules", row["module"])):
            over = [name for first, last, name in by_label[label] if first < end and last > start]
            assert over == ([expected] if expected else []), label


def test_layers_come_back_in_reverse() -> None:
    drawn = draw_step(model_profile())
    assert [name for _, _, name in spans_of(drawn, "layers")] == ["blocks.0", "blocks.1", "blocks.1", "blocks.0"]
    assert [name for _, _, name in spans_of(drawn, "phases")] == ["forward", "backward", "optimizer"]
    phases = track_of(drawn, "phases").spans
    assert [drawn.groups[group] for group in phases.groups] == ["forward", "backward", "optimizer"]
    assert {drawn.groups[group] for group in track_of(drawn, "layers").spans.groups} == {""}


def test_layers_of_encoder_and_decoder_stay_separate() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for stack in ("encoder", "decoder"):
            with timeline.module(f"{stack}.layers.0.ffn"):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
    drawn = draw_step(timeline.profile())
    assert [name for _, _, name in spans_of(drawn, "layers")] == ["encoder.layers.0", "decoder.layers.0"]


def test_median_step_is_shown_and_named() -> None:
    drawn = draw_step(steps_of(900, 100, 500, 520, 510))
    assert drawn.title == "Step 5"
    assert "step 5" in drawn.notes[0]
    assert "of 5 profiled steps" in drawn.notes[0]
    (kernel,) = spans_of(drawn, "stream 7")
    assert kernel[1] - kernel[0] == 510


def test_kernels_of_the_previous_step_are_clipped() -> None:
    profile = steps_of(100, 100)
    rows = profile.kernels.with_columns(
        end_ns=pl.col("end_ns") + pl.when(pl.int_range(pl.len()) == 0).then(60).otherwise(0)
    )
    late = replace(profile, kernels=rows.with_columns(time_ns=pl.col("end_ns") - pl.col("start_ns")))
    windows = late.step_windows
    drawn = draw_step(late)
    begin = next(start for start, end in windows if end - start == drawn.span_ns)
    ran = sum(
        max(0, min(end, begin + drawn.span_ns) - max(start, begin))
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
    assert sum(track_of(drawn, "stream 7").spans.lengths_ns) == ran


def test_empty_steps_are_skipped() -> None:
    tape = Tape()
    for step in range(4):
        with tape.inside(f"step:{step}"):
            if step == 3:
                tape.kernel(GEMM, 500)
            tape.synchronise()
    profile = tape.profile()
    assert draw_step(profile).title == "Step 1"
    assert profile.steps["step"].to_list() == [3]
    assert profile.notes == ("not counted: 3 marked steps without kernels",)


def test_trace_without_steps_is_shown_whole() -> None:
    tape = Tape()
    for _ in range(3):
        tape.kernel(GEMM, 100)
    profile = tape.profile()
    drawn = draw_step(profile)
    assert drawn.span_ns == profile.wall_ns
    assert "no steps are marked" in drawn.notes[0]
    assert [track.kind for track in drawn.tracks] == ["stream"], "no phase, layer or module is known"


def test_compute_stream_comes_before_the_communication_stream() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("backward"):
        timeline.launch(TO_DEVICE, 5, stream=3)
        timeline.launch(GEMM_BF16, 30)
        timeline.launch(ALL_REDUCE, 500, stream=20)
    drawn = draw_step(timeline.profile())
    streams = [track.label for track in drawn.tracks if track.kind == "stream"]
    assert streams == ["stream 7", "stream 20: communication", "stream 3: copies"]
    assert any("are those of stream 7" in note for note in drawn.notes)
    (phase,) = spans_of(drawn, "phases")
    assert phase[1] - phase[0] == 30_000


def test_surplus_streams_are_listed_in_a_note() -> None:
    timeline = Timeline()
    with timeline.step():
        for stream in range(MOST_STREAMS + 3):
            timeline.launch(GEMM_BF16, 100 - stream, stream=stream)
    drawn = draw_step(timeline.profile())
    assert sum(track.kind == "stream" for track in drawn.tracks) == MOST_STREAMS
    (note,) = [note for note in drawn.notes if "not shown" in note]
    assert all(f"stream {stream}" in note for stream in range(MOST_STREAMS, MOST_STREAMS + 3))


def test_nested_kernels_are_counted_but_not_shown() -> None:
    tape = Tape()
    for name in (GEMM, EXP, COPY):
        tape.kernel(name, 100)
    recording = tape.recording()
    times = {"start_ns": [1000, 1050, 1080], "end_ns": [1200, 1100, 1300]}
    kernels = recording.kernels.with_columns(**{key: pl.Series(value) for key, value in times.items()})
    drawn = draw_step(make_profile(replace(recording, kernels=kernels)))
    assert [(start, end) for start, end, _ in spans_of(drawn, "stream 7")] == [(0, 200), (200, 300)]
    assert any("1 kernel inside others" in note for note in drawn.notes)


def test_merged_kernels_keep_the_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = model_profile(steps=1)
    plain = draw_step(profile)
    monkeypatch.setattr(lanes, "MOST_KERNELS", 20)
    monkeypatch.setattr(lanes, "MOST_RUNS", 9)
    drawn = draw_step(profile)
    before, after = track_of(plain, "stream 7").spans, track_of(drawn, "stream 7").spans
    assert len(after.counts) <= 20 < len(before.counts) == profile.kernels.height
    assert sum(after.counts) == profile.kernels.height
    assert sum(after.lengths_ns) == sum(before.lengths_ns) == profile.gpu_time_ns
    others = [track for track in drawn.tracks if track.kind != "stream"]
    assert sum(len(track.spans.counts) for track in others) <= 9
    said = [note for note in drawn.notes if "are shown as" in note]
    assert any(f"{profile.kernels.height:,} kernels are shown as {len(after.counts)} blocks" in note for note in said)
    assert any("phases, layers and modules are shown as" in note for note in said)
    assert any(name.startswith("kernels, mostly GEMM") for name in drawn.names)
    assert "several modules" in drawn.names
    assert not any(note for note in plain.notes if "are shown as" in note)


def test_kernels_with_equal_short_names_stay_separate() -> None:
    timeline = Timeline()
    with timeline.step():
        for number in (1, 2):
            timeline.launch(FUSED_ADAM.replace("float, 4", f"float, {number}"), 10)
    drawn = draw_step(timeline.profile())
    assert len(set(drawn.details) - {""}) == 2
    for detail in set(drawn.details) - {""}:
        assert "FusedAdamMathFunctor" in detail.splitlines()[0]
        assert "library: ATen" in detail.splitlines()[1]


def test_huge_names_are_clipped() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.module("m" * 10**6):
        timeline.launch("A" * 10**6, 10)
    drawn = draw_step(timeline.profile())
    assert all(len(text) < 2 * LONGEST_NAME for text in (*drawn.names, *drawn.details))
    assert any("1,000,000 characters" in detail for detail in drawn.details)


def test_cpu_track_shows_the_innermost_range() -> None:
    timeline = Timeline(host_us=10)
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(INDUCTOR, 5)
            with timeline.phase("loss"):
                timeline.launch(INDUCTOR, 5)
            with timeline.phase("forward"):
                timeline.launch(INDUCTOR, 5)
        with timeline.phase("optimizer"):
            timeline.launch(INDUCTOR, 5)
    drawn = draw_step(timeline.profile())
    assert [name for _, _, name in spans_of(drawn, "CPU")] == ["forward", "loss", "forward", "optimizer"]
    assert set(track_of(drawn, "CPU").spans.counts) == {1}


def test_cpu_run_has_threads_and_operators() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        tape.kernel("aten::mm", 100, kind="cpu", stream=1)
        tape.kernel("aten::exp", 50, kind="cpu", stream=1)
        tape.synchronise()
    drawn = draw_step(tape.profile())
    assert [track.label for track in drawn.tracks] == ["phases", "thread 1"]
    assert [name for _, _, name in spans_of(drawn, "thread 1")] == ["aten::mm", "aten::exp"]
    assert [drawn.groups[group] for group in track_of(drawn, "thread 1").spans.groups] == ["GEMM", "elementwise"]


@pytest.mark.parametrize("share", [0.5, 0.99])
def test_profiler_overhead_is_noted(share: float) -> None:
    timeline = Timeline(host_us=100)
    for _ in range(2):
        with timeline.step():
            timeline.launch(GEMM_BF16, 10)
            timeline.wait()
    recorded = timeline.profile().clock.profiled_ns
    drawn = draw_step(timeline.profile(overhead=Overhead(plain_ns=round(share * recorded))))
    assert any("an unprofiled step takes" in note for note in drawn.notes) == (share < 0.95)


def test_only_so_many_kernels_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_DESCRIBED", 2)
    timeline = Timeline()
    with timeline.step():
        for number in range(3):
            timeline.launch(f"kernel_{number}", 10)
    drawn = draw_step(timeline.profile())
    assert drawn.names[-3:] == ("kernel_0", "kernel_1", "kernel_2")
    assert [bool(detail) for detail in drawn.details[-3:]] == [True, True, False]


def test_step_without_kernel_time_is_empty() -> None:
    profile = steps_of(5)
    still = profile.kernels.with_columns(start_ns=pl.lit(7), end_ns=pl.lit(7), time_ns=pl.lit(0))
    ranges = profile.recording.ranges.with_columns(start_ns=pl.lit(7), end_ns=pl.lit(7))
    drawn = draw_step(replace(profile, kernels=still, recording=replace(profile.recording, ranges=ranges)))
    assert drawn.tracks == ()
    assert drawn.notes[-1] == "no kernels ran in this window"


# --- Where a kernel comes from ----------------------------------------------------------------------------------------


def origins_of(drawn: Lanes, label: str) -> list[tuple[str, ...]]:
    """The lines of each span; none if its origin is unknown."""
    spans = track_of(drawn, label).spans
    return [tuple(drawn.lines[line] for line in drawn.origins[at]) if at >= 0 else () for at in spans.origins]


def test_kernels_have_operator_shapes_and_module() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for layer in range(2):
            with timeline.module(f"blocks.{layer}.ffn"):
                timeline.launch(GEMM_BF16, 10, op="aten::mm", shapes=[[64, 32], [32, 16], []])
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
    drawn = draw_step(timeline.profile())
    assert origins_of(drawn, "stream 7") == [
        ("operator: aten::mm [[64,32],[32,16]]", "module: blocks.0.ffn"),
        ("operator: aten::mm [[64,32],[32,16]]", "module: blocks.1.ffn"),
        ("operator: aten::mm",),
    ]
    assert len(set(drawn.lines)) == len(drawn.lines) == 4
    assert set(origins_of(drawn, "modules")) == {()}


def test_kernels_have_the_line_of_python_that_launched_them() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.range("torch/optim/sgd.py(103): step"):
        timeline.launch(FUSED_ADAM, 10, op="aten::_fused_sgd_")
    recording = timeline.record()
    is_frame = pl.col("name").str.contains("sgd.py")
    source = pl.when(is_frame).then(pl.lit("python")).otherwise("source")
    profile = make_profile(replace(recording, ranges=recording.ranges.with_columns(source=source)))
    (origin,) = origins_of(draw_step(profile), "stream 7")
    assert (origin[0], origin[-1]) == ("operator: aten::_fused_sgd_", "source: torch/optim/sgd.py:103 step")
