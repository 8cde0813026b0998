"""One case under Nsight Compute: the command, its progress, and its errors.

Nsight Compute replays every kernel several times, once per group of counters, and restores GPU memory in between. It
writes its CSV at the very end, and nothing if it is killed. So each case is a program of its own
(`measure.targets.ncu`), and an interrupt costs one case.
"""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import writing
from stepscope.jobs.recorders.external import Finished, hear, run_outside
from stepscope.measure.targets import TargetFailed, answer_path
from stepscope.measure.targets.ncu import NcuAnswer, NcuCounted, NcuRequest, progress_path
from stepscope.recording.readers.counter_metrics import FEW, FULL
from stepscope.spec import Case

PERMISSION = "ERR_NVGPUCTRPERM"
PERMISSION_ADVICE = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
_SCANNED = 1 << 20  # bytes of its output that are searched for errors
_METRIC = r"[a-z0-9_]+__[A-Za-z0-9_]+(\.[a-z0-9_]+)*"


class CaseRefusedError(StepscopeError):
    """This case cannot be counted; others may."""


def require_ncu() -> str:
    """Return the path of `ncu`, or raise before anything runs."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise StepscopeError(
            "`ncu` is not on the PATH",
            detail="--counters requires NVIDIA Nsight Compute, which is part of the CUDA toolkit and available "
            "separately",
            hint="stepscope doctor",
        )
    return ncu


def choose_metrics(asked: str) -> tuple[str, ...]:
    """Parse `few`, `full`, or a comma-separated list of Nsight Compute metrics."""
    chosen: dict[str, None] = {}
    for word in asked.split(","):
        match word.strip():
            case "few":
                chosen |= dict.fromkeys(FEW)
            case "full":
                chosen |= dict.fromkeys(FULL)
            case name if re.fullmatch(_METRIC, name):
                chosen[name] = None
            case name:
                raise StepscopeError(
                    f"unknown Nsight Compute metric: `{name}`",
                    detail="expected few, full, or metric names such as dram__bytes_read.sum",
                    hint="--metrics few",
                )
    return tuple(chosen)


def ncu_command(ncu: str, request: Path, csv: Path, metrics: Sequence[str]) -> list[str]:
    """Clocks and caches are left alone: a training step does not start with cold caches either."""
    return [
        ncu,
        *("--clock-control", "none"),
        *("--cache-control", "none"),
        *("--profile-from-start", "off"),
        "--csv",
        *("--page", "raw"),
        *("--log-file", str(csv)),
        *("--metrics", ",".join(metrics)),
        # -P, as for every worker: a stray `random.py` in the current directory must not break torch.
        *(sys.executable, "-P", "-m", "stepscope.measure.targets.ncu", str(request)),
    ]


def count_with_ncu(
    case: Case, *, metrics: Sequence[str], scratch: Path, on_stage: Callable[[str], None] = lambda _: None
) -> tuple[Path, NcuCounted]:
    """Write the CSV to `scratch`, and return what the program measured itself."""
    ncu = require_ncu()
    request, csv = scratch.absolute() / "request.json", scratch.absolute() / "counters.csv"
    with writing(scratch, if_full="nothing was counted", hint="TMPDIR=DIR, on another disk"):
        request.write_bytes(msgspec.json.encode(NcuRequest(case=case)))
    command = ncu_command(ncu, request, csv, metrics)
    started = time.monotonic()

    def look() -> None:
        stage = read_progress(progress_path(request)) or "starting ncu"
        on_stage(f"{stage}, {time.monotonic() - started:.0f} s")

    finished = run_outside(command, look)
    answer: NcuAnswer | None = hear(answer_path(request), NcuAnswer)
    _check(answer, finished, csv, command)
    assert isinstance(answer, NcuCounted), "_check raises for any other answer"
    return csv, answer


def read_progress(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:100]
    except OSError:
        return ""


def _check(answer: NcuAnswer | None, finished: Finished, csv: Path, command: list[str]) -> None:
    """Check permission first: without it the program may run to the end, or fail because of what ncu did to it."""
    complaint = _complaint(csv, finished)
    if PERMISSION in complaint:
        raise StepscopeError(
            f"hardware counters are not permitted on this machine: `{PERMISSION}`",
            detail=f"{complaint}\n{PERMISSION_ADVICE}; confidential-computing mode has no counters",
            hint="stepscope doctor",
        )
    if isinstance(answer, TargetFailed):
        raise CaseRefusedError(answer.message, detail=answer.detail, hint=answer.hint)
    if answer is None or finished.returncode or not csv.is_file():
        before = "" if answer else ", before the case ran"
        raise StepscopeError(
            f"ncu {finished.in_words}{before}" if csv.is_file() or finished.returncode else "ncu wrote no output",
            detail=complaint or finished.last_words or "ncu printed nothing",
            hint=shlex.join(command),
        )


def _complaint(csv: Path, finished: Finished) -> str:
    """Return the first error that ncu printed, in its log or on its output."""
    try:
        with csv.open("rb") as file:
            logged = file.read(_SCANNED).decode(errors="replace")
    except OSError:
        logged = ""
    lines = [line.strip()[:300] for line in (logged + "\n" + finished.last_words).splitlines()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return next((line for line in errors if PERMISSION in line), next(iter(errors), ""))
