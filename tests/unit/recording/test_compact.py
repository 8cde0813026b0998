"""A compact recording has fewer operators and calls, and the same figures to the nanosecond."""

from pathlib import Path

import pytest

from stepscope.api.run import Run
from stepscope.explain.ranks.activity import reduce_rank
from stepscope.explain.ranks.activity_file import encode
from stepscope.recording.compact import compact
from stepscope.recording.readers.formats import open_recording

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("h200_*.json.gz"))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_figures_do_not_change(path: Path) -> None:
    recording = open_recording(path)
    reduced = compact(recording)
    assert reduced.ops.height < recording.ops.height
    assert reduced.launches.height < recording.launches.height
    before, after = Run.of(recording, path), Run.of(reduced, path)
    assert after.to_json() == before.to_json()  # classes, phases, modules, findings, ...
    for name in ("kernels", "collectives", "roofline"):
        assert after.table(name).rows == before.table(name).rows, name
    for ours, theirs in zip(before.questions(), after.questions(), strict=True):
        assert (ours.key, ours.sentence, ours.figure) == (theirs.key, theirs.sentence, theirs.figure)
        assert (ours.evidence and ours.evidence.rows) == (theirs.evidence and theirs.evidence.rows), ours.key


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_activity_does_not_change(path: Path) -> None:
    recording = open_recording(path)
    whole, reduced = (reduce_rank(Run.of(one, path).profile) for one in (recording, compact(recording)))
    assert encode(reduced) == encode(whole)
