"""What `verify --replay` says about a true claim and about false ones, on a GPU with `transformers`.

    python bench/replay_check.py              # the true claim and three false ones
    python bench/replay_check.py --all        # also training steps, and recordings that state their settings
    python bench/replay_check.py --counters   # also counters of forward passes, with ncu: 0.2 to 0.5 s per kernel

The claim is always the same Llama with four layers. The runs are recorded here: GPU and versions are the same on both
sides. Runs that are stated come with their settings and versions, as `stepscope profile` saves them; the others are
traces of unknown origin. Exits with 1 if a replay says anything else than expected.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from result_rows import fail
from stepscope.errors import StepscopeError
from stepscope.jobs.recorders.recording_job import versions_of
from stepscope.jobs.replay import LocalGpu, Replayer
from stepscope.recording.readers.counter_metrics import FEW
from stepscope.recording.store import Recording
from stepscope.recover.claims.claim import read_claim
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.replay.outcome import ReplayResult
from stepscope.recover.reports.challenge import derive_challenge
from stepscope.spec import Case, Factory, HuggingFace, Mode, Timing, Workload

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
DIFFERS = ("refuted", "cannot tell")


@dataclass(frozen=True)
class Run:
    """A run of the prover. `changes` are those to the claimed config, and `expected` the verdicts that are right."""

    name: str
    expected: tuple[str, ...]
    changes: tuple[tuple[str, int], ...] = ()
    dtype: str = "bf16"
    is_twice: bool = False
    mode: Mode = "inference"
    is_stated: bool = False
    layers: int = 2


FIRST = 4  # the runs without --all
RUNS = (
    Run("the claimed model", ("agrees",)),
    Run("2 layers, each twice", ("agrees",), (("num_hidden_layers", 2),), is_twice=True),
    Run("d_ff 2,560 instead of 2,816", DIFFERS, (("intermediate_size", 2560),)),
    Run("fp16 instead of bf16", DIFFERS, dtype="fp16"),
    Run("the claimed model, trained", ("agrees",), mode="train", layers=4),
    Run("2 layers, each twice, trained", DIFFERS, (("num_hidden_layers", 2),), is_twice=True, mode="train", layers=4),
    Run("the claimed model, stated", ("agrees",), is_stated=True),
    Run("d_ff 2,560, stated", ("refuted",), (("intermediate_size", 2560),), is_stated=True),
    Run("fp16, stated as bf16", ("refuted",), dtype="fp16", is_stated=True),
)


def build_twice(config: str, dtype: str, batch: int, context: int, *, with_loss: bool) -> Any:
    """A factory: every layer of the config runs twice in a row."""
    from torch import nn

    from stepscope.measure.cast_model import build

    module: Any
    module, inputs, loss = build(config, dtype, batch, context, with_loss=with_loss)
    layers = list(module.model.layers)
    module.model.layers = nn.ModuleList([one for layer in layers for one in (layer, layer)])
    module.config.num_hidden_layers = 2 * len(layers)
    return module, inputs, loss


def make_workload(run: Run, folder: Path, batch: int, context: int) -> Workload:
    path = folder / f"{RUNS.index(run)}.json"
    path.write_text(json.dumps(CONFIG | dict(run.changes)))
    sizes: dict[str, Any] = {"batch": batch, "context": context, "mode": run.mode}
    if run.is_stated:
        return Workload(model=HuggingFace(config=str(path)), precision=run.dtype, **sizes)  # type: ignore[arg-type]
    target = f"{Path(__file__).resolve()}:build_twice" if run.is_twice else "stepscope.measure.cast_model:build"
    arguments = (("config", str(path)), ("dtype", run.dtype), ("with_loss", run.mode == "train"))
    return Workload(model=Factory(target=target, arguments=arguments), **sizes)


def record(run: Run, workload: Workload, machine: LocalGpu, *, counted: bool) -> Recording:
    recording = machine.count(workload, FEW) if counted else machine.record(workload)
    if not run.is_stated:
        return recording
    environment = machine.inspect(workload)
    versions = recording.manifest.versions | versions_of(environment, workload)
    return recording.with_manifest(case=Case(workload=workload, timing=Timing()), versions=versions)


def judge(run: Run, recording: Recording, machine: LocalGpu, claim_path: Path, **task: int) -> tuple[str, ReplayResult]:
    """Return what `verify` says without a replay, and the replay."""
    claim = read_claim(claim_path, dtype="bf16", **task)
    evidence: KernelEvidence = gather(recording, file=run.name)
    try:
        alone = verify([evidence], claim).verdict.value
    except NoTransformerError:
        alone = "cannot tell"
    (replay,) = Replayer(layers=run.layers, machine=machine).run(claim, claim_path, [recording], [evidence])
    return alone, replay


def check(runs: Sequence[Run], folder: Path, *, counted: bool) -> Iterator[bool]:
    challenge = derive_challenge("replay-check", max_tokens=4096)
    task = {"batch": challenge.batch, "context": challenge.context}
    claim = folder / "claim.json"
    claim.write_text(json.dumps(CONFIG))
    with LocalGpu() as machine:
        machine.require()
        for run in runs:
            started = time.monotonic()
            recording = record(run, make_workload(run, folder, **task), machine, counted=counted)
            recorded_s = time.monotonic() - started
            alone, replay = judge(run, recording, machine, claim, **task)
            found = replay.comparison
            is_right = replay.verdict.value in run.expected
            ratio = "" if found.time_ratio is None else f"{found.time_ratio:.2f}"
            print(
                f"| {run.name} | {'counters' if counted else 'trace'} | {alone} | {replay.verdict.value} | "
                f"{' or '.join(run.expected)} | {found.equal} of {found.compared} of {found.kernels} | {ratio} | "
                f"{found.outside_share:.1%} | {recorded_s:.1f} s | {replay.seconds} s | "
                f"{'' if is_right else 'WRONG: '}{replay.why[:160]} |",
                flush=True,
            )
            yield is_right


def main() -> int:
    parser = argparse.ArgumentParser(description="Replays of true and false claims.")
    parser.add_argument("--all", action="store_true", help="also train, and state the settings of a run")
    parser.add_argument("--counters", action="store_true", help="count the forward runs with ncu, too")
    arguments = parser.parse_args()
    started = time.monotonic()
    columns = (
        "run",
        "evidence",
        "verify alone",
        "replay",
        "expected",
        "equal",
        "time",
        "outside",
        "recorded",
        "replayed",
    )
    print(f"| {' | '.join(columns)} | why |")
    print("| --- | --- | --- | --- | --- | --- | --: | --: | --: | --: | --- |")
    try:
        with TemporaryDirectory() as folder:
            runs = RUNS if arguments.all else RUNS[:FIRST]
            right = list(check(runs, Path(folder), counted=False))
            if arguments.counters:
                forward = [run for run in runs if run.mode == "inference"]
                right += check(forward, Path(folder), counted=True)
    except StepscopeError as error:
        fail(str(error))
    print(f"\n{sum(right)} of {len(right)} as expected, in {time.monotonic() - started:.0f} s")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
