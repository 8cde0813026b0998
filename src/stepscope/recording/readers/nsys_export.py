"""A `.nsys-rep` report is Nsight Systems' own: only `nsys` turns it into a file that others can read."""

import shlex
import shutil
import subprocess
from pathlib import Path

from stepscope.errors import StepscopeError

REPORT_ENDING = ".nsys-rep"
_LAST_WORDS = 600  # characters of what nsys said, for the error


def export_command(nsys: str, report: Path, exported: Path) -> list[str]:
    return [nsys, "export", "--type", "sqlite", "--output", str(exported), "--force-overwrite", "true", str(report)]


def export(report: Path, folder: Path) -> Path:
    """The report as a SQLite file in `folder`."""
    if not report.is_file():
        raise StepscopeError(f"no such file: `{report}`")
    exported = folder / f"{report.stem}.sqlite"
    nsys = shutil.which("nsys")
    if nsys is None:
        by_hand = export_command("nsys", Path(report.name), Path(exported.name))
        raise StepscopeError(
            f"`{report}` can be read by `nsys` only, which is not on the PATH",
            detail="its SQLite export is read without it: make that on a machine that has Nsight Systems",
            hint=shlex.join(by_hand),
        )
    command = export_command(nsys, report, exported)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise StepscopeError(f"`{nsys}` does not run", detail=error.strerror or "", hint="stepscope doctor") from None
    if done.returncode or not exported.is_file():
        said = (done.stderr.strip() or done.stdout.strip())[-_LAST_WORDS:]
        raise StepscopeError(
            f"nsys could not export `{report}`: it exited with {done.returncode}",
            detail=said or "it said nothing",
            hint=shlex.join(command),
        )
    return exported
