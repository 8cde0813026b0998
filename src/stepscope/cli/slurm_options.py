"""The options of verbs that can run on a Slurm cluster, and the progress of the jobs they submit."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from stepscope.cli.experiment import add_flags, flag
from stepscope.cli.output import say, show
from stepscope.errors import StepscopeError
from stepscope.jobs.slurm.resources import Resources, parse_mem, parse_sbatch, parse_time_min

if TYPE_CHECKING:
    from stepscope.jobs.slurm.rank_jobs import SlurmRanks
    from stepscope.jobs.slurm.watch import JobCounts
    from stepscope.recording.rows.bench import BenchRow


class SlurmChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What `--slurm` and its related options ask for. `array` applies to grids and is 1 elsewhere."""

    resources: Resources
    array: int = 1
    print_only: bool = False
    wait: bool = True


def takes_slurm(*, ranks: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb the Slurm options, and pass them to it as its argument `slurm`, which is None without `--slurm`. With
    `ranks`, a verb is one job over `--nodes`; otherwise it is a grid, split over an `--array` of jobs."""
    return lambda verb: add_flags(verb, "slurm", _flags(ranks=ranks), _choose)


def refuse_slurm(slurm: SlurmChoice | None, why: str) -> None:
    if slurm is not None:
        raise StepscopeError("`--slurm` has no effect here", detail=why, hint="remove --slurm")


def run_on_slurm(slurm: SlurmChoice, job: "SlurmRanks", prepare: Callable[[], None]) -> bool:
    """Return whether the job has finished: not if the script was only printed or `--no-wait` was given. `prepare` is
    called just before a job is submitted, and not if an earlier job is found."""
    if slurm.print_only:
        show(job.script())
        return False
    with watching_jobs() as watcher:
        return job.run(watcher, wait=slurm.wait, prepare=prepare)


@contextmanager
def watching_jobs(outcome_of: "Callable[[BenchRow], str]" = lambda _: "") -> Iterator["JobLines"]:
    """Yield a listener that prints lines, and on a terminal a status line. Ctrl-C leaves the jobs running and prints
    how to cancel them."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    watcher = _JobStatus(outcome_of) if is_terminal else JobLines(outcome_of)
    try:
        yield watcher
    except KeyboardInterrupt:
        watcher.close()
        if numbers := " ".join(watcher.numbers):
            say(
                f"interrupted: job {numbers} keeps running, and the same command collects its results; "
                f"to cancel it: scancel {numbers}"
            )
        raise
    finally:
        watcher.close()


class JobLines:
    """One line per change."""

    def __init__(self, outcome_of: "Callable[[BenchRow], str]") -> None:
        self.numbers: list[str] = []
        self._outcome_of = outcome_of
        self._num_rows = 0
        self._said = ""

    def plan(self, num_done: int, num_cases: int) -> None:
        if num_done:
            say(f"{num_done} of {num_cases} cases are already done; --fresh measures them again")

    def begin(self, job_ids: Sequence[str], *, submitted: str | None) -> None:
        self.numbers = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
        if submitted is not None:
            say(f"submitted: job {submitted}")
        if before := [number for number in self.numbers if number != submitted]:
            say(f"submitted earlier, not collected yet: job {' '.join(before)}")

    def finish(self, row: "BenchRow") -> None:
        from stepscope.cli.progress import say_end
        from stepscope.explain.experiments.cases import describe_case

        self._num_rows += 1
        say(f"{describe_case(row.case)}: {say_end(row, self._outcome_of)}")

    def fail(self, text: str) -> None:
        say(text)

    def news(self, counts: "JobCounts") -> None:
        named = {"queued": counts.queued, "running": counts.running, "done": counts.done, "failed": counts.failed}
        parts = [f"{count} {name}" for name, count in named.items() if count]
        if counts.reason:
            parts[0] += f" ({counts.reason})"
        rows = f"; {self._num_rows} row{'s' if self._num_rows != 1 else ''} collected" if self._num_rows else ""
        text = f"jobs: {', '.join(parts)}{rows}"
        if text != self._said:
            self._said = text
            self._show(text)

    def close(self) -> None:
        pass

    def _show(self, text: str) -> None:
        say(text)


class _JobStatus(JobLines):
    """Shows the counts in a status line with a spinner."""

    def __init__(self, outcome_of: "Callable[[BenchRow], str]") -> None:
        super().__init__(outcome_of)
        from rich.console import Console

        self._status = Console(stderr=True, highlight=False).status("checking the jobs")

    def close(self) -> None:
        self._status.stop()

    def _show(self, text: str) -> None:
        # Started only after the jobs are submitted: before that, its thread could receive a Ctrl-C that has to wait.
        self._status.start()
        self._status.update(text)


def _choose(given: dict[str, Any]) -> SlurmChoice | None:
    if not given.pop("slurm"):
        for name, value in given.items():
            if value:
                raise StepscopeError(
                    f"`--{name.replace('_', '-')}` requires `--slurm`",
                    detail="it is an option for the cluster job",
                    hint=f"add --slurm, or remove --{name.replace('_', '-')}",
                )
        return None
    print_only, wait, array = given.pop("print_sbatch"), not given.pop("no_wait"), given.pop("array", None) or 1
    time, mem = given.pop("time"), given.pop("mem")
    fields = {name: value for name, value in given.items() if value is not None and name != "sbatch"}
    if time is not None:
        fields["time_min"] = parse_time_min(time)
    if mem is not None:
        fields["mem"] = parse_mem(mem)
    resources = Resources(**fields, sbatch=parse_sbatch(given["sbatch"] or ()))
    return SlurmChoice(resources=resources, array=array, print_only=print_only, wait=wait)


def _flags(*, ranks: bool) -> list[inspect.Parameter]:
    many = (
        "Number of nodes; ranks are spread evenly." if ranks else "Number of jobs to split the grid over.  [default: 1]"
    )
    return [
        _switch("slurm", "Run on a Slurm cluster and collect the results here."),
        _option("partition", str, "NAME", "Partition to submit to."),
        _option("gpus", int, "N", "GPUs per node.  [default: none]", least=0),
        _option("time", str, "TIME", "Time limit per job, such as 2:00:00.  [default: 60 minutes]"),
        _option("nodes" if ranks else "array", int, "N", many, least=1),
        _option("cpus", int, "N", "CPUs per task.", least=1),
        _option("mem", str, "SIZE", "Memory per node, such as 64G."),
        _option("account", str, "NAME", "Account to charge."),
        _option("qos", str, "NAME", "Quality of service."),
        _option("constraint", str, "TEXT", "Node features to require."),
        _option("sbatch", list[str], "KEY=VALUE", "Any other sbatch option; repeatable."),
        _switch("print_sbatch", "Print the job script without submitting it."),
        _switch("no_wait", "Submit and exit; run the same command later to collect the results."),
    ]


def _option(name: str, kind: Any, metavar: str, text: str, least: int | None = None) -> inspect.Parameter:
    return flag(name, kind | None, typer.Option(f"--{name}", metavar=metavar, help=text, min=least))


def _switch(name: str, text: str) -> inspect.Parameter:
    return flag(name, bool, typer.Option(f"--{name.replace('_', '-')}", help=text), default=False)
