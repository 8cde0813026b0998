"""Memory of two steps on one axis: categories add up to the byte in every column, and the peaks are the page's."""

from dataclasses import replace

import polars as pl
import pytest

from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.story.comparison.aligned_memory import align_memory, find_peak, tabulate_peaks
from stepscope.recording.readers.formats import open_recording
from tests.unit.explain.story.story_materials import FIXTURES, memory

AB = ("A", "B")


@pytest.fixture(scope="module")
def nested() -> MemoryProfile:
    return make_memory_profile(open_recording(FIXTURES / "h200_tiny_nested_bf16.pickle.gz"))


def test_columns_add_up_to_allocated_memory(nested: MemoryProfile) -> None:
    a, b = memory(), nested
    aligned = align_memory(a, b, AB)
    assert aligned is not None
    for run, profile in enumerate((a, b)):
        totals = set(profile.totals.tolist()) | {profile.before_bytes}
        assert set(aligned.totals(run)) <= totals
        assert max(aligned.totals(run)) == profile.peak_bytes
        peak = find_peak(profile)
        column = aligned.peak(run)
        heights = {name: rows[column] for name, rows in zip(aligned.categories, aligned.heights[run], strict=True)}
        assert heights == {name: peak[name] for name in aligned.categories}
        assert sum(peak.values()) == profile.peak_bytes


def test_phases_have_the_same_columns_in_both_runs(nested: MemoryProfile) -> None:
    aligned = align_memory(memory(), nested, AB)
    assert aligned is not None
    assert [stretch.label for stretch in aligned.stretches] == ["forward", "backward", "optimizer"]
    assert all(stretch.runs == (True, True) for stretch in aligned.stretches)
    ends = [stretch.end for stretch in aligned.stretches]
    assert [stretch.start for stretch in aligned.stretches] == [0, *ends[:-1]]


def test_a_phase_of_one_run_leaves_the_other_empty() -> None:
    profile = memory()
    spans = profile.recording.spans.filter(pl.col("phase").is_null() | (pl.col("phase") != "optimizer"))
    fewer = make_memory_profile(replace(profile.recording, spans=spans))
    aligned = align_memory(profile, fewer, AB)
    assert aligned is not None
    alone = {stretch.label: stretch for stretch in aligned.stretches if stretch.runs != (True, True)}
    assert {label: stretch.runs for label, stretch in alone.items()} == {"optimizer": (True, False), "": (False, True)}
    optimizer = alone["optimizer"]
    assert set(aligned.totals(1)[optimizer.start : optimizer.end]) == {0}
    assert max(aligned.totals(1)) == fewer.peak_bytes


def test_recordings_without_phases_are_stretched_as_a_whole() -> None:
    profile = memory()
    bare = make_memory_profile(replace(profile.recording, spans=profile.recording.spans.clear()))
    aligned = align_memory(bare, profile, AB)
    assert aligned is not None
    assert max(aligned.totals(0)) == bare.peak_bytes
    assert any("no phases" in note for note in aligned.notes)


def test_rows_add_up_to_the_difference_of_the_peaks(nested: MemoryProfile) -> None:
    a, b = memory(), nested
    table = tabulate_peaks(find_peak(a), find_peak(b), AB)
    *parts, whole = table.rows
    for column in (1, 2, 3):
        assert sum(int(str(row[column])) for row in parts) == whole[column]
    assert whole[:4] == ("all", a.peak_bytes, b.peak_bytes, b.peak_bytes - a.peak_bytes)
    assert sum(float(str(row[5])) for row in parts) == pytest.approx(1.0)
    assert b.peak_bytes < a.peak_bytes
    assert f"−{a.peak_bytes - b.peak_bytes:,} bytes" in table.notes[0]
