"""The tables and the loss curve of a training run.

A step takes as long as its slowest rank. Communication times are those of that rank: how long its collectives ran, and
how long it waited for them (exposed communication).
"""

import itertools
from collections.abc import Sequence

from stepscope import cost
from stepscope.cost.sharding import ADAM_STATE_BYTES
from stepscope.explain.experiments.cases import limit_notes
from stepscope.explain.statistics import summarise
from stepscope.findings import Axis, Cell, Column, Figure, Point, Table
from stepscope.recording.rows.training_log import TrainMemory, TrainRow, TrainRun
from stepscope.spec import ModelShape

_DRAWN = 1000  # points of a curve; more would overlap
_SETTLED = 2  # warm-up steps: allocations, connections, the order of gradients

_COLUMNS = (
    Column(key="strategy", label="strategy"),
    Column(key="ranks", label="ranks", kind="count"),
    Column(key="steps", label="steps", kind="count"),
    Column(key="first_loss", label="first loss", kind="number"),
    Column(key="last_loss", label="last loss", kind="number"),
    Column(key="step_ms", label="step (ms)", kind="ms"),
    Column(key="p20_ms", label="p20 (ms)", kind="ms", detail=True),
    Column(key="p80_ms", label="p80 (ms)", kind="ms", detail=True),
    Column(key="tokens_per_s", label="tokens/s", kind="count"),
    Column(key="mfu", label="MFU", kind="share"),
    Column(key="compute_ms", label="compute (ms)", kind="ms"),
    Column(key="communication_ms", label="communication (ms)", kind="ms"),
    Column(key="exposed_ms", label="exposed (ms)", kind="ms"),
    Column(key="exposed_share", label="exposed share", kind="share"),
)


def train_table(run: TrainRun, rows: Sequence[TrainRow]) -> Table:
    """One row per strategy and number of ranks that the run used, in order: losses, and where the time of the median
    step went."""
    notes = (
        *say_not_finite(rows),
        f"times are medians, excluding the first {_SETTLED} steps of each row (warm-up)",
        "compute is the step time minus exposed communication; all times are those of the slowest rank",
        f"MFU: {cost.FLOP_CONVENTION}; relative to ranks × the peak of {run.environment.hardware.name}"
        f" ({run.environment.hardware.source})",
        *limit_notes([run.environment]),
        *(["not captured: CUDA graphs need a GPU"] if _lacks_graphs(run) else []),
    )
    parts = [list(part) for _, part in itertools.groupby(rows, key=lambda row: (row.strategy, len(row.step_ns)))]
    return Table(title=_title(run), columns=_COLUMNS, rows=tuple(_line(run, part) for part in parts), notes=notes)


def memory_table(run: TrainRun, memory: Sequence[TrainMemory]) -> Table:
    """The memory of each rank at three points of a step, compared with the prediction."""
    expected, copies = _expected(run), run.training.workload.working_weights
    keys = ("parameters", "gradients", "optimizer", "gathered")
    lines: list[tuple[Cell, ...]] = []
    for row in memory:
        held = row.parameters + row.gradients + row.optimizer
        wanted = _wanted(row, expected)
        lines.append(
            (row.rank, row.moment, *(getattr(row, key) for key in keys), held, wanted, held / wanted, row.peak)
        )
    return Table(
        title=f"Memory per rank: {_title(run)}",
        columns=(
            Column(key="rank", label="rank", kind="count"),
            Column(key="moment", label="when"),
            *(Column(key=key, label=_LABELS[key], kind="bytes") for key in keys),
            Column(key="held", label="held", kind="bytes"),
            Column(key="expected", label="predicted", kind="bytes"),
            Column(key="ratio", label="held / predicted", kind="ratio"),
            Column(key="peak", label="peak memory", kind="bytes"),
        ),
        rows=tuple(lines),
        notes=(
            "held: parameters, gradients and optimizer state; gathered: the most weights gathered at any one time",
            f"predicted: {'an upper bound on ' if run.training.shard_optimizer else ''}bytes held by the fullest rank",
            "peak memory includes activations; on a CPU it includes everything the process allocated since it started",
            *(["parameters held include the bf16 copies, predicted ones do not"] if copies else []),
        ),
    )


_LABELS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state", "gathered": "gathered"}


def loss_figure(run: TrainRun, rows: Sequence[TrainRow]) -> Figure:
    """The loss by step. A long run is thinned to every n-th step, which the subtitle states."""
    every = max(1, -(-len(rows) // _DRAWN))
    drawn = [row for row in rows if row.step % every == 0 or row.step == len(rows)]
    thinned = f"; every {every} steps" if every > 1 else ""
    return Figure(
        title="Loss",
        subtitle=_title(run) + thinned,
        x=Axis(label="step"),
        y=Axis(label="loss", log=True),  # a linear axis would start at 0, far below any loss
        points=tuple(Point(panel="", series=row.strategy, x=row.step, y=row.loss) for row in drawn),
        series_label="strategy",
    )


def say_not_finite(rows: Sequence[TrainRow]) -> tuple[str, ...]:
    """A note if training diverged."""
    bad = [row for row in rows if not row.is_finite]
    if not bad:
        return ()
    return (f"the loss is not finite in {len(bad)} of {len(rows)} steps, first at step {bad[0].step}: {bad[0].loss}",)


def step_ms(row: TrainRow) -> float:
    return max(row.step_ns) / 1e6


def say_step(row: TrainRow) -> str:
    """Describe a step in a few words."""
    slowest = row.step_ns.index(max(row.step_ns))
    exposed = row.exposed_ns[slowest] / max(row.step_ns)
    rate = row.tokens / (max(row.step_ns) / 1e9)
    waited = f", {exposed:.0%} exposed communication" if row.communication_ns[slowest] else ""
    return f"loss {row.loss:.4f}, {step_ms(row):.4g} ms, {rate:,.0f} tokens/s{waited}"


def _line(run: TrainRun, rows: Sequence[TrainRow]) -> tuple[Cell, ...]:
    settled = rows[_SETTLED:] or rows
    step = summarise([step_ms(row) for row in settled])
    slowest = [row.step_ns.index(max(row.step_ns)) for row in settled]
    pairs = list(zip(settled, slowest, strict=True))
    busy = summarise([row.communication_ns[rank] / 1e6 for row, rank in pairs]).median
    exposed = summarise([row.exposed_ns[rank] / 1e6 for row, rank in pairs]).median
    compute = summarise([(row.step_ns[rank] - row.exposed_ns[rank]) / 1e6 for row, rank in pairs]).median
    share = summarise([row.exposed_ns[rank] / row.step_ns[rank] for row, rank in pairs]).median
    rate = rows[-1].tokens / (step.median / 1e3)
    first, last = rows[0].loss, rows[-1].loss
    ranks = len(rows[0].step_ns)
    alone = rows[0].strategy == "single"
    return (
        rows[0].strategy,
        ranks,
        len(rows),
        first,
        last,
        step.median,
        step.p20,
        step.p80,
        round(rate),
        _mfu(run, step.median, ranks),
        compute,
        None if alone else busy,
        None if alone else exposed,
        None if alone else share,
    )


def _mfu(run: TrainRun, step_ms: float, ranks: int) -> float | None:
    workload = run.training.workload
    peak = run.environment.hardware.peak_flops.get(workload.precision)
    if peak is None:
        return None
    assert isinstance(workload.model, ModelShape)
    forward = cost.forward_flops(workload.model, batch=workload.batch, context=workload.context)
    return cost.step_flops(forward, "train") / (step_ms / 1e3) / (peak * ranks)


def _lacks_graphs(run: TrainRun) -> bool:
    return run.training.workload.graph and run.environment.device == "cpu"


def _expected(run: TrainRun) -> cost.TrainingBytes:
    training = run.training
    assert isinstance(training.workload.model, ModelShape)
    is_fsdp = training.strategy == "fsdp"
    return cost.training_bytes(
        cost.layer_sizes(training.workload.model),
        ranks=training.ranks,
        sharding="fsdp" if is_fsdp else "optimizer" if training.shard_optimizer else "none",
        compute_bytes=2 if is_fsdp and training.workload.precision == "bf16" else None,
        state_bytes=0 if training.workload.optimizer == "sgd" else ADAM_STATE_BYTES,
    )


def _wanted(row: TrainMemory, expected: cost.TrainingBytes) -> int:
    state = expected.optimizer if row.optimizer else 0  # a resumed run has it from the start
    return expected.parameters + state + (0 if row.moment == "model built" else expected.gradients)


def _title(run: TrainRun) -> str:
    training, workload = run.training, run.training.workload
    data = "text data" if training.data else "synthetic tokens"
    return (
        f"{workload.model.name}, batch {workload.batch}, context {workload.context}, {workload.precision},"
        f" {training.strategy} on {training.ranks} × {run.environment.hardware.name}, {data}"
    )
