"""`stepscope profile --nsys`: one case under Nsight Systems.

Nsight Systems records from outside: it starts the program, and records CUDA and NVTX between cudaProfilerStart and
Stop. So the case runs in a program of its own (`measure.targets.nsys`), which reads its request from a file. The
request stays next to the report, so that the printed command can be run again.
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
PYTORCH_OPTIONS = ("autograd-nvtx", "autograd-shapes-nvtx", "functions-trace")  # values of nsys profile --pytorch


@dataclass(frozen=True, slots=True, kw_only=True)
class NsysRun:
    """The files in the directory, the command that made them, and what the program measured itself."""

    report: Path
    exported: Path
    command: tuple[str, ...]
    recorded: NsysRecorded

    @property
    def typed(self) -> str:
        """The command, for display."""
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
    """Write `report.nsys-rep`, its SQLite export and the request to `out_folder`."""
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
    """Whether the directory holds the report of an earlier request, which may be replaced."""
    try:
        decode(read_plain(folder / _REQUEST_NAME), NsysRequest)
    except (OSError, msgspec.DecodeError):
        return False
    return True


def nsys_command(
    nsys: str, request: Path, report: Path, *, python_backtrace: bool = False, pytorch: str | None = None
) -> list[str]:
    """Only CUDA and NVTX, without CPU samples: what is not requested disturbs nothing. Python stacks need both CPU
    samples and CUDA backtraces, which nsys otherwise takes only for slow calls, and a launch is fast.
    """
    backtrace = ["--cudabacktrace", "kernel:0", "--python-backtrace=cuda"] if python_backtrace else []
    return [
        nsys,
        "profile",
        # nsys appends the extension itself, and reads `%h` and the like as patterns.
        *("--output", str(report.with_suffix("")).replace("%", "%%")),
        *("--force-overwrite", "true"),
        *("--trace", "cuda,nvtx"),
        *("--cuda-graph-trace", "node"),  # the kernels of a captured step, not one row for all of them
        *("--sample", "process-tree" if python_backtrace else "none"),
        *("--cpuctxsw", "none"),
        *("--capture-range", "cudaProfilerApi"),
        *("--capture-range-end", "stop"),
        *backtrace,
        *([f"--pytorch={pytorch}"] if pytorch else []),
        *("--export", "none"),
        # -P, as for every worker: a stray `random.py` in the current directory must not break torch.
        *(sys.executable, "-P", "-m", "stepscope.measure.targets.nsys", str(request)),
    ]


def _missing(report: Path) -> StepscopeError:
    stream = report.with_suffix(".qdstrm")
    if stream.is_file():  # as the nsys bundled with Nsight Compute does
        return StepscopeError(
            f"nsys wrote `{stream}` but did not convert it to a report",
            detail="this installation of Nsight Systems is incomplete: the importer is missing",
            hint=f"on a machine with a complete Nsight Systems: QdstrmImporter --input-file {stream.name}",
        )
    return StepscopeError(
        "nsys wrote no report",
        detail=f"expected `{report}`; the program ran to the end, but nsys may not have seen it start",
        hint="stepscope doctor",
    )


def require_nsys() -> str:
    """Return the path of `nsys`, or raise before anything runs."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise StepscopeError(
            "`nsys` is not on the PATH",
            detail="--nsys requires NVIDIA Nsight Systems, which is part of the CUDA toolkit and available separately",
            hint="to record with PyTorch's profiler instead, remove --nsys: stepscope profile",
        )
    return nsys


def _check_pytorch(pytorch: str | None) -> tuple[str, ...]:
    asked = tuple(pytorch.split(",")) if pytorch is not None else ()
    for option in asked:
        if option not in PYTORCH_OPTIONS:
            raise StepscopeError(
                f"unknown value for nsys --pytorch: `{option}`",
                detail=f"expected a comma-separated list of {', '.join(PYTORCH_OPTIONS)}",
                hint="remove it: stepscope emits PyTorch's operators itself",
            )
    return asked


def _run(command: list[str], answer: Path) -> NsysRecorded:
    finished = run_outside(command)
    heard: NsysAnswer | None = hear(answer, NsysAnswer)
    if isinstance(heard, TargetFailed):
        raise StepscopeError(heard.message, detail=heard.detail, hint=heard.hint)
    if finished.returncode or heard is None:
        raise StepscopeError(
            f"nsys {finished.in_words}" + ("" if heard else ", before the case ran"),
            detail=finished.last_words or "nsys printed nothing",
            hint=shlex.join(command),
        )
    return heard
