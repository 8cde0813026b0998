"""The entry point. It registers the verbs and is the only place that turns errors into messages and exit codes."""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from stepscope import __version__
from stepscope.cli.options import fill_bare_flags
from stepscope.cli.output import prepare_streams, say
from stepscope.errors import Exit, StepscopeError

# In the order of `--help`, each with its line there. A verb is a function in the module of the same name.
VERBS = {
    "report": "Write one HTML page about a model, a trace or two runs.",
    "run": "Record a few steps of your training script, without changing it.",
    "plan": "Predict memory and time of a step, without a GPU.",
    "optimise": "Make a training step faster; each change is checked.",
    "bench": "Time forward, backward and optimizer over a grid of settings.",
    "profile": "Record a few training steps, kernel by kernel.",
    "memory": "Show where memory goes and when it peaks.",
    "precision": "Show dtypes under autocast and errors against float64.",
    "attention": "Compare the time and memory of attention implementations.",
    "comm": "Measure the latency and bandwidth of collectives.",
    "train": "Train the built-in model on one or more ranks.",
    "calibrate": "Measure how fast this GPU and its host are, for `plan`.",
    "tune": "Find the fastest Triton attention tiles for this GPU.",
    "explain": "Explain where the time or memory of a recorded step goes.",
    "reduce": "Reduce the traces of many ranks to small recordings.",
    "recover": "Infer which model ran from GPU counters or a trace.",
    "verify": "Check whether a run matches a claimed model.",
    "key": "Create an Ed25519 key pair for signing reports.",
    "compare": "Show what changed between two recordings, or since a baseline.",
    "baseline": "Save runs that later runs are compared with, as a gate in CI.",
    "kernel": "Decode the name of a GPU kernel.",
    "rule": "Explain a finding and how to fix it.",
    "mcp": "Serve the analysis to agents and editors (MCP).",
    "doctor": "Check whether this machine can measure reliably.",
}
_LONGEST_SHOWN = 100  # characters of a path in an error
_UsageError: Any = typer.BadParameter.__base__  # typer does not export it


class VerbGroup(TyperGroup):
    """Verbs whose wrong flags are reported like all other errors."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _reporting_usage():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _reporting_usage():
            return super().invoke(ctx)


@contextmanager
def _reporting_usage() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).show is not _UsageError.show:  # the help, of `stepscope` without a verb
            raise
        text = re.sub(r"'([^']+)'", r"`\1`", error.format_message().rstrip("."))
        verb = " ".join(["stepscope", *(one for one in sys.argv[1:2] if one in VERBS)])
        raise StepscopeError(f"{text[:1].lower()}{text[1:]}", hint=f"{verb} --help") from None


app = typer.Typer(
    name="stepscope",
    cls=VerbGroup,
    help="Show where a Transformer training step spends its time and memory, and why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb, summary in VERBS.items():
    # What follows a script are its own arguments, even if they look like options of stepscope.
    settings = {"allow_interspersed_args": False} if verb == "run" else None
    app.command(verb, short_help=summary, context_settings=settings)(
        getattr(import_module(f"stepscope.cli.{verb}"), verb)
    )


@app.callback(invoke_without_command=True)
def stepscope(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:  # noqa: FBT003
    if version:
        typer.echo(f"stepscope {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line. The exit codes are in `errors.Exit`. SIGTERM and SIGHUP act like Ctrl-C, which typer turns
    into 130: workers are stopped and finished rows are kept."""
    interrupts = Interrupts()
    signal.signal(signal.SIGTERM, interrupts)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # in the background of a shell, and under nohup
            signal.signal(number, interrupts)
    prepare_streams()
    try:
        _require_text(sys.argv[1:])
        # A script's own arguments stay as they are.
        arguments = sys.argv[1:] if sys.argv[1:2] == ["run"] else fill_bare_flags(sys.argv[1:])
        app(args=arguments, standalone_mode=True)
    except StepscopeError as error:
        say(f"error: {error}")
        sys.exit(Exit.BAD_INPUT)
    except OSError as error:
        # `Path.exists` and its relatives raise for names that are too long and in directories without permission.
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES) or error.filename is None:
            _report_internal_error()
        say(f"error: {error.strerror}: `{_shorten(os.fsdecode(error.filename))}`")
        sys.exit(Exit.BAD_INPUT)
    except KeyboardInterrupt:  # outside a verb
        sys.exit(Exit.INTERRUPTED)
    except SystemExit as end:
        # typer turns any EOFError into an Abort, whose exit status would read as a failed gate.
        if isinstance(end.__context__, typer.Abort):
            _report_internal_error()
        raise
    except BaseException:  # noqa: BLE001  # the process boundary: a Rust panic is not an Exception
        _report_internal_error()
    sys.exit(Exit.OK)


def _require_text(arguments: list[str]) -> None:
    """Raise StepscopeError unless all arguments are UTF-8: they are stored in results, recordings and pages."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise StepscopeError(f"not valid UTF-8: `{shown}`", hint="rename the file or directory") from None


def _shorten(path: str) -> str:
    return path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}…"


def _report_internal_error() -> NoReturn:
    """Print the traceback of a bug in stepscope. Python's own exit status, 1, would read as a failed gate."""
    with suppress(OSError):
        traceback.print_exc()
    sys.exit(Exit.OUR_MISTAKE)


class Interrupts:
    """A signal handler that raises KeyboardInterrupt once per signal.

    When Ctrl-C comes while polars computes, polars raises KeyboardInterrupt, and Python then calls the handler of the
    same signal. A second exception would end the code that saves what is finished and says how to resume.
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None  # the latest that this handler has raised or left to polars

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        handled = sys.exception()
        if isinstance(handled, KeyboardInterrupt) and not self._knows(handled):
            self._raised = handled
            return
        self._raised = KeyboardInterrupt()
        raise self._raised

    def _knows(self, handled: BaseException | None) -> bool:
        while handled is not None:
            if handled is self._raised:
                return True
            handled = handled.__context__
        return False
