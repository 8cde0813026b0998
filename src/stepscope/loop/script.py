"""Runs a training script, or a module, as Python would, and records some of its steps.

`stepscope run` replaces its own process with this one, so that the script finds the signals, streams and imports of a
fresh Python. Nothing of PyTorch is loaded before the script asks for it: a script may set environment variables first.
The recorder is installed when the script's own `import torch` has finished.
"""

import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import open_code
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from stepscope.errors import Exit, StepscopeError
from stepscope.loop.compiled.import_hook import after_import
from stepscope.loop.messages import tell
from stepscope.loop.place import RunPlace

if TYPE_CHECKING:
    from stepscope.loop.recorder import LoopRecorder


class ScriptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how to record it."""

    target: str  # a file, or a module
    is_module: bool
    folder: str
    page: str
    skip: int
    steps: int
    sources: bool = True
    stop: bool = False

    @property
    def name(self) -> str:
        return f"-m {self.target}" if self.is_module else Path(self.target).name


class ScriptStopped(SystemExit):
    """Ends the script after the recording, for `--stop`."""


class ScriptRun:
    """One script in this process."""

    def __init__(self, request: ScriptRequest) -> None:
        self._request = request
        self._process = os.getpid()
        self.recorder: LoopRecorder | None = None

    def run(self, arguments: Sequence[str]) -> NoReturn:
        """Run the script to its end, finish the page, and exit as the script would."""
        after_import("torch", self._install)
        exit_at_once = os._exit
        os._exit = self._watch_exit(exit_at_once)  # type: ignore[assignment]
        status: int | str | None = 0
        try:
            self._run_script(arguments)
        except ScriptStopped:
            status = 0
        except SystemExit as end:
            status = end.code
        except KeyboardInterrupt as error:
            _show(error)
            with suppress(KeyboardInterrupt):  # twice: without the page
                self._finish()
            # As Python does, so that the parent process can tell that it was interrupted.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:  # noqa: BLE001  # the script's own error, shown as Python would
            _show(error)
            status = 1
        finally:
            os._exit = exit_at_once
        try:
            self._finish()
        except KeyboardInterrupt:
            status = Exit.INTERRUPTED
        sys.exit(status)

    def _run_script(self, arguments: Sequence[str]) -> None:
        request = self._request
        sys.argv = [request.target, *arguments]
        if request.is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(request.target, run_name="__main__", alter_sys=True)
            return
        code = _compile(request.target)
        sys.path[0] = os.path.dirname(os.path.abspath(request.target))  # noqa: PTH100, PTH120  # as Python does
        main = ModuleType("__main__")
        main.__file__, main.__builtins__ = request.target, __builtins__  # type: ignore[attr-defined]
        main.__spec__ = None
        sys.modules["__main__"] = main
        exec(code, main.__dict__)

    def _install(self) -> None:
        from stepscope.loop.recorder import LoopRecorder, RecordingPlan

        request = self._request
        self.recorder = LoopRecorder(
            RunPlace(folder=Path(request.folder), page=Path(request.page)),
            RecordingPlan(skip=request.skip, steps=request.steps, sources=request.sources),
            script=request.name,
            tell=tell,
            is_command=True,
        )
        if request.stop:
            self.recorder.on_done = _stop
        self.recorder.start()

    def _watch_exit(self, original: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
        """A script that ends with `os._exit` runs no other code at its end."""

        def exit_at_once(status: int) -> NoReturn:
            try:
                self._finish()
            except KeyboardInterrupt:
                status = Exit.INTERRUPTED
            original(status)

        return exit_at_once

    def _finish(self) -> None:
        if os.getpid() != self._process:  # a child that the script forked
            return
        recorder = self.recorder
        if recorder is None:
            tell("nothing was recorded: the script did not import torch")
            return
        try:
            recorder.end()
        except KeyboardInterrupt:
            tell("stopped before the page was complete")
            raise


def _stop() -> None:
    raise ScriptStopped(0)


def _compile(path: str) -> CodeType:
    try:
        with open_code(path) as file:
            content = file.read()
    except OSError as error:
        raise StepscopeError(f"cannot read `{path}`: {error.strerror}") from None
    return compile(content, path, "exec", dont_inherit=True)


def _show(error: BaseException) -> None:
    """Print an error of the script as Python would."""
    error.__traceback__ = _own_part(error)  # this is what Python prints, and not the argument
    sys.excepthook(type(error), error, error.__traceback__)


def _own_part(error: BaseException) -> Any:
    """The traceback from the script's first line on, without the frames of this file."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        traceback = traceback.tb_next
    return traceback


def main() -> NoReturn:
    """The request is the first argument; the script's own arguments follow."""
    request = msgspec.json.decode(sys.argv[1], type=ScriptRequest)
    try:
        ScriptRun(request).run(sys.argv[2:])
    except StepscopeError as error:
        tell(f"error: {error}")
        sys.exit(Exit.BAD_INPUT)


if __name__ == "__main__":
    main()
