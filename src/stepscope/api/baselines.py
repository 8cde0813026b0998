"""Baselines from Python: `save_baseline` keeps runs, and `check_baseline` compares later runs with them.

A source is anything that `load` reads, or a results file of `stepscope bench` with one case. Each source is one run.
"""

import hashlib
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from stepscope import __version__
from stepscope.api.rank_files import Opened
from stepscope.api.run import load
from stepscope.errors import StepscopeError
from stepscope.explain.experiments.cases import describe_case
from stepscope.explain.gate.verdict import GateResult, PartsBy, judge_runs
from stepscope.explain.trace.comparability import describe_software, list_settings, list_versions
from stepscope.explain.trace.profile import Profile
from stepscope.jobs.experiments.sweep import RESULTS_NAME
from stepscope.recording import store as recordings
from stepscope.recording.baseline import (
    STORE,
    Baseline,
    BaselineRun,
    Metric,
    RunConditions,
    baseline_path,
    read_baseline,
    refuse_repeated,
    thin_out,
    write_baseline,
)
from stepscope.recording.rows import bench
from stepscope.recording.rows.bench import BenchRow, Environment
from stepscope.recording.rows.results_file import read_rows
from stepscope.recording.store import Manifest

_MEMORY_NAME = "memory"  # the memory recording in the directory of a run
_MANY_CASES = 5  # named in an error
_CHUNK = 1 << 20

Measured = tuple[BaselineRun, RunConditions]


def save_baseline(
    name: str, sources: Sequence[Path], *, store: Path = STORE, add: bool = False, force: bool = False
) -> Baseline:
    """Save `sources` as a baseline. They must be repeated runs of the same thing. `add` adds them to a baseline that
    exists."""
    runs, conditions = read_sources(sources)
    return save_runs(name, runs, conditions, store=store, add=add, force=force)


def save_runs(
    name: str, runs: Sequence[BaselineRun], conditions: RunConditions, *, store: Path, add: bool, force: bool
) -> Baseline:
    earlier: tuple[BaselineRun, ...] = ()
    if add and baseline_path(store, name).exists():
        known = read_baseline(store, name)
        if differences := known.conditions.differences(conditions):
            raise StepscopeError(
                f"these runs do not belong to baseline `{name}`",
                detail=f"the conditions differ: {'; '.join(differences)}",
                hint=f"stepscope baseline save {name} RUN... --force   # replaces it",
            )
        earlier = known.runs
    refuse_repeated((*earlier, *runs))
    baseline = Baseline(
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        stepscope=__version__,
        conditions=conditions,
        runs=(*earlier, *runs),
    )
    write_baseline(store, name, baseline, force=force or add)
    return baseline


def check_baseline(
    name: str,
    sources: Sequence[Path],
    *,
    store: Path = STORE,
    limit: float | None = None,
    metrics: Sequence[Metric] = ("step",),
    by: PartsBy = "class",
    allow_different: bool = False,
) -> GateResult:
    """Compare `sources`, which are repeated runs of the same thing, with a baseline. `limit` is 0.03 for 3%."""
    baseline = read_baseline(store, name)
    runs, conditions = read_sources(sources)
    refuse_repeated(runs)
    return judge_runs(
        baseline, runs, conditions, name=name, limit=limit, metrics=metrics, by=by, allow_different=allow_different
    )


# --- Reading runs -----------------------------------------------------------------------------------------------------


def read_sources(sources: Sequence[Path]) -> tuple[tuple[BaselineRun, ...], RunConditions]:
    """Read one run per source. Raises StepscopeError if they ran under different conditions."""
    if not sources:
        raise StepscopeError("no runs were given", hint="stepscope baseline save main runs/a runs/b runs/c")
    measured = [read_source(Path(source)) for source in sources]
    first = measured[0][1]
    for (_, conditions), source in zip(measured[1:], sources[1:], strict=True):
        if differences := first.differences(conditions):
            raise StepscopeError(
                f"`{sources[0]}` and `{source}` are not repeated runs of the same thing",
                detail="; ".join(differences),
                hint="give runs with the same device, torch version and settings",
            )
    return tuple(run for run, _ in measured), first


def read_source(path: Path) -> Measured:
    if (results := find_results(path)) is not None:
        return _read_results(results)
    run = load(path, cache=False)
    conditions = _conditions_of(run.ranks[0].opened[0].recording.manifest, len(run.opened))
    identity = _digest(run.opened)
    manifest = run.opened[0].recording.manifest
    if run.is_of_memory:
        measured = BaselineRun(file=path.name, identity=identity, started=manifest.started, peak_bytes=run.peak_bytes)
        return measured, conditions
    return _read_profile(run.profile, path, identity, _find_peak(path)), conditions


def _read_profile(profile: Profile, path: Path, identity: str, peak_bytes: int | None) -> BaselineRun:
    """Unprofiled steps count if the recording has any. `Clock` chooses profiled ones if the two hardly differ, and that
    choice could differ between two runs of unchanged code. So could the number of operators on a CPU, whose times
    decide which of two nested ones counts."""
    clock, manifest = profile.clock, profile.recording.manifest
    is_profiled = not clock.unprofiled_steps
    samples = clock.profiled_steps if is_profiled else clock.unprofiled_steps
    steps = () if profile.is_serialized else thin_out([max(1, round(one)) for one in samples])
    return BaselineRun(
        file=path.name,
        identity=identity,
        started=manifest.started,
        clock="profiled" if is_profiled else "unprofiled",
        step_ns=steps,
        idle_ns=max(0.0, statistics.median(steps) - clock.busy_ns) if steps and profile.has_gaps else None,
        kernels=None if profile.on_cpu else clock.per_step(int(profile.kernels["count"].sum())),
        peak_bytes=peak_bytes,
        classes=_per_step(profile, "class"),
        phases=_per_step(profile, "phase"),
    )


def _per_step(profile: Profile, column: str) -> dict[str, float]:
    times = profile.time_by(column).select(column, "time_ns").iter_rows()
    return {name: profile.clock.per_step(time_ns) for name, time_ns in times}


def _find_peak(path: Path) -> int | None:
    """The peak of the memory recording next to that of the kernels, in a run's directory."""
    folder = path / _MEMORY_NAME
    if not recordings.is_recording(folder):
        return None
    return load(folder, cache=False).peak_bytes


def _conditions_of(manifest: Manifest, num_ranks: int) -> RunConditions:
    versions = list_versions(manifest)
    threads = versions.pop("threads", "")
    settings = {} if manifest.case is None else list_settings(manifest.case, manifest.optimizer)
    if manifest.loop is not None:
        sizes = sorted({str(one.batch_size) for one in manifest.loop.loaders if one.batch_size is not None})
        settings |= {"script": manifest.loop.script, "micro-batches": f"{manifest.loop.backwards_per_step:g}"}
        settings |= {"batch size": " and ".join(sizes)} if sizes else {}
    if manifest.environment is not None and _is_cpu(manifest.environment):
        settings["threads"] = threads
    return RunConditions(
        device=manifest.device,
        torch=versions.pop("torch", ""),
        world_size=manifest.world_size or num_ranks,
        settings=settings,
        versions=versions,
    )


def _is_cpu(environment: Environment) -> bool:
    return environment.device == "cpu"


def _digest(opened: Sequence[Opened]) -> str:
    """A digest of the recording's manifest, which has the digests of its tables, or of the file."""
    digest = hashlib.sha256()
    for one in opened:
        path = one.path / recordings.MANIFEST_NAME if one.path.is_dir() else one.path
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:16]


# --- Results of `stepscope bench` -------------------------------------------------------------------------------------


def find_results(path: Path) -> Path | None:
    """The results file of `stepscope bench` at this path or in this directory; None if there is none."""
    results = path / RESULTS_NAME if path.is_dir() and (path / RESULTS_NAME).is_file() else path
    start = b'{"schema":"' + bench.SCHEMA.encode() + b'"'
    try:
        if not results.is_file():  # opening a pipe could block forever
            return None
        with results.open("rb") as file:
            return results if file.read(len(start)) == start else None
    except OSError:  # `load` says what is wrong with it
        return None


def _read_results(path: Path) -> Measured:
    rows, _ = read_rows(path, BenchRow)
    measured = [row for row in rows if row.measurement is not None]
    if len(measured) != 1:
        named = "\n".join(describe_case(row.case) for row in measured[:_MANY_CASES])
        raise StepscopeError(
            f"`{path}` has {len(measured)} measured cases; a run of a baseline is one case",
            detail=named,
            hint="measure one case: stepscope bench --size small --out runs/one",
        )
    (row,) = measured
    assert row.measurement is not None
    environment = row.environment
    versions = describe_software(environment)
    threads = versions.pop("threads", "")
    settings = list_settings(row.case, row.optimizer) | ({"threads": threads} if _is_cpu(environment) else {})
    content = repr((row.key, row.started, row.measurement.step_ns)).encode()
    run = BaselineRun(
        file=path.parent.name or path.name,
        identity=hashlib.sha256(content).hexdigest()[:16],
        started=row.started,
        step_ns=thin_out(row.measurement.step_ns),
        peak_bytes=row.measurement.peak_bytes,
        peak_is_exact=row.measurement.peak_kind == "cuda allocator",
        phases={name: sum(samples) / len(samples) for name, samples in row.measurement.phases_ns.items() if samples},
    )
    conditions = RunConditions(
        device=environment.driver_name, torch=versions.pop("torch", ""), settings=settings, versions=versions
    )
    return run, conditions
