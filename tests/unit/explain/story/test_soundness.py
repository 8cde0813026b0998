"""How far figures can be trusted: a doubt is told from what a step is like, and of strangers nothing is claimed."""

from dataclasses import replace

from stepscope.explain.story import Materials, tell
from stepscope.findings import Soundness
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.store import MemoryFacts, Overhead
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import memory, product, record_ours, small_row, traced
from tests.unit.rows import ENVIRONMENT

SPREAD = Doubt(code="spread", text="the middle 60% of steps spread over 30% of the median")
HOST = Doubt(code="host-bound", text="it waited for the host")
MS = 1_000_000


def judged(**parts: object) -> Soundness:
    return tell(Materials(name="a", **parts)).soundness  # type: ignore[arg-type]


def timed_again(plain_ms: float) -> Soundness:
    """A step that was timed at 100 ms, and at another time around the recording."""
    overhead = Overhead(plain_ns=round(plain_ms * MS), recorded_ns=200 * MS)
    return judged(bench=(small_row(),), profile=record_ours(product, overhead=overhead))


def test_a_quiet_timing_is_sound() -> None:
    found = judged(bench=(small_row(step_ns=(99 * MS, 100 * MS, 101 * MS, 100 * MS, 100 * MS)),))
    assert found.verdict == "sound"
    assert found.sentence.startswith("5 steps were timed, the middle 60% of them within ")
    assert any("99 ms to 101 ms" in line for line in found.details)


def test_a_doubt_is_said_first() -> None:
    found = judged(bench=(small_row(doubts=(SPREAD,)),))
    assert found.verdict == "doubtful"
    assert found.sentence == f"Take the figures with care: {SPREAD.text}."
    assert found.details[0] == SPREAD.text


def test_several_doubts_are_counted() -> None:
    shared = Doubt(code="shared", text="another process used the GPU")
    assert judged(bench=(small_row(doubts=(SPREAD, shared)),)).sentence.endswith("; 1 more below.")


def test_waiting_for_the_host_is_no_doubt() -> None:
    found = judged(bench=(small_row(doubts=(HOST,)),))
    assert found.verdict == "sound"
    assert "host-bound: it waited for the host" in found.details


def test_doubts_of_a_recording_say_when() -> None:
    found = judged(profile=record_ours(product, doubts=(SPREAD,)))
    assert found.sentence == f"Take the figures with care: while recording: {SPREAD.text}."


def test_two_clocks_that_disagree_are_told() -> None:
    assert not any("timed again" in line for line in timed_again(103).details)
    apart = timed_again(110)
    assert apart.verdict == "sound"
    assert any("the step took 100 ms when it was timed and 110 ms, 10% more" in line for line in apart.details)
    far = timed_again(70)
    assert far.verdict == "doubtful"
    assert "30% less" in far.sentence


def test_a_stranger_s_file_is_neither_sound_nor_doubtful() -> None:
    assert judged(profile=traced()).verdict == "unknown"
    assert judged(memory=memory()).verdict == "unknown"
    assert judged().sentence == "Nothing was measured."


def test_what_is_not_known_of_the_kernels_is_said() -> None:
    found = judged(profile=traced())
    assert "known of the kernels' time: class 100%, phase 0%, module 0%" in found.details
    assert "recorded by PyTorch's profiler; no steps are marked" in found.details


def test_the_cost_of_recording_is_said_with_the_clock_that_counts() -> None:
    slowed = record_ours(product, host_us=3000, overhead=Overhead(plain_ns=2 * MS, recorded_ns=6 * MS))
    found = judged(profile=slowed)
    assert "recording made the step 3 times as long; idle time is taken from the clock without it" in found.details
    assert "2 steps recorded by PyTorch's profiler, 3 ms to 3 ms long" in found.details


def test_memory_that_does_not_add_up_is_doubted() -> None:
    facts = MemoryFacts(events=10, allocator_peak_bytes=memory().peak_bytes + 512)
    ours = memory().recording.with_manifest(memory=facts, environment=ENVIRONMENT)
    found = judged(memory=replace(memory(), recording=ours))
    assert found.verdict == "doubtful"
    assert "the allocator itself counted" in found.sentence
    exact = memory().recording.with_manifest(environment=ENVIRONMENT)
    assert judged(memory=replace(memory(), recording=exact)).verdict == "sound"


def test_estimated_sizes_are_doubted() -> None:
    facts = MemoryFacts(events=10, estimated_bytes=2**20)
    late = memory().recording.with_manifest(memory=facts)
    assert "the sizes of 1 MiB are estimated" in judged(memory=replace(memory(), recording=late)).sentence


def test_attention_s_doubts_count_where_nothing_else_was_measured() -> None:
    rows = (attend(doubts=(SPREAD,)), attend(length=2048))
    alone = judged(attention=rows)
    assert alone.verdict == "doubtful"
    assert "(1 of 2 cases)" in alone.sentence
    beside = judged(attention=rows, bench=(small_row(),))
    assert beside.verdict == "sound"
    assert any("(1 of 2 cases)" in line for line in beside.details)


def test_a_peak_that_moved_between_two_runs_is_said() -> None:
    ours = memory().recording.with_manifest(environment=ENVIRONMENT)
    found = judged(bench=(small_row(),), memory=replace(memory(), recording=ours))
    assert "the peak was 1 GiB while steps were timed and 66.1 MiB while memory was recorded" in found.details
