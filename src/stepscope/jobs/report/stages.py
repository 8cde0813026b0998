"""The stages of a report: each measures one aspect of a case, keeps the results, and finds them again.

A stage adds its results to the run's `Materials`. `load` does the same from disk, for a report that resumes and for one
that is made from an earlier directory. All stages share one pool of worker processes.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.commands import write_command
from stepscope.explain.experiments.attention_shapes import AttentionShape, find_attention_shape
from stepscope.explain.experiments.attention_tables import summary_ms
from stepscope.explain.experiments.bench_tables import mfu_of, step_ms
from stepscope.explain.experiments.optimise_tables import say_result
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.precision.precision_tables import find_speeds
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import Profile, kernel_word, make_profile
from stepscope.findings import STAGES, STAGES_ON_REQUEST
from stepscope.jobs.experiments.attention_sweep import AttentionExperiment, PlannedAttention
from stepscope.jobs.experiments.memory_sweep import MemoryExperiment, recording_folder
from stepscope.jobs.experiments.sweep import BenchExperiment, Planned, TextListener
from stepscope.jobs.optimise import OptimisationJob, check_workload
from stepscope.jobs.precision import CONTEXT_ON_CPU, PrecisionJob, choose_precisions
from stepscope.jobs.recorders.recording_job import ProfileJob
from stepscope.jobs.report.plan_stage import PlanStage
from stepscope.jobs.report.stage import ReportStage, StageWork, UnavailableError
from stepscope.jobs.workers.process import InputRefusedError
from stepscope.recording import store
from stepscope.recording.rows.attention_case import AttentionCase, AttentionRow
from stepscope.recording.rows.bench import BenchRow, Row
from stepscope.recording.rows.optimisation import read_optimisation
from stepscope.recording.rows.precision_report import read_report
from stepscope.spec import Factory, ModelShape, Precision, Workload, for_precisions
from stepscope.spec.backends import compared_on
from stepscope.units import count_noun, say_bytes

# If timing the case takes no longer than this, it is also timed in the other common precision.
_LITTLE_S = 60.0
_COMPILING_S = 90.0


class BenchStage(ReportStage):
    name = "bench"

    def keys(self, work: StageWork) -> tuple[str, ...]:
        return work.planned.key, work.other.key

    def expected_s(self, work: StageWork) -> float:
        return work.planned.expected_s + work.other.expected_s

    def load(self, folder: Path, keys: Sequence[str], materials: Materials, /) -> Materials:
        return replace(materials, bench=self.read_rows(folder, BenchRow, keys))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        sweep = self.sweep(work, BenchExperiment())
        rows = sweep.run_planned([work.planned], work.workers, TextListener(work.on_stage))
        _require_ok(rows)
        if rows[0].wall_s <= _LITTLE_S:
            relay = TextListener(lambda text: work.on_stage(f"in {work.other.case.workload.precision}: {text}"))
            with suppress(InputRefusedError):  # a model may not support the other precision
                rows += tuple(r for r in sweep.run_planned([work.other], work.workers, relay) if r.status == "ok")
        return replace(materials, bench=rows), tuple(row.key for row in rows)

    def tell(self, materials: Materials) -> str:
        row = materials.bench[0]
        step, mfu = step_ms(row), mfu_of(row)
        return (f"{step.median:.4g} ms per step" if step else row.status) + (f", MFU {mfu:.1%}" if mfu else "")


class ProfileStage(ReportStage):
    name = "profile"

    def expected_s(self, work: StageWork) -> float:
        return 4 + 20 * work.step_s

    def load(self, folder: Path, _keys: Sequence[str], materials: Materials, /) -> Materials:
        place = folder / self.name
        return replace(materials, profile=make_profile(store.load(place), place))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        place = work.folder / self.name
        ProfileJob(folder=place, command=work.command, force=True).run_planned(
            work.planned, work.workers, work.on_stage
        )
        work.on_stage("analyzing")
        return self.load(work.folder, (), materials), self.keys(work)

    def tell(self, materials: Materials) -> str:
        profile = materials.profile
        assert profile is not None
        count = round(profile.kernels.height / profile.num_steps)
        busy = "" if profile.on_cpu else f", GPU busy {1 - profile.idle_share:.1%}"
        return f"{count_noun(count, kernel_word(profile))} per step{busy}"


class MemoryStage(ReportStage):
    name = "memory"

    def load(self, folder: Path, keys: Sequence[str], materials: Materials, /) -> Materials:
        place = recording_folder(folder / self.name, keys[0])
        if not store.is_recording(place):
            raise StepscopeError(f"recording not found: `{place}`")
        return replace(materials, memory=make_memory_profile(store.load(place)))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        # A row without its recording is useless here, so whatever was not loaded is recorded again.
        sweep = replace(self.sweep(work, MemoryExperiment(snapshots=True)), fresh=True)
        rows = sweep.run_planned([work.planned], work.workers, TextListener(work.on_stage))
        _require_ok(rows)
        work.on_stage("analyzing")
        return self.load(work.folder, self.keys(work), materials), self.keys(work)

    def tell(self, materials: Materials) -> str:
        assert materials.memory is not None
        return f"peak memory {say_bytes(materials.memory.peak_bytes)}"


class PrecisionStage(ReportStage):
    name = "precision"

    def keys(self, work: StageWork) -> tuple[str, ...]:
        return (self.plan(work).key,)

    def command(self, work: StageWork) -> str:
        return write_command(self.name, self.plan(work).case.workload)

    def load(self, folder: Path, _keys: Sequence[str], materials: Materials, /) -> Materials:
        return replace(materials, precision=read_report(folder / f"{self.name}.json"))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        planned, out = self.plan(work), work.folder / f"{self.name}.json"
        job = PrecisionJob(command=work.command, out=out, force=True, bench_rows=_rows_with_speeds(materials, planned))
        report = job.run_planned(planned, choose_precisions((), planned.case), work.workers, work.on_stage)
        return replace(materials, precision=report), self.keys(work)

    def tell(self, materials: Materials) -> str:
        assert materials.precision is not None
        runs = materials.precision.comparison.runs
        errors = [f"{run.precision} {run.gradient_error:.1e}" for run in runs if run.gradient_error is not None]
        return f"gradient error: {', '.join(errors)}" if errors else "no finite gradients"

    def plan(self, work: StageWork) -> Planned:
        """One uncompiled forward and backward pass, with settings that have no effect at their defaults. On a CPU,
        where fp16 is slow, the context is short if the model allows it."""
        workload = work.planned.case.workload
        context = workload.context
        if workload.device == "cpu" and not isinstance(workload.model, Factory):
            context = min(context, CONTEXT_ON_CPU)
        chosen = msgspec.structs.replace(for_precisions(workload), context=context)
        return msgspec.structs.replace(work.planned, case=msgspec.structs.replace(work.planned.case, workload=chosen))


_SHORTEST = 16
_OF_CASE = "case-"  # the key of a case whose rows are not known before it is profiled
_USUAL_S = 15.0


class AttentionStage(ReportStage):
    """Attention in the shape of the model, at its length, half of it and twice that. The workload has the shape of the
    built-in model; that of other models is read from the recording of the profile stage."""

    name = "attention"

    def keys(self, work: StageWork) -> tuple[str, ...]:
        """The keys of the rows. Without the shape of the model, a key of the case stands for all of them."""
        if not isinstance(work.planned.case.workload.model, ModelShape):
            return (f"{_OF_CASE}{work.planned.key}",)
        return tuple(one.key for one in self.plan(work, None))

    def command(self, work: StageWork) -> str:
        if not isinstance(work.planned.case.workload.model, ModelShape):
            return f"stepscope {self.name}"
        planned = self.plan(work, None)
        case = planned[0].case
        lengths = ",".join(str(length) for length in dict.fromkeys(one.case.length for one in planned))
        shape = f"--batch {case.batch} --heads {case.heads} --head-dim {case.head_dim} --length {lengths}"
        return f"stepscope {self.name} {shape} --precision {case.precision}"

    def expected_s(self, work: StageWork) -> float:
        if not isinstance(work.planned.case.workload.model, ModelShape):
            return _USUAL_S
        return sum(one.expected_s for one in self.plan(work, None))

    def load(self, folder: Path, keys: Sequence[str], materials: Materials, /) -> Materials:
        of_rows = [key for key in keys if not key.startswith(_OF_CASE)]
        return replace(materials, attention=self.read_rows(folder, AttentionRow, of_rows))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        planned = self.plan(work, materials.profile)
        sweep = self.sweep(work, AttentionExperiment())
        listener = TextListener(work.on_stage, lambda case: f"{case.implementation}, length {case.length}")
        rows = sweep.run_planned(planned, work.workers, listener)
        here = tuple(row for row in rows if row.status != "unsupported")
        if all(row.status != "ok" for row in here):
            _require_ok(here or rows)
        of_case = [key for key in self.keys(work) if key.startswith(_OF_CASE)]
        return replace(materials, attention=here), (*of_case, *(row.key for row in here))

    def tell(self, materials: Materials) -> str:
        longest = max(row.case.length for row in materials.attention)
        at_longest = [row for row in materials.attention if row.case.length == longest]
        times = {row.case.implementation: both.median for row in at_longest if (both := summary_ms(row, "both"))}
        if not times:
            return count_noun(len(materials.attention), "case")
        best = min(times, key=times.__getitem__)
        return f"fastest at length {longest}: {best}, {times[best]:.4g} ms"

    def plan(self, work: StageWork, profile: Profile | None) -> tuple[PlannedAttention, ...]:
        workload = work.planned.case.workload
        shape = _find_shape(workload, profile)
        on_cpu = workload.device == "cpu"
        precision = choose_precision(shape, workload.precision)
        lengths = dict.fromkeys(
            max(_SHORTEST, length) for length in (shape.length // 2, shape.length, 2 * shape.length)
        )
        return tuple(
            PlannedAttention(
                case=AttentionCase(
                    implementation=implementation,
                    batch=shape.batch,
                    heads=shape.heads,
                    length=length,
                    head_dim=shape.head_dim,
                    causal=shape.is_causal,
                    precision=precision,
                    device=workload.device,
                    seed=workload.seed,
                    repetitions=50,
                    seconds=0.05 if on_cpu else 0.2,
                    memory_limit=work.planned.case.timing.memory_limit,
                ),
                environment=work.planned.environment,
            )
            for implementation in compared_on(
                "cpu" if on_cpu else "cuda", fast=True, half=precision in ("bf16", "fp16")
            )
            for length in lengths
        )


def _find_shape(workload: Workload, profile: Profile | None) -> AttentionShape:
    """The attention of the workload's model. Raises UnavailableError if nothing shows it."""
    model = workload.model
    if isinstance(model, ModelShape):
        return AttentionShape(
            batch=workload.micro_batch,
            heads=model.num_heads,
            kv_heads=model.num_heads,
            length=workload.context,
            head_dim=model.head_dim,
            dtype=workload.precision,
            is_causal=True,
        )
    if profile is None:
        raise UnavailableError("the shape of the model's attention comes from the profile stage, which has no result")
    found = find_attention_shape(profile.recording)
    if found is None:
        raise UnavailableError("the recording shows no self-attention with known shapes")
    return found


def choose_precision(shape: AttentionShape, precision: Precision) -> Precision:
    """The precision of the recorded tensors; for fp32 the workload decides how GEMMs round them."""
    if shape.dtype == "bf16" or shape.dtype == "fp16":
        return "bf16" if shape.dtype == "bf16" else "fp16"
    return precision if precision == "tf32" else "fp32"


class OptimiseStage(ReportStage):
    """Changes that make the step faster, tried one after another."""

    name = "optimise"

    def expected_s(self, work: StageWork) -> float:
        return _COMPILING_S + 250 * work.step_s  # about six programs, each compiled and run dozens of times

    def load(self, folder: Path, _keys: Sequence[str], materials: Materials, /) -> Materials:
        return replace(materials, optimisation=read_optimisation(folder / f"{self.name}.json"))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        try:
            check_workload(work.planned.case.workload)
        except StepscopeError as error:
            raise UnavailableError(": ".join((error.message, error.detail))) from None
        path = work.folder / f"{self.name}.json"
        report = OptimisationJob(command=self.command(work)).run_planned(
            work.planned, work.workers, work.on_stage, lambda _report, _change: None, path=path
        )
        if report.stopped:
            raise StepscopeError("not all changes were tried", detail=report.stopped)
        return replace(materials, optimisation=report), self.keys(work)

    def tell(self, materials: Materials) -> str:
        assert materials.optimisation is not None
        return say_result(materials.optimisation).removesuffix(".")


ALL: tuple[ReportStage, ...] = (
    BenchStage(),
    ProfileStage(),
    MemoryStage(),
    PrecisionStage(),
    AttentionStage(),
    PlanStage(),
)
ON_REQUEST: tuple[ReportStage, ...] = (OptimiseStage(),)
assert [stage.name for stage in ALL] == list(STAGES)
assert [stage.name for stage in ON_REQUEST] == list(STAGES_ON_REQUEST)


def other_precision(precision: Precision) -> Precision:
    return "fp32" if precision in ("bf16", "fp16") else "bf16"


def _require_ok(rows: Sequence[Row]) -> None:
    """Raise with the reason of the first row if it failed."""
    if rows[0].status != "ok":
        raise StepscopeError(f"{rows[0].status}: {rows[0].reason}")


def _rows_with_speeds(materials: Materials, planned: Planned) -> tuple[BenchRow, ...]:
    """The timed rows if `find_speeds` can use them: fp32 and another precision."""
    try:
        find_speeds(materials.bench, planned.case)
    except StepscopeError:
        return ()
    return materials.bench
