"""A Slurm cluster of one node: munged, slurmctld and slurmd, with their own directory and ports."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.command import PATIENCE_S

_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo")
_PR_SET_PDEATHSIG = 1
_NODE_CPUS = 4  # jobs at once, whatever the machine has
_CONFIGURATION = """
ClusterName=stepscope
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node.log
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=1
ReturnToService=2
NodeName={host} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """The reason why no cluster can be started here, or an empty string."""
    if os.geteuid() != 0:
        return "only root may start a Slurm"
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else ""


@contextmanager
def cluster(folder: Path) -> Iterator[Path]:
    """Yield the path of the configuration, for SLURM_CONF, and stop everything afterwards."""
    configuration = _configure(folder)
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
    commands = [
        ["munged", "--force", "--foreground", f"--socket={folder}/munge.socket", *files.values()],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D"],
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("wb") as said:
                processes.append(
                    subprocess.Popen(
                        command,
                        stdout=said,
                        stderr=said,
                        env=environment,
                        start_new_session=True,
                        preexec_fn=_die_with_the_tests,
                    )
                )
            if command[0] == "munged":
                _wait_for("munged does not start", lambda: (folder / "munge.socket").exists())
        _wait_for(
            "the node does not come up", lambda: "idle" in _say(["sinfo", "--noheader", "--format=%T"], environment)
        )
        try:
            yield configuration
        finally:
            _say(["scancel", "--user=root"], environment)
            _wait_for("jobs do not end", lambda: not _say(["squeue", "--noheader"], environment))
    finally:
        for process in reversed(processes):
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _configure(folder: Path) -> Path:
    for name in ("controller", "node"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    with socket.socket() as one, socket.socket() as other:
        one.bind(("", 0))
        other.bind(("", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    text = _CONFIGURATION.format(
        host=socket.gethostname().partition(".")[0],
        controller_port=ports[0],
        node_port=ports[1],
        folder=folder,
        cpus=_NODE_CPUS,
    )
    path = folder / "slurm.conf"
    path.write_text(text)
    return path


def _say(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.stdout


def _wait_for(complaint: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(complaint)
        time.sleep(0.1)
