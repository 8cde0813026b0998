"""The line of the user's code behind every operator, from one step that was recorded with Python stacks.

Stacks slow Python down several times, so that step is not used for times. Its operators are listed in order, and
another process matches them with those of the steps that are.

The innermost line in the user's own files counts. If one such line is behind most of a step (`trainer.train()`), it
says nothing: then the innermost line of a library other than PyTorch does.
"""

import os
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C._profiler import RecordScope, _EventType

from stepscope.recording.rows.loop_run import UNKNOWN_LINE, SourceLines

_NODE = "autograd::engine::evaluate_function"
MARK = "line:"  # in the name of an event that says which line runs
_UNINFORMATIVE = 0.5  # of the operators of a step
_OF_PYTORCH = ("torch/", "functorch/", "torchgen/", "stepscope/")
_NO_FILE = ("<", "nn.Module")
Line = tuple[str, str]  # of the user and of a library; empty if there is none
_Called = tuple[int, str, Line]  # start, name and line of an operator


def read_lines(results: Any) -> SourceLines:
    """`results` are those of a profiler with stacks, which has stopped."""
    by_thread: dict[int, list[_Called]] = defaultdict(list)
    for thread, called in _walk(results.experimental_event_tree()):
        by_thread[thread].append(called)
    # The loop's thread, among those that pin memory, collate or log: it runs the most operators.
    longest = max(map(len, by_thread.values()), default=0)
    found = sorted(next((called for called in by_thread.values() if len(called) == longest), []))
    operators = list(_apply_marks(found))
    common = Counter(user for _, (user, _) in operators if user)
    useless = {user for user, count in common.items() if count > _UNINFORMATIVE * len(operators)}
    lines: dict[str, int] = {}
    places = []
    for _, (user, library) in operators:
        line = user if user and not (user in useless and library) else library
        places.append(lines.setdefault(line, len(lines)) if line else UNKNOWN_LINE)
    return SourceLines(names=tuple(name for name, _ in operators), places=tuple(places), lines=tuple(lines))


def _apply_marks(found: list[_Called]) -> Iterator[tuple[str, Line]]:
    """Yield the operators with their lines: the user's is that of the last mark, if there are any (`line_marks`)."""
    marked = ""
    for _, name, (user, library) in found:
        if name.startswith(MARK):
            marked = name.removeprefix(MARK)
        else:
            yield name, (marked or user, library)


def find_caller() -> str:
    """The line of the user's code that is running now; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        name = frame.f_code.co_filename
        kind = classify_file(name)
        if kind == "user":
            return f"{shorten_path(name)}:{frame.f_lineno}"
        if kind == "library" and not library:
            library = f"{shorten_path(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return library


def _walk(roots: list[Any]) -> Iterator[tuple[int, _Called]]:
    """Yield thread, start, name and line of every operator outside the backward pass."""
    waiting: list[tuple[Any, Line]] = [(root, ("", "")) for root in roots]
    began_ns = min((root.start_time_ns for root in roots), default=0)
    while waiting:
        event, line = waiting.pop()
        children = event.children
        if event.tag in (_EventType.PyCall, _EventType.PyCCall):
            if not children:  # most calls; reading the names of their files takes longer than the rest
                continue
            fields = event.extra_fields
            # Calls that began before the recording have the line at which that began.
            is_older = event.start_time_ns <= began_ns
            line = line if is_older else _nearer(line, fields.caller)
            if event.tag == _EventType.PyCall:
                # Arithmetic is not a call: of its line, only the function is known, by its first line.
                line = _nearer(line, fields.callsite, is_function=True, has_line=not is_older)
        elif event.tag == _EventType.TorchOp:
            if event.name.startswith(_NODE):
                continue
            if event.extra_fields.scope != RecordScope.USER_SCOPE or event.name.startswith(MARK):
                yield event.start_tid, (event.start_time_ns, event.name, line)
        waiting.extend((child, line) for child in children)


def _nearer(line: Line, frame: Any, *, is_function: bool = False, has_line: bool = True) -> Line:
    """Return the line of the frame if its file matters, else `line`. A line in the user's code replaces a library's."""
    try:
        file, number, function = frame.file_name, frame.line_number, frame.function_name
    except UnicodeDecodeError:  # code that no longer exists, like that of an imported module: PyTorch kept no copy
        return line
    kind = classify_file(file)
    if kind == "other":
        return line
    text = f"{shorten_path(file)}:{number}" if has_line else shorten_path(file)
    if is_function and not function.startswith("<"):
        text += f" ({function})"
    return (text, "") if kind == "user" else (line[0], text)


@cache
def classify_file(name: str) -> str:
    """`user`, `library` or `other` (PyTorch, Python itself, code without a file). The profiler removes the part of a
    path that is in `sys.path`, so the file is looked for there."""
    if not name or name.startswith(_NO_FILE) or name.startswith(_OF_PYTORCH):
        return "other"
    path = _find_file(name)
    if path is None:
        return "other"
    if any(_is_in(path, folder) for folder in _library_folders()):
        inside = shorten_path(name)
        return "other" if inside.startswith(_OF_PYTORCH) else "library"
    return "other" if any(_is_in(path, folder) for folder in (*_python_folders(), *_generated_folders())) else "user"


def shorten_path(name: str) -> str:
    """A path without what identifies a person or a machine: from the package on, or relative to the script or the
    current directory, or the bare name."""
    path = _find_file(name)
    if path is None:
        return Path(name).name
    for folder in (*_library_folders(), *_own_folders()):
        if _is_in(path, folder):
            return os.path.relpath(path, folder)
    return Path(path).name


@cache
def _find_file(name: str) -> str | None:
    # Names of code that no longer exists are random, and `isfile` takes any. An absolute one replaces the directory.
    for folder in sys.path:
        path = os.path.join(folder or ".", name)  # noqa: PTH118
        if os.path.isfile(path):  # noqa: PTH113
            return os.path.realpath(path)
    return None


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder + os.sep)


@cache
def _library_folders() -> tuple[str, ...]:
    named = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    named |= {folder for folder in sys.path if folder.rstrip("/").endswith(("site-packages", "dist-packages"))}
    return tuple(sorted((os.path.realpath(folder) for folder in named), key=len, reverse=True))


@cache
def _python_folders() -> tuple[str, ...]:
    import stepscope

    own = Path(stepscope.__file__).parent
    return tuple(os.path.realpath(one) for one in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), own))


def _generated_folders() -> tuple[str, ...]:
    """Where Inductor writes code. PyTorch sets the variable when it first compiles."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return (os.path.realpath(folder),) if folder else ()


def _own_folders() -> tuple[str, ...]:
    """Where the user's files are, in order: the script's directory and the current one."""
    first = [sys.path[0]] if sys.path else []
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    scripts = [str(Path(main).parent)] if main else []
    return tuple(dict.fromkeys(os.path.realpath(folder or ".") for folder in (*scripts, *first, ".")))
