"""Measurement quality: doubts differ from properties of the step, and foreign files get no verdict."""

from dataclasses import replace

from stepscope.explain.story import Materials, tell
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Exhibit, Soundness
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.store import MemoryFacts, Overhead
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import memory, product, record_ours, small_row, traced
from tests.unit.recordings import Timeline
from tests.unit.rows import ENVIRONMENT

SPREAD = Doubt(code="spread", text="the middle 60% of steps spread over 30% of the median")
HOST = Doubt(code="host-bound", text="it waited for the CPU")
MS = 1_000_000


def judged(**parts: object) -> Soundness:
    return tell(Materials(name="a", **parts)).soundness  # type: ignore[arg-type]


def timed_again(plain_ms: float) -> Soundness:
    """A step that takes 100 ms in bench, and another time before profiling."""
    profile = record_ours(product, host_us=300_000, overhead=Overhead(plain_ns=round(plain_ms * MS)))
    return judged(bench=(small_row(),), profile=profile)


def test_steady_timing_is_sound() -> None:
    found = judged(bench=(small_row(step_ns=(99 * MS, 100 * MS, 101 * MS, 100 * MS, 100 * MS)),))
    assert found.verdict == "sound"
    assert found.sentence.startswith("5 steps timed, p20 to p80 within ")
    assert any("99 ms to 101 ms" in line for line in found.details)


def test_doubts_come_first() -> None:
    found = judged(bench=(small_row(doubts=(SPREAD,)),))
    assert found.verdict == "doubtful"
    assert found.sentence == f"T{SPREAD.text[1:]}."
    assert found.details[0] == SPREAD.text


def test_several_doubts_are_counted() -> None:
    shared = Doubt(code="shared", text="another process used the GPU")
    assert judged(bench=(small_row(doubts=(SPREAD, shared)),)).sentence.endswith("; 1 more reason.")


def test_cpu_bound_is_not_a_doubt() -> None:
    found = judged(bench=(small_row(doubts=(HOST,)),))
    assert found.verdict == "sound"
    assert "host-bound: it waited for the CPU" in found.details


def test_remarks_about_bench_name_it_next_to_a_recording() -> None:
    """Both runs may say how soon the GPU was done, with different numbers."""
    found = judged(bench=(small_row(doubts=(HOST, SPREAD)),), profile=record_ours(product))
    assert f"bench, in a separate run: host-bound: {HOST.text}" in found.details
    assert found.sentence.startswith(f"Bench, in a separate run: {SPREAD.text}")


def test_doubts_of_a_profile_say_when() -> None:
    found = judged(profile=record_ours(product, doubts=(SPREAD,)))
    assert found.sentence == f"Unprofiled steps: {SPREAD.text}.", "the steps that were timed before profiling"


def test_disagreeing_clocks_are_reported() -> None:
    apart = timed_again(110)
    assert apart.verdict == "sound"
    assert sum("100 ms" in line for line in apart.details) == 1
    assert any(line.startswith("bench, in a separate run: median 100 ms, 10 steps timed") for line in apart.details)
    far = timed_again(80)
    assert far.verdict == "doubtful"
    assert "100 ms per step in a separate run, the recording 80 ms" in far.sentence
    assert not any("median 100 ms" in line for line in far.details), "it is said once"


def test_foreign_file_has_unknown_quality() -> None:
    assert judged(profile=traced()).verdict == "unknown"
    assert judged(memory=memory()).verdict == "unknown"
    assert judged().sentence == "Nothing was measured."


def test_unattributed_kernel_time_is_reported() -> None:
    found = judged(profile=traced())
    assert "kernel time attributed: class 100%, phase 0%, module 0%" in found.details
    assert "recorded with PyTorch profiler; no steps are marked" in found.details


def test_profiler_overhead_names_the_clock() -> None:
    slowed = record_ours(product, host_us=3000, overhead=Overhead(plain_ns=2 * MS, recorded_ns=6 * MS))
    found = judged(profile=slowed)
    said = "a step takes 2 ms unprofiled and 3 ms profiled; step and idle time are those of unprofiled steps"
    assert said in found.details
    assert "2 steps recorded with PyTorch profiler, 3 ms to 3 ms" in found.details


def test_memory_that_does_not_add_up_is_unreliable() -> None:
    facts = MemoryFacts(events=10, allocator_peak_bytes=memory().peak_bytes + 512)
    ours = memory().recording.with_manifest(memory=facts, environment=ENVIRONMENT)
    found = judged(memory=replace(memory(), recording=ours))
    assert found.verdict == "doubtful"
    assert "but the allocator counted" in found.sentence
    exact = memory().recording.with_manifest(environment=ENVIRONMENT)
    assert judged(memory=replace(memory(), recording=exact)).verdict == "sound"


def test_estimated_sizes_are_unreliable() -> None:
    facts = MemoryFacts(events=10, estimated_bytes=2**20)
    late = memory().recording.with_manifest(memory=facts)
    assert "1 MiB of allocations are estimated" in judged(memory=replace(memory(), recording=late)).sentence


def test_attention_doubts_count_if_nothing_else_was_measured() -> None:
    rows = (attend(doubts=(SPREAD,)), attend(length=2048))
    alone = judged(attention=rows)
    assert alone.verdict == "doubtful"
    assert "(1 of 2 cases)" in alone.sentence
    beside = judged(attention=rows, bench=(small_row(),))
    assert beside.verdict == "sound"
    assert any("(1 of 2 cases)" in line for line in beside.details)


def test_differing_peaks_are_reported() -> None:
    ours = memory().recording.with_manifest(environment=ENVIRONMENT)
    found = judged(bench=(small_row(),), memory=replace(memory(), recording=ours))
    assert "peak memory was 1 GiB while timing steps and 66.1 MiB while recording memory" in found.details


def test_a_snapshot_without_settings_may_be_of_another_model() -> None:
    ours, foreign = record_ours(product), memory()
    said = "warning: the memory snapshot has no settings"
    bare = replace(foreign, recording=foreign.recording.with_manifest(case=None, command="stepscope run train.py"))
    assert any(line.startswith(said) for line in judged(profile=ours, memory=bare).details)
    loop = record_ours(product, case=None, command="stepscope run train.py")
    assert not any("has no settings" in line for line in judged(profile=loop, memory=bare).details)
    unknown = replace(foreign, recording=foreign.recording.with_manifest(case=None, command=""))
    assert any(
        line.startswith(said)
        for line in judged(profile=record_ours(product, case=None, command=""), memory=unknown).details
    )
    own = replace(foreign, recording=foreign.recording.with_manifest(case=ours.recording.manifest.case))
    assert not any("has no settings" in line for line in judged(profile=ours, memory=own).details)
    assert any("the trace has no settings" in line for line in judged(profile=loop, memory=own).details)


def on_cpu(*add_us: float) -> Profile:
    """Steps on a CPU that take 100 µs for a forward pass, and these times for a backward pass."""
    timeline = Timeline(host_us=2)
    for us in add_us:
        with timeline.step():
            with timeline.phase("forward"):
                timeline.compute("aten::mm", 100, shapes=[[64, 64]] * 2, dtypes=["float"] * 2)
            with timeline.phase("backward"):
                timeline.compute("aten::add", us, shapes=[[64, 64]] * 2, dtypes=["float"] * 2)
    return timeline.profile(command="stepscope run train.py", environment=ENVIRONMENT)


def test_interrupted_steps_are_reported_once() -> None:
    for steps, verdict in (((20, 20, 3000), "doubtful"), ((20, 20, 20, 3000), "sound")):
        found = judged(profile=on_cpu(*steps))
        assert found.verdict == verdict
        assert "no disturbance" not in found.sentence
        assert len([line for line in found.details if line.startswith("not counted: 1 of ")]) == 1


def test_interrupted_step_is_nowhere_on_the_page() -> None:
    """The picture of a step, the training loop and the headline are about the same steps."""
    report = tell(Materials(name="a", profile=on_cpu(20, 20, 3000)))
    assert report.picture is not None
    (bar,) = report.picture.bars
    assert bar is not None
    shown = {phase.name: sum(phase.times_ns) / bar.busy_ns for phase in bar.phases}
    assert 0.8 < shown["forward"] < 0.85
    (loop,) = (one for one in report.sections if one.key == "loop")
    (bars,) = (one.part for one in loop.exhibits if isinstance(one, Exhibit) and isinstance(one.part, Bars))
    times = dict(zip(bars.series, (column[0] for column in bars.values), strict=True))
    assert 0.75 < (times["forward"] or 0) / sum(one or 0 for one in times.values()) < 0.85
    assert "elementwise" not in report.sentence
