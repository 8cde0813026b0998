"""The page of a report as a file: refused early where it could not be written, and there whole or as it was before."""

from collections.abc import Sequence
from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.explain.story.sources import Materials
from stepscope.files import check_target, write_atomically, writing
from stepscope.findings import Report


def check_page(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """A page of ours is replaced, anything else only by `force`, and what the report is made from never."""
    if path.suffix.lower() != ".html":
        raise StepscopeError(
            f"a report is a page, not `{path.suffix or path.name}`: `{path}`",
            detail="expected a name that ends in .html",
            hint=f"--out {path.with_suffix('.html') if path.name else 'report.html'}",
        )
    if path.exists() and any(one.exists() and one.samefile(path) for one in inputs):
        raise StepscopeError(f"`--out` would replace a file it reads: `{path}`", hint="another name: --out FILE.html")
    check_target(path, force=force, flag="--out")


def write_page(path: Path, runs: Sequence[Materials]) -> Report:
    """Tells the story of one run or of two, and makes a page of it."""
    from stepscope.explain.story import tell, tell_both
    from stepscope.report.site import write_site

    report = tell(runs[0]) if len(runs) == 1 else tell_both(*runs)
    content = write_site(report).encode()
    with writing(path, if_full="the page is as it was before", hint="--out FILE.html"):
        write_atomically(path, content)
    return report
