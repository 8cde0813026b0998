"""Attention alone, however it is computed: time and memory over lengths."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.experiments.attention_tables import (
    attention_figure,
    describe_attention,
    make_tables,
    say_common,
    summary_ms,
)
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.phrases import MOST_ROWS, retitle
from stepscope.explain.story.sources import Materials
from stepscope.findings import Exhibit, Section, Table
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.units import say_size, say_time


def show_attention(materials: Materials) -> Section:
    key, title = "attention", "Attention"
    rows = materials.attention
    if not rows:
        return Section(key=key, title=title, missing=(explain_absence(materials, "attention"),))
    time, memory = make_tables(_longest(rows))
    rest = len(rows) - len(time.rows)
    left_out = (f"{rest:,} more rows, of shorter lengths: stepscope attention shows them",) if rest else ()
    exhibits = (
        Exhibit(key="attention-time", part=attention_figure(rows, "both")),
        Exhibit(key="attention-memory", part=attention_figure(rows, "peak")),
        Exhibit(key="attention-times", part=_finish(time, "Time", left_out)),
        Exhibit(key="attention-sizes", part=_finish(memory, "Memory", left_out)),
    )
    # Without one case that was measured a chart has nothing to draw; the table has the reasons.
    shown = exhibits if any(row.measurement for row in rows) else exhibits[2:3]
    return Section(key=key, title=title, lead=say_attention(rows), exhibits=shown)


def _longest(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """As many whole lengths as a table has room for, the longest: there implementations differ most."""
    chosen: list[AttentionRow] = []
    for length in sorted({row.case.length for row in rows}, reverse=True):
        more = [row for row in rows if row.case.length == length]
        if chosen and len(chosen) + len(more) > MOST_ROWS:
            break
        chosen += more
    return chosen


def _finish(table: Table, title: str, left_out: tuple[str, ...]) -> Table:
    named = retitle(table, title)
    return msgspec.structs.replace(named, notes=(*named.notes, *left_out))


def say_attention(rows: Sequence[AttentionRow]) -> str:
    """The fastest and the slowest, where most implementations were measured: at the longest such length."""
    shapes: dict[tuple[int, int, str], list[AttentionRow]] = {}
    for row in rows:
        if row.measurement is not None:
            shapes.setdefault((row.case.length, row.case.head_dim, _all_else(row)), []).append(row)
    compared = {shape: found for shape, found in shapes.items() if len(found) > 1}
    failed = sum(row.measurement is None for row in rows)
    missing = f" {failed} of {len(rows)} cases could not be measured; the tables say why." if failed else ""
    if not compared:
        return f"{len(rows)} cases: {say_common(rows)}.{missing}"
    fullest = max(compared, key=lambda shape: (len(compared[shape]), shape))
    length, head_dim, _ = fullest
    ordered = sorted(compared[fullest], key=_both_ms)
    first, last = ordered[0], ordered[-1]
    return (
        f"At length {length:,} with heads of {head_dim}, {first.case.implementation} takes {_say(first)} for forward "
        f"and backward and {_memory(first)} on top of its inputs; {last.case.implementation} takes {_say(last)} and "
        f"{_memory(last)}.{missing}"
    )


def _all_else(row: AttentionRow) -> str:
    """What makes two rows comparable, besides their length and head size."""
    same = describe_attention(row.case).removeprefix(row.case.implementation)
    return f"{same} {row.environment.driver_name} {row.environment.torch}"


def _both_ms(row: AttentionRow) -> float:
    summary = summary_ms(row, "both")
    assert summary is not None, "only measured rows are compared"
    return summary.median


def _say(row: AttentionRow) -> str:
    return say_time(_both_ms(row) * 1e6)


def _memory(row: AttentionRow) -> str:
    assert row.measurement is not None, "only measured rows are compared"
    return say_size(row.measurement.memory.peak_bytes)
