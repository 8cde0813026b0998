"""Findings of a large recording are cached, and computed again if the cache cannot be read."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from stepscope.explain.rules import find_once
from tests.unit.recordings import ADD, Timeline


def test_findings_are_cached_and_a_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    timeline = Timeline(host_us=60)
    for _ in range(3):
        with timeline.step(), timeline.phase("forward"):
            for _ in range(20):
                timeline.launch(ADD, 4)
    profile = replace(timeline.profile(), kept_in=tmp_path)
    found = find_once(profile)
    assert found
    with patch("stepscope.explain.rules.find", side_effect=AssertionError("looked for twice")):
        assert find_once(profile) == found
    (kept,) = tmp_path.iterdir()
    kept.write_text("no findings")
    assert find_once(profile) == found


def test_findings_of_a_small_recording_are_not_cached() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch(ADD, 4)
    profile = timeline.profile()
    with patch("stepscope.explain.rules.find", return_value=()) as find:
        assert find_once(profile) == find_once(profile) == ()
    assert find.call_count == 2
