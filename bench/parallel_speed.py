"""Our data-parallel strategies against PyTorch's own, over networks of several speeds.

Two ranks on this machine with one thread each, over loopback and over a link limited to 5 and to 1 Gbit/s
(`shaped_link.py`, which requires root). For each network, in one run: the collectives are measured and a line is fitted
to each; from these, and from the step without synchronization, the step times of naive, flat, overlap and bucketed are
predicted; every strategy is checked against plain training on all batches; then all are timed, alternating in rotating
order, so that other load on the machine affects all alike.

    sudo python bench/parallel_speed.py --name NAME
    python bench/parallel_speed.py --networks loopback --quick

A step is the slower rank's. Exposed is how much longer it is than the step without synchronization, shown next to what
the communicator itself counted, for ours. A ratio is the peer's time over ours, above 1 is faster: the peer is the
faster of torch's two DDP variants, and of the two ZeroRedundancyOptimizer variants. Rows are appended to
`results/parallel_NAME.jsonl` next to this file.
"""

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from parallel_rank import (
    ALONE,
    BUCKET_MB,
    DDP_NAMES,
    NAMES,
    TORCH_DDP_NAMES,
    ZERO_NAMES,
    Agreement,
    Job,
    Question,
    Sample,
    serve,
)
from shaped_link import LinkError, Side, shaped_link
from stepscope import cost
from stepscope.cost import Compute, DdpStrategy, StepTime
from stepscope.explain.statistics import Statistics, summarise
from stepscope.recording.rows.collective_case import CommCase, CommOutcome
from stepscope.recording.rows.links import COLLECTIVES, LinkPlace, Links
from stepscope.spec import ModelShape

WORLD = 2
RATES = {"loopback": None, "5gbit": "5gbit", "1gbit": "1gbit"}
# 27 million parameters and 107 MB of gradients: at 5 Gbit/s as much communication as computation.
SHAPE = ModelShape(d_model=512, d_ff=1408, num_layers=7, num_heads=8, num_kv_heads=8, vocab=4096)
QUICK_SHAPE = ModelShape(d_model=64, d_ff=128, num_layers=2, num_heads=4, num_kv_heads=4, vocab=256)
SIZES_BYTES = (10_000, 100_000, 1_000_000, 4_000_000, 16_000_000, 64_000_000)
QUICK_SIZES_BYTES = (10_000, 1_000_000)
ROUNDS, QUICK_ROUNDS = 5, 1
TURN_S, MOST_STEPS = 0.6, 2  # the length of a turn in seconds or steps, but at least one step
ALONE_STEPS = 6  # before predictions
# The parameters' distance from the reference's, relative to how far they moved. A different order of sums gives 1e-5.
AGREEMENT_LIMIT = 1e-3
# Which are compared with the fastest of which. Plain AdamW under the same DDP is `bucketed`.
GROUPS = (
    ((*DDP_NAMES, *TORCH_DDP_NAMES), TORCH_DDP_NAMES),
    (("ShardedOptimizer", *ZERO_NAMES), ZERO_NAMES),
    (("FSDP", "fully_shard"), ("fully_shard",)),
)


class Ranks:
    """The processes of one network."""

    def __init__(self, job: Job, sides: Sequence[Side | None], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["parallel_rank"])
        pipes = [context.Pipe() for _ in sides]
        self._processes = [
            context.Process(
                target=serve, args=(rank, len(sides), side, folder / "meeting", job, pipes[rank][1]), daemon=True
            )
            for rank, side in enumerate(sides)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        self._pipes = [ours for ours, _ in pipes]
        self._collect()

    def ask(self, question: Question) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return self._collect()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            for pipe in self._pipes:
                pipe.send(("leave",))
        for process in self._processes:
            process.join(timeout=5)
            process.kill()
            process.join()

    def _collect(self) -> list[Any]:
        """All answers, or an error that names the rank that is gone."""
        answers: dict[int, Any] = {}
        waiting: dict[Connection, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            for pipe in multiprocessing.connection.wait(list(waiting)):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    raise LinkError(f"rank {rank} died; see its output above") from None
        return [answers[rank] for rank in range(len(self._pipes))]


@contextlib.contextmanager
def ranks_on(network: str, job: Job) -> Iterator[Ranks]:
    """Ranks that communicate over this network; both are removed afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stepscope-")))
        rate = RATES[network]
        sides: Sequence[Side | None] = stack.enter_context(shaped_link(rate)) if rate else [None] * WORLD
        ranks = Ranks(job, sides, folder)
        stack.callback(ranks.end)
        yield ranks


# --- Predictions
# --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What was known before the strategies were timed, and what followed from it."""

    links: Links
    processor_share: float
    compute: Compute
    steps: Mapping[DdpStrategy, StepTime]

    @property
    def order(self) -> list[DdpStrategy]:
        return sorted(self.steps, key=lambda name: self.steps[name].step_ns)


def predict(ranks: Ranks, job: Job, sizes_bytes: Sequence[int], network: str) -> Prediction:
    links, processor_share = measure_links(ranks, sizes_bytes, network)
    alone = slower_rank(ranks.ask(("run", ALONE, ALONE_STEPS)))
    copy_ns = statistics.median(ranks.ask(("copy",)))
    compute = Compute(
        forward_ns=statistics.median(one.forward_ns for one in alone),
        backward_ns=statistics.median(one.backward_ns for one in alone) + copy_ns,
        optimizer_ns=statistics.median(one.optimizer_ns for one in alone),
    )
    gradients = cost.model_gradients(job.shape, compute.backward_ns)
    steps = {
        strategy: cost.predict_ddp(
            strategy,
            gradients,
            compute,
            links,
            bucket_bytes=round(BUCKET_MB * 2**20),
            processor_share=processor_share,
        )
        for strategy in cost.DDP_STRATEGIES
    }
    return Prediction(links=links, processor_share=processor_share, compute=compute, steps=steps)


def measure_links(ranks: Ranks, sizes_bytes: Sequence[int], network: str) -> tuple[Links, float]:
    """The fitted line of each collective, and how much of a core an all-reduce takes."""
    cases = tuple(
        CommCase(collective=collective, message_bytes=size, ranks=WORLD, backend="gloo", device="cpu", seconds=0.3)
        for collective in COLLECTIVES
        for size in sizes_bytes
    )
    outcomes: list[CommOutcome] = ranks.ask(("measure", cases))[0]
    points: dict[str, list[tuple[int, float]]] = {}
    shares = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome.measurement is None:
            raise LinkError(f"{case.collective} of {case.message_bytes} bytes: {outcome.reason}")
        points.setdefault(case.collective, []).append(
            (case.moved_bytes, summarise(outcome.measurement.slowest_ns).median)
        )
        shares[case.collective, case.message_bytes] = outcome.measurement.processor_share
    fitted = {collective: cost.fit_link(points[collective]) for collective in COLLECTIVES}
    place = LinkPlace(backend="gloo", device_name=network, ranks=WORLD)
    links = Links(place=place, links={name: link for name, link in fitted.items() if link is not None})
    # Two ranks with one thread each: if a core is free, communication runs there.
    spare = (os.cpu_count() or 1) > WORLD
    return links, 0.0 if spare else min(1.0, shares["all-reduce", max(sizes_bytes)])


# --- Measurements
# -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Timed:
    """The steps of one strategy, the slower rank's of each, by rounds."""

    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def step_ms(self) -> Statistics:
        return summarise([one.step_ns / 1e6 for one in self.samples])

    @property
    def samples(self) -> list[Sample]:
        return [one for turn in self.rounds for one in turn]

    def median_ms(self, name: str) -> float | None:
        found = [value for one in self.samples if (value := getattr(one, name)) is not None]
        return statistics.median(found) / 1e6 if found else None

    def against(self, peer: "Timed") -> Statistics:
        """The peer's time over this one's, round by round."""
        return summarise(
            [_middle(theirs) / _middle(ours) for ours, theirs in zip(self.rounds, peer.rounds, strict=True)]
        )


def _middle(turn: Sequence[Sample]) -> float:
    return statistics.median(one.step_ns for one in turn)


def slower_rank(answers: list[list[Sample]]) -> list[Sample]:
    return [max(of_ranks, key=lambda one: one.step_ns) for of_ranks in zip(*answers, strict=True)]


def check(ranks: Ranks, names: Sequence[str]) -> dict[str, Agreement]:
    """Every strategy builds and runs two steps, which also warms it up."""
    found: dict[str, Agreement] = {}
    for name in names:
        answers: list[dict[str, Agreement]] = ranks.ask(("check", (name,)))
        found[name] = max((answer[name] for answer in answers), key=lambda one: (one.largest, not one.bitwise))
        if not found[name].largest < AGREEMENT_LIMIT:
            raise LinkError(f"{name} is wrong: relative error {found[name].largest:.2g}")
    return found


def time_all(ranks: Ranks, names: Sequence[str], rounds: int) -> dict[str, Timed]:
    """Alternates between strategies. Their first steps ran in the check and do not count."""
    timed = {name: Timed() for name in names}
    steps = dict.fromkeys(names, 1)
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            samples = slower_rank(ranks.ask(("run", name, steps[name])))
            timed[name].rounds.append(samples)
            steps[name] = max(1, min(MOST_STEPS, round(TURN_S * 1e9 / _middle(samples))))
    return timed


# --- Output
# -------------------------------------------------------------------------------------------------------------


def make_rows(
    network: str, agreed: Mapping[str, Agreement], prediction: Prediction, timed: Mapping[str, Timed]
) -> list[dict[str, Any]]:
    alone_ms = timed[ALONE].step_ms.median
    peers = {name: _faster(timed, peers) for names, peers in GROUPS for name in names if name in timed}
    rows = []
    for name, one in timed.items():
        step_ms, exposed_ms = one.step_ms, one.step_ms.median - alone_ms
        predicted = prediction.steps.get(name) if name in DDP_NAMES else None  # type: ignore[call-overload]
        peer = peers.get(name)
        ratio = one.against(timed[peer]) if peer and peer != name else None
        rows.append(
            {
                "network": network,
                "case": name,
                "step_ms": {"median": step_ms.median, "p20": step_ms.p20, "p80": step_ms.p80},
                "forward_ms": one.median_ms("forward_ns"),
                "backward_ms": one.median_ms("backward_ns"),
                "optimizer_ms": one.median_ms("optimizer_ns"),
                "exposed_share": exposed_ms / step_ms.median,
                "communicator_exposed_ms": one.median_ms("waited_ns"),
                "communicator_busy_ms": one.median_ms("communicated_ns"),
                "peer": peer,
                "vs_peer": {"median": ratio.median, "p20": ratio.p20, "p80": ratio.p80} if ratio else None,
                "predicted_ms": predicted.step_ns / 1e6 if predicted else None,
                "predicted_exposed_share": predicted.exposed_share if predicted else None,
                "bitwise": agreed[name].bitwise,
                "off_by": agreed[name].largest,
                "samples_ns": [[sample.step_ns for sample in turn] for turn in one.rounds],
            }
        )
    return rows


def _faster(timed: Mapping[str, Timed], peers: Sequence[str]) -> str | None:
    return min((name for name in peers if name in timed), key=lambda name: timed[name].step_ms.median, default=None)


def print_agreement(network: str, agreed: Mapping[str, Agreement]) -> None:
    others = [f"{name} differs by {one.largest:.1g}" for name, one in agreed.items() if not one.bitwise]
    print(
        f"\n{network}: parameters after two steps are bitwise identical to plain training, except: {others or 'none'}"
    )


def print_prediction(network: str, prediction: Prediction) -> None:
    link = prediction.links.links["all-reduce"]
    print(
        f"{network}: all-reduce {link.latency_ns / 1e6:.2f} ms + message / {link.bytes_per_s / 1e9:.3f} GB/s "
        f"(off by {link.residual or 0:.0%}), {prediction.processor_share:.0%} of a core; "
        f"predicted order: {' < '.join(prediction.order)}",
        flush=True,
    )


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    measured = sorted(
        (row for row in rows if row["case"] in DDP_NAMES), key=lambda row: float(row["step_ms"]["median"])
    )
    print(f"measured order: {' < '.join(str(row['case']) for row in measured)}")
    heads = ("case", "step ms", "p20", "p80", "optimizer", "exposed", "counted", "vs peer", "peer", "predicted", "off")
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    for line in lines:
        cells = [
            text.ljust(width) if at in (0, 8) else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    step, ratio, predicted = row["step_ms"], row["vs_peer"], row["predicted_ms"]
    counted = row["communicator_exposed_ms"]
    return (
        row["case"],
        f"{step['median']:.1f}",
        f"{step['p20']:.1f}",
        f"{step['p80']:.1f}",
        f"{row['optimizer_ms']:.1f}",
        f"{row['exposed_share']:.0%}",
        "–" if counted is None else f"{counted / step['median']:.0%}",
        f"{ratio['median']:.2f} [{ratio['p20']:.2f}, {ratio['p80']:.2f}]" if ratio else "–",
        row["peer"] if ratio else "",
        f"{predicted:.1f}" if predicted else "–",
        f"{predicted / step['median'] - 1:+.0%}" if predicted else "–",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our data-parallel strategies with PyTorch's own.")
    parser.add_argument(
        "--networks",
        default=",".join(RATES),
        help=f"comma-separated list of {', '.join(RATES)}; all but loopback require root",
    )
    parser.add_argument(
        "--rounds", type=int, choices=range(1, 1001), metavar="N", help=f"rounds per strategy [{ROUNDS}]"
    )
    parser.add_argument(
        "--only", default="", help="only strategies whose name contains one of these, comma-separated, and `alone`"
    )
    parser.add_argument("--quick", action="store_true", help="smoke test: a tiny model and one round")
    parser.add_argument("--name", help="append to results/parallel_NAME.jsonl")
    arguments = parser.parse_args()
    networks = arguments.networks.split(",")
    if unknown := [name for name in networks if name not in RATES]:
        parser.error(f"unknown network: `{unknown[0]}`; expected one or more of {', '.join(RATES)}")
    job = Job(shape=QUICK_SHAPE, batch=1, context=16) if arguments.quick else Job(shape=SHAPE, batch=1, context=128)
    # Either signal also removes the ranks and the network; background jobs of a shell ignore the first one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        for network in networks:
            run(network, job, arguments)
    except LinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: ranks and networks were removed", file=sys.stderr)
        return 130
    return 0


def run(network: str, job: Job, arguments: argparse.Namespace) -> None:
    wanted = [part for part in arguments.only.split(",") if part]
    names = [name for name in NAMES if name == ALONE or not wanted or any(part in name for part in wanted)]
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with ranks_on(network, job) as ranks:
        agreed = check(ranks, names)
        print_agreement(network, agreed)
        prediction = predict(ranks, job, QUICK_SIZES_BYTES if arguments.quick else SIZES_BYTES, network)
        print_prediction(network, prediction)
        rows = make_rows(network, agreed, prediction, time_all(ranks, names, rounds))
    print_rows(rows)
    if arguments.name:
        append(rows, prediction, job, arguments.name)


def append(rows: Sequence[Mapping[str, Any]], prediction: Prediction, job: Job, name: str) -> None:
    import torch

    from stepscope.measure.environment import describe

    shared = {
        "benchmark": "parallel_speed",
        "command": shlex.join(["python", *sys.argv]),
        "environment": msgspec.to_builtins(describe(torch.device("cpu"), {"fp32"})),
        "ranks": WORLD,
        "model": msgspec.to_builtins(job.shape),
        "parameters": cost.parameters(job.shape).total,
        "batch": job.batch,
        "context": job.context,
        "links": msgspec.to_builtins(prediction.links.links),
        "processor_share": prediction.processor_share,
        "compute": msgspec.to_builtins(prediction.compute),
        "predicted_order": prediction.order,
    }
    path = Path(__file__).parent / "results" / f"parallel_{name}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(shared | dict(row)) + "\n")
    print(f"appended to {path}")


if __name__ == "__main__":
    sys.exit(main())
