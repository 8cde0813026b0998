"""What a recording cost the step that it shows."""

from stepscope.explain.experiments.cases import describe_case
from stepscope.findings import Column, Table
from stepscope.recording.store import Manifest

_COLUMNS = (
    Column(key="with", label="with"),
    Column(key="step_ms", label="step", kind="ms"),
    Column(key="vs_plain", label="vs nothing", kind="ratio"),
    Column(key="vs_previous", label="vs the line above", kind="ratio"),
)


def overhead_table(manifest: Manifest) -> Table:
    """One line a stage of recording; a stage that was not timed has none."""
    assert manifest.case is not None, "only recordings of our own know their case"
    assert manifest.overhead is not None, "a recording of our own knows its cost"
    cost = manifest.overhead
    timed = [("nothing", cost.plain_ns), ("the recorder", cost.recorded_ns), ("annotation too", cost.annotated_ns)]
    known = [(name, value) for name, value in timed if value is not None]
    previous = [None, *(value for _, value in known)]
    rows = tuple(
        (name, value / 1e6, value / cost.plain_ns, value / before if before else None)
        for (name, value), before in zip(known, previous, strict=False)
    )
    doubts = tuple(f"{doubt.code}: {doubt.text}" for doubt in manifest.doubts)
    return Table(
        title=f"{describe_case(manifest.case)}, {manifest.device}: medians in ms, recorder and annotation included",
        columns=_COLUMNS,
        rows=rows,
        notes=(*manifest.notes, *doubts),
    )
