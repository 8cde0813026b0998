"""The page of a report as a file: refused early where it could not be written, and there whole or as it was before."""

import os
from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.explain.story.materials import Materials
from stepscope.findings import Report
from stepscope.recording.lines import write_atomically, writing


def check_page(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """A page of ours is replaced, anything else only by `force`, and what the report is made from never."""
    from stepscope.report.site import is_site

    if path.suffix.lower() != ".html":
        raise StepscopeError(
            f"a report is a page, not `{path.suffix or path.name}`: `{path}`",
            detail="expected a name that ends in .html",
            hint=f"--out {path.with_suffix('.html') if path.name else 'report.html'}",
        )
    if path.is_dir():
        raise StepscopeError(f"`{path}` is a folder", hint=f"--out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise StepscopeError(f"there is no folder `{path.parent}`", hint=f"mkdir -p {path.parent}")
    if path.exists():
        if any(one.exists() and one.samefile(path) for one in inputs):
            raise StepscopeError(
                f"`--out` would replace a file it reads: `{path}`", hint="another name: --out FILE.html"
            )
        if not force and not is_site(path):
            raise StepscopeError(
                f"`{path}` exists and is no page of ours", hint="--force replaces it, or another name: --out FILE.html"
            )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StepscopeError(f"cannot write to `{path.parent}`", hint="--out FILE.html")


def write_page(path: Path, runs: Sequence[Materials]) -> Report:
    """Tells the story of one run or of two, and makes a page of it."""
    from stepscope.explain.story import tell, tell_both
    from stepscope.report.site import write_site

    report = tell(runs[0]) if len(runs) == 1 else tell_both(*runs)
    content = write_site(report).encode()
    with writing(path, if_full="the page is as it was before", hint="--out FILE.html"):
        write_atomically(path, content)
    return report
