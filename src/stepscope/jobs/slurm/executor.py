"""Submission to Slurm: submitit writes the script, pickles the tasks, and calls sbatch."""

import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.jobs.slurm.resources import Resources

if TYPE_CHECKING:
    from submitit import SlurmExecutor

# The longest notice before the time limit, at which a job requeues itself; a short job gets a tenth of its time, or the
# notice would arrive as it starts.
_NOTICE_S = 60
# How often a job that reaches its time limit requeues itself.
_EXTENSIONS = 3


def require_slurm() -> None:
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        raise StepscopeError(
            "Slurm not found on this machine: `sbatch` is not on the PATH",
            detail="`--slurm` submits jobs from a login node of a cluster",
            hint="module load slurm    # on some clusters; or remove --slurm to run on this machine",
        )
    if find_spec("submitit") is None:
        raise StepscopeError("submitit is not installed", hint="pip install 'stepscope[slurm]'")


def make_executor(folder: Path, resources: Resources, *, name: str, tasks: int = 1) -> "SlurmExecutor":
    """`tasks` counts over all nodes. Everything in the script is set here."""
    from submitit import SlurmExecutor

    # -P: a stray `random.py` in the current directory must not break the job.
    executor = SlurmExecutor(folder, max_num_timeout=_EXTENSIONS, python=f"{shlex.quote(sys.executable)} -P")
    # Since Slurm 22.05, srun ignores the CPU count given to sbatch. A rank that dies ends the others.
    cpus = [f"--cpus-per-task={resources.cpus}"] if resources.cpus else []
    extra: dict[str, str | bool] = {key: value or True for key, value in resources.sbatch}
    # Our jobs can be requeued; some clusters disable that by default.
    extra |= {"requeue": True} | ({"mem": resources.mem} if resources.mem else {})
    executor.update_parameters(
        job_name=name,
        partition=resources.partition,
        time=resources.time_min,
        nodes=resources.nodes,
        ntasks_per_node=tasks // resources.nodes,
        gpus_per_node=resources.gpus or None,
        cpus_per_task=resources.cpus,
        account=resources.account,
        qos=resources.qos,
        constraint=resources.constraint,
        signal_delay_s=min(_NOTICE_S, resources.time_min * 6),
        stderr_to_stdout=True,
        srun_args=[*cpus, "--kill-on-bad-exit=1"],
        additional_parameters=extra,
    )
    return executor


def submit(executor: "SlurmExecutor", tasks: Sequence[Callable[[], None]]) -> str:
    """Return the Slurm id of the job, or of the array if there are several jobs. A rejected submission leaves no
    directory.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        first = executor.submit_array(tasks)[0]
    except (FailedJobError, FailedSubmissionError) as error:
        shutil.rmtree(executor.folder)
        with suppress(OSError):  # earlier submissions are in it
            executor.folder.parent.rmdir()
        raise StepscopeError(
            "Slurm rejected the job", detail=str(error), hint="sinfo    # lists the partitions and their limits"
        ) from None
    return first.job_id.partition("_")[0]


def script(executor: "SlurmExecutor", count: int) -> str:
    """Return the script that `submit` would pass to sbatch for this many jobs."""
    if count > 1:
        executor.parameters["map_count"] = count
    return executor._make_submission_file_text(executor._submitit_command_str, "")


@contextmanager
def holding_signals(*which: signal.Signals) -> Iterator[None]:
    """Hold signals until the end, for this thread and for the processes it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, which)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
