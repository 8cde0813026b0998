"""`verify --replay`: run a few layers of the claimed model on this machine's GPU, and compare evidence with them.

Weights and tokens are random: which work a kernel does depends on sizes, not on values. PyTorch's profiler records
launches in seconds. Nsight Compute takes 0.2 to 0.5 s per kernel, so it runs only if the evidence has counters, and
counts only those that are compared.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import read_plain, scratch_folder
from stepscope.jobs.experiments.counter_sweep import MODES
from stepscope.jobs.experiments.sweep import judge as judge_answer
from stepscope.jobs.experiments.sweep import look_at, place_cases
from stepscope.jobs.recorders.nsight_compute import count_with_ncu
from stepscope.jobs.recorders.recording_job import versions_of
from stepscope.jobs.signing import gpus_of_this_machine
from stepscope.jobs.workers.messages import Probed, Record, StepsRecorded
from stepscope.jobs.workers.process import Workers, require_torch
from stepscope.measure.targets.ncu import MOST_LAYERS, too_many_layers
from stepscope.recording.readers import kineto, ncu
from stepscope.recording.readers.counter_metrics import DURATION, METRICS
from stepscope.recording.rows.bench import RAW_TRACE_NAME, Environment
from stepscope.recording.store import Recording
from stepscope.recover.claims.claim import Claim
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.replay.comparison import BANDS, EXACT, ReplayComparison, compare
from stepscope.recover.replay.outcome import ReplayResult, ReplayVerdict, Surroundings, judge, rank
from stepscope.recover.replay.program import check_claim, cut_config, describe_program, list_programs
from stepscope.spec import Case, Factory, Timing, Workload
from stepscope.units import count_noun

_TIMING = Timing(steps=3, warmup=3)
_ONE_PASS = Timing(steps=1, warmup=3)
_RECORDED_STEPS = 3  # repetitions, which show how much durations vary
OnStage = Callable[[str], None]


class ReplayMachine(Protocol):
    """A GPU to replay on. `can_count`: Nsight Compute is installed."""

    @property
    def can_count(self) -> bool: ...

    def require(self) -> None:
        """Raise StepscopeError, within a second, if nothing can run here."""

    def inspect(self, workload: Workload) -> Environment: ...

    def record(self, workload: Workload) -> Recording: ...

    def count(self, workload: Workload, metrics: Sequence[str]) -> Recording: ...


class LocalGpu:
    """The first GPU of this machine. Models run in processes of their own, which end with it."""

    def __init__(self, on_stage: OnStage = lambda _: None) -> None:
        self._workers = Workers()
        self._on_stage = on_stage
        self._probed: Probed | None = None

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._workers.__exit__(kind, error, traceback)

    @property
    def can_count(self) -> bool:
        return shutil.which("ncu") is not None

    def require(self) -> None:
        if not gpus_of_this_machine():
            raise _no_gpu("no NVIDIA driver or GPU was found")
        require_torch()
        self._workers.start()  # imports torch while the evidence is read

    def inspect(self, workload: Workload) -> Environment:
        return self._probe(workload).environment

    def record(self, workload: Workload) -> Recording:
        case = self._place(workload)
        with scratch_folder() as scratch:
            request = Record(case=case, folder=str(scratch), steps=_RECORDED_STEPS)
            ended = self._workers.run(request, on_stage=self._on_stage)
            if not isinstance(ended.answer, StepsRecorded):
                status, reason = judge_answer(ended.answer)
                raise StepscopeError(
                    f"the claimed model did not run here: {status}",
                    detail=reason,
                    hint="--replay 2, on a GPU with more memory, or stepscope doctor",
                )
            return kineto.read(scratch / RAW_TRACE_NAME)

    def count(self, workload: Workload, metrics: Sequence[str]) -> Recording:
        case = msgspec.structs.replace(self._place(workload), timing=_ONE_PASS)
        with scratch_folder() as scratch:
            csv, _ = count_with_ncu(case, metrics=metrics, scratch=scratch, on_stage=self._on_stage)
            return ncu.read(csv)

    def _place(self, workload: Workload) -> Case:
        case = Case(workload=workload, timing=_TIMING)
        return place_cases([case], self._probe(workload))[0].case

    def _probe(self, workload: Workload) -> Probed:
        """Return what the first workload shows of this GPU. Raises StepscopeError for a model that cannot be built, and
        without a GPU."""
        if self._probed is None:
            probed = look_at([Case(workload=workload, timing=_TIMING)], self._workers, None)
            if probed.environment.device == "cpu":
                raise _no_gpu(f"torch {probed.environment.torch} does not see one")
            self._probed = probed
        return self._probed


def _no_gpu(detail: str) -> StepscopeError:
    return StepscopeError(
        "`--replay` requires a GPU, which this machine does not have",
        detail=f"the claimed model runs here, and the evidence is compared with it; {detail}",
        hint="remove --replay, or run it on a GPU of the same kind as the prover's; stepscope doctor",
    )


class Replayer(msgspec.Struct, frozen=True, kw_only=True):
    """Replays `layers` layers of a claimed model, or all of them if it has fewer."""

    layers: int
    machine: ReplayMachine

    def check(self, claim: Claim) -> None:
        """Raise StepscopeError, before the evidence is read, if the claim cannot be replayed here."""
        check_claim(claim)
        self.machine.require()

    def run(
        self, claim: Claim, path: Path, recordings: Sequence[Recording], evidence: Sequence[KernelEvidence]
    ) -> tuple[ReplayResult, ...]:
        """Return the result for every file with kernels. `path` is the file with the claim."""
        assert claim.num_layers is not None, "`check` was called"
        layers = min(self.layers, claim.num_layers)
        with scratch_folder() as scratch:
            config = None
            if claim.model_type is not None:
                config = scratch / "config.json"
                config.write_text(json.dumps(cut_config(json.loads(read_plain(path)), layers)))
            pairs = zip(recordings, evidence, strict=True)
            return tuple(self._replay(claim, one, seen, layers, config) for one, seen in pairs if seen.sightings)

    def _replay(
        self, claim: Claim, recording: Recording, seen: KernelEvidence, layers: int, config: Path | None
    ) -> ReplayResult:
        """Return the result for one file, with the program that explains it best."""
        started = time.monotonic()
        num_layers = claim.num_layers or 0
        stated = None if recording.manifest.case is None else recording.manifest.case.workload
        best: ReplayResult | None = None
        for workload in list_programs(claim, seen.sightings, layers=layers, config=config, stated=stated):
            environment = self.machine.inspect(workload)
            replayed, notes = self._record(workload, seen, layers)
            comparison = _compare(seen, replayed, num_layers)
            comparison.notes += notes
            where = Surroundings(
                device=environment.driver_name,
                evidence_device=seen.device,
                versions=replayed.manifest.versions | _versions_here(environment, workload),
                evidence_versions=recording.manifest.versions,
                is_stated=stated is not None,
            )
            verdict, why = judge(comparison, where, layers=f"{layers} of {count_noun(num_layers, 'layer')}")
            result = ReplayResult(
                file=seen.file,
                verdict=verdict,
                why=why,
                program=describe_program(workload),
                layers=layers,
                num_layers=num_layers,
                recorder=replayed.manifest.source,
                seconds=0.0,
                surroundings=where,
                comparison=comparison,
            )
            best = result if best is None or rank(result) > rank(best) else best
            if best.verdict is ReplayVerdict.AGREES:
                break
        assert best is not None, "there is at least one program"
        return msgspec.structs.replace(best, seconds=round(time.monotonic() - started, 1))

    def _record(self, workload: Workload, seen: KernelEvidence, layers: int) -> tuple[Recording, list[str]]:
        if not seen.has_counters:
            return self.machine.record(workload), []
        if workload.mode not in MODES:
            return self.machine.record(workload), ["counters were not replayed: this is not a forward pass"]
        if not self.machine.can_count:
            return self.machine.record(workload), ["counters were not replayed: `ncu` is not on the PATH"]
        if layers > MOST_LAYERS:
            raise too_many_layers(layers, f"--replay {MOST_LAYERS}")
        return self.machine.count(workload, _choose_metrics(seen)), []


def _compare(seen: KernelEvidence, replayed: Recording, num_layers: int) -> ReplayComparison:
    try:
        return compare(seen, gather(replayed), num_layers)
    except NoTransformerError as error:
        return ReplayComparison(kernels=len(seen.sightings), missing=[str(error)])


def _choose_metrics(seen: KernelEvidence) -> list[str]:
    """Return the metrics that are compared and that the evidence has."""
    counted = {key for one in seen.sightings for key in one.counters}
    return [one.name for one in METRICS if one.name == DURATION or one.key in counted & {*EXACT, *BANDS}]


def _versions_here(environment: Environment, workload: Workload) -> dict[str, str]:
    versions = versions_of(environment, workload)
    return versions | ({"transformers": version("transformers")} if isinstance(workload.model, Factory) else {})
