"""A replay as tables: what ran, what was compared, and what differs."""

from collections.abc import Iterator

from stepscope.findings import Column, Table
from stepscope.recover.replay.comparison import BANDS, DURATION_BAND, EXACT
from stepscope.recover.replay.outcome import ReplayResult

_MOST_ROWS = 10
_LIMITS = (
    "a replay shows which kernels the claimed model launches here, not that a GPU produced the evidence: docs/trust.md",
)


def replay_tables(result: ReplayResult) -> Iterator[Table]:
    columns = (Column(key="what", label="replay"), Column(key="value", label="value"))
    yield Table(
        title=f"Replay of {result.file}",
        columns=columns,
        rows=tuple(_describe(result)),
        notes=(*result.comparison.notes, *(() if result.comparison.differences else _LIMITS)),
    )
    if result.comparison.differences:
        yield _difference_table(result)


def _describe(result: ReplayResult) -> Iterator[tuple[str, str]]:
    where, comparison = result.surroundings, result.comparison
    versions = [
        f"{name} {where.versions[name]}" for name in ("torch", "transformers", "cuda") if name in where.versions
    ]
    yield "verdict", result.verdict.value
    yield "ran here", f"{result.layers} of {result.num_layers} layers: {result.program}"
    yield "on", ", ".join([where.device, *versions])
    yield "evidence from", ", ".join([where.evidence_device or "an unknown GPU", *_stated(result)])
    yield "recorded with", f"{result.recorder}, {result.seconds:,.1f} s"
    yield "kernels compared", f"{comparison.compared:,} of {comparison.kernels:,}; {comparison.equal:,} are equal"
    exact = [key for key in EXACT if key in comparison.counters]
    yield "must be equal", ", ".join(["name, grid, block, registers, shared memory", *exact])
    bands = [f"{key} ±{BANDS[key]:.0%}" for key in BANDS if key in comparison.counters]
    if comparison.time_ratio is not None:
        bands.insert(0, f"duration ±{DURATION_BAND:.0%} ({comparison.time_ratio:.2f} times as long as here)")
    if bands:
        yield "must be near", ", ".join(bands)
        yield "outside a band", f"{comparison.outside_share:.1%} of the time"


def _stated(result: ReplayResult) -> Iterator[str]:
    versions = result.surroundings.evidence_versions
    yield from (f"{name} {versions[name]}" for name in ("torch", "transformers", "cuda") if name in versions)
    if not result.surroundings.is_stated:
        yield "recorded with unknown settings"


def _difference_table(result: ReplayResult) -> Table:
    columns = (
        Column(key="index", label="#", kind="count"),
        Column(key="kernel", label="kernel"),
        Column(key="where", label="where"),
        Column(key="what", label="differs in"),
        Column(key="expected", label="replay"),
        Column(key="seen", label="evidence"),
        Column(key="launches", label="launches", kind="count"),
    )
    shown = result.comparison.differences[:_MOST_ROWS]
    rows = tuple((one.index, one.kernel, one.where, one.kind, one.expected, one.seen, one.launches) for one in shown)
    more = len(result.comparison.differences) - len(shown)
    notes = (f"{more:,} more in --format json",) if more else ()
    return Table(title="Kernels that differ from the replay", columns=columns, rows=rows, notes=(*notes, *_LIMITS))
