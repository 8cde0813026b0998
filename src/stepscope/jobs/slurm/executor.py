"""The way to Slurm: submitit writes the script, pickles what is to run, and calls sbatch."""

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

# How long before the end of its time a job is told to queue itself again, at most; a short job gets a tenth of its
# time, or it would be told when it starts.
_NOTICE_S = 60
# How often a job whose time is up queues itself again.
_EXTENSIONS = 3


def require_slurm() -> None:
    if shutil.which("sbatch") is None or shutil.which("scontrol") is None:
        raise StepscopeError(
            "there is no Slurm on this machine: `sbatch` is not on the path",
            detail="`--slurm` submits jobs from a login node of a cluster",
            hint="module load slurm    # on some clusters; or leave out --slurm to run here",
        )
    if find_spec("submitit") is None:
        raise StepscopeError("submitit is not installed", hint="pip install 'stepscope[slurm]'")


def make_executor(folder: Path, resources: Resources, *, name: str, tasks: int = 1) -> "SlurmExecutor":
    """`tasks` is over all nodes. Everything that the script says comes from here."""
    from submitit import SlurmExecutor

    # -P: a stray `random.py` in the current folder must not break what runs there.
    executor = SlurmExecutor(folder, max_num_timeout=_EXTENSIONS, python=f"{shlex.quote(sys.executable)} -P")
    # Since Slurm 22.05 srun takes no notice of what sbatch was told about CPUs. And a rank that dies ends the others.
    cpus = [f"--cpus-per-task={resources.cpus}"] if resources.cpus else []
    extra: dict[str, str | bool] = {key: value or True for key, value in resources.sbatch}
    # A requeue is what we are made for; some clusters have it off unless asked.
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
    """Slurm's number for the job, or for the array when there are several. What is refused leaves no folder."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        first = executor.submit_array(tasks)[0]
    except (FailedJobError, FailedSubmissionError) as error:
        shutil.rmtree(executor.folder)
        with suppress(OSError):  # submissions of before are in it
            executor.folder.parent.rmdir()
        raise StepscopeError(
            "Slurm refused the job", detail=str(error), hint="sinfo    # lists the partitions and their limits"
        ) from None
    return first.job_id.partition("_")[0]


def script(executor: "SlurmExecutor", count: int) -> str:
    """What `submit` would hand to sbatch for so many jobs."""
    if count > 1:
        executor.parameters["map_count"] = count
    return executor._make_submission_file_text(executor._submitit_command_str, "")


@contextmanager
def holding_signals(*which: signal.Signals) -> Iterator[None]:
    """They wait until the end, for this thread and for what it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, which)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
