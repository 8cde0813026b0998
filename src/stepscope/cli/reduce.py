"""`stepscope reduce`: the traces of many ranks as small recordings, which a page over all of them reads."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from stepscope.cli.output import say, show
from stepscope.cli.slurm_options import SlurmChoice, run_on_slurm, takes_slurm
from stepscope.errors import StepscopeError
from stepscope.units import count_noun


@takes_slurm(ranks=True)
def reduce(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE…", help="The traces of PyTorch's profiler, one per rank, or their directory."),
    ],
    *,
    slurm: SlurmChoice | None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Save the recordings here: rank-0, rank-1, …")],
    tasks: Annotated[
        int, typer.Option(metavar="N", min=1, help="Slurm tasks that share the traces, with --slurm.")
    ] = 8,
) -> None:
    """Reduce the traces of many ranks to recordings of a few hundred kilobytes each.

    Uses all cores of this machine, or of a cluster's nodes with --slurm. Ranks that are there already are left alone,
    so the same command resumes.
    """
    from stepscope.api.rank_files import expand_ranks
    from stepscope.jobs.rank_reduction import reduce_into

    found = expand_ranks(traces)
    if any(path.is_dir() for path in found):
        raise StepscopeError("`reduce` reads traces; these are recordings already", hint="stepscope report DIR")
    if slurm is None:
        reduce_into(found, out)
    elif not _submit(found, out, slurm, tasks):
        return
    show(f"{out}\n")
    say(f"reduced {count_noun(len(found), 'trace')}")
    say(f"next: stepscope report {shlex.quote(str(out))}")


def _submit(traces: list[Path], out: Path, slurm: SlurmChoice, tasks: int) -> bool:
    from stepscope.jobs.rank_reduction import ENTRY, ShareOfTraces
    from stepscope.jobs.slurm.rank_jobs import SlurmRanks

    share = ShareOfTraces(traces=tuple(str(path.resolve()) for path in traces), folder=str(out.resolve()))
    job = SlurmRanks(
        folder=out,
        command=shlex.join(["stepscope", *sys.argv[1:]]),
        resources=slurm.resources,
        name="stepscope-reduce",
        entry=ENTRY,
        request=msgspec.json.encode(share).decode(),
        ranks=min(tasks, len(traces)),
    )
    return run_on_slurm(slurm, job, lambda: None)
