"""The child process of `stepscope.explain_oom`: turns a snapshot into a recording and a page.

    python -m stepscope.jobs.oom runs/today/oom.pickle

writes `runs/today/oom` and `runs/today/oom.html`. The process that ran out of memory may be gone by then.
"""

import shlex
import sys
from pathlib import Path

from stepscope.errors import Exit, StepscopeError
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.story.sources import Materials
from stepscope.jobs.report.run import write_page
from stepscope.recording.memory import reader
from stepscope.recording.store import save


def explain_snapshot(path: Path) -> Path:
    """Write the recording and the page of a snapshot next to it, and return the page. The recording takes over the
    snapshot."""
    recording = reader.read(path)
    folder = path.with_suffix("")
    command = shlex.join(["stepscope", "report", str(folder)])
    materials = Materials(name=path.name, command=command, memory=make_memory_profile(recording))
    page = path.with_suffix(".html")
    write_page(page, [materials])
    save(recording, folder, raw=path, force=True)
    return page


def main() -> int:
    path = Path(sys.argv[1])
    try:
        page = explain_snapshot(path)
    except StepscopeError as error:
        sys.stderr.write(f"stepscope: CUDA ran out of memory, and the page failed: {error}\n")
        return Exit.BAD_INPUT
    sys.stderr.write(f"stepscope: CUDA ran out of memory; why, and what would fit: {_shorten(page)}\n")
    return Exit.OK


def _shorten(page: Path) -> Path:
    return page.relative_to(Path.cwd()) if page.is_relative_to(Path.cwd()) else page


if __name__ == "__main__":
    sys.exit(main())
