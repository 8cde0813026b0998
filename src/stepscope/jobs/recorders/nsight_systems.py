"""`stepscope profile --nsys`: one case under Nsight Systems.

Nsight Systems records from outside: it starts the program, and keeps what CUDA and NVTX do between cudaProfilerStart
and Stop. So the case runs in a program of its own (`measure.targets.nsys`), told by a file what to do. The request
stays beside the report, so that the command which was run can be typed again.
"""

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, read_plain, require_own, write_atomically, writing
from stepscope.jobs.recorders.external import hear, run_outside
from stepscope.jobs.workers.process import require_torch
from stepscope.measure.targets import TargetFailed, answer_path
from stepscope.measure.targets.nsys import NsysAnswer, NsysRecorded, NsysRequest
from stepscope.recording.readers.nsys import REPORT_ENDINGS, export
from stepscope.spec import Case

_SCHEMA = "stepscope.nsys/1"
_REQUEST_NAME = "request.json"
PYTORCH_OPTIONS = ("autograd-nvtx", "autograd-shapes-nvtx", "functions-trace")  # of nsys profile --pytorch


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysRun:
    """What is left in the folder, how it was made, and what was measured besides."""

    report: Path
    exported: Path
    command: tuple[str, ...]
    recorded: NsysRecorded

    @property
    def typed(self) -> str:
        """The command, to be printed."""
        return shlex.join(self.command)


def record_with_nsys(
    case: Case,
    *,
    out_folder: Path,
    functions: Sequence[str] = (),
    record_steps: int = 3,
    python_backtrace: bool = False,
    pytorch: str | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> NsysRun:
    """Leaves `report.nsys-rep`, its SQLite export and the request in `out_folder`."""
    nsys = require_nsys()
    require_torch()
    asked = _check_pytorch(pytorch)
    request = NsysRequest(
        case=case,
        functions=tuple(functions),
        record_steps=record_steps,
        emit_operators=not any(option.startswith("autograd") for option in asked),
    )
    request_path = out_folder.absolute() / _REQUEST_NAME
    report = request_path.with_name("report" + REPORT_ENDINGS[0])
    require_own(out_folder, _SCHEMA, knows=_has_request)
    with writing(out_folder):
        write_atomically(request_path, msgspec.json.format(msgspec.json.encode(request), indent=2) + b"\n")
        for old in (report, report.with_suffix(".qdstrm"), answer_path(request_path)):
            old.unlink(missing_ok=True)
    command = nsys_command(nsys, request_path, report, python_backtrace=python_backtrace, pytorch=pytorch)
    on_stage("recording under nsys")
    recorded = _run(command, answer_path(request_path))
    if not report.is_file():
        raise _missing(report)
    on_stage("exporting the report")
    exported = export(report, report.parent)
    return NsysRun(report=report, exported=exported, command=tuple(command), recorded=recorded)


def _has_request(folder: Path) -> bool:
    """Whether it holds the report of an earlier request, which may be replaced."""
    try:
        decode(read_plain(folder / _REQUEST_NAME), NsysRequest)
    except (OSError, msgspec.DecodeError):
        return False
    return True


def nsys_command(
    nsys: str, request: Path, report: Path, *, python_backtrace: bool = False, pytorch: str | None = None
) -> list[str]:
    """Only CUDA and NVTX, and no samples of the host: what is not asked for disturbs nothing. Python's stacks need both
    samples and CUDA's own stacks, which nsys otherwise takes of slow calls only, and a launch is a quick one."""
    backtrace = ["--cudabacktrace", "kernel:0", "--python-backtrace=cuda"] if python_backtrace else []
    return [
        nsys,
        "profile",
        # nsys adds the ending itself, and reads `%h` and the like as patterns.
        *("--output", str(report.with_suffix("")).replace("%", "%%")),
        *("--force-overwrite", "true"),
        *("--trace", "cuda,nvtx"),
        *("--sample", "process-tree" if python_backtrace else "none"),
        *("--cpuctxsw", "none"),
        *("--capture-range", "cudaProfilerApi"),
        *("--capture-range-end", "stop"),
        *backtrace,
        *([f"--pytorch={pytorch}"] if pytorch else []),
        *("--export", "none"),
        # -P, as for every worker: a stray `random.py` in the current folder must not break torch.
        *(sys.executable, "-P", "-m", "stepscope.measure.targets.nsys", str(request)),
    ]


def _missing(report: Path) -> StepscopeError:
    stream = report.with_suffix(".qdstrm")
    if stream.is_file():  # as the nsys inside of Nsight Compute does
        return StepscopeError(
            f"nsys recorded, but left `{stream}` without making a report of it",
            detail="an installation of Nsight Systems that is not whole does so, for want of its importer",
            hint=f"on a machine with all of Nsight Systems: QdstrmImporter --input-file {stream.name}",
        )
    return StepscopeError(
        "nsys wrote no report",
        detail=f"expected `{report}`; the program ran to its end, but nsys may not have seen it start",
        hint="stepscope doctor",
    )


def require_nsys() -> str:
    """Where it is; said before anything runs."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise StepscopeError(
            "`nsys` is not on the PATH",
            detail="--nsys records with NVIDIA Nsight Systems, which comes with CUDA or by itself",
            hint="record with PyTorch's own profiler instead: stepscope profile, without --nsys",
        )
    return nsys


def _check_pytorch(pytorch: str | None) -> tuple[str, ...]:
    asked = tuple(pytorch.split(",")) if pytorch is not None else ()
    for option in asked:
        if option not in PYTORCH_OPTIONS:
            raise StepscopeError(
                f"unknown option for nsys's --pytorch: `{option}`",
                detail=f"expected {', '.join(PYTORCH_OPTIONS)}, with commas between several",
                hint="leave it out: stepscope emits PyTorch's operators itself",
            )
    return asked


def _run(command: list[str], answer: Path) -> NsysRecorded:
    finished = run_outside(command)
    heard: NsysAnswer | None = hear(answer, NsysAnswer)
    if isinstance(heard, TargetFailed):
        raise StepscopeError(heard.message, detail=heard.detail, hint=heard.hint)
    if finished.returncode or heard is None:
        raise StepscopeError(
            f"nsys {finished.in_words}" + ("" if heard else ", before the case had run"),
            detail=finished.last_words or "it said nothing",
            hint=shlex.join(command),
        )
    return heard
