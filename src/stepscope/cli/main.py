"""The entry point: the verbs, and the one place where errors become messages and exit codes."""

import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

import typer

from stepscope import __version__
from stepscope.cli.options import fill_bare_flags
from stepscope.cli.output import prepare_streams, say
from stepscope.errors import Exit, StepscopeError

# In the order of the help. Each is a function of its name, in a module of its name.
VERBS = (
    "report",
    "bench",
    "profile",
    "memory",
    "precision",
    "attention",
    "comm",
    "train",
    "tune",
    "explain",
    "recover",
    "verify",
    "key",
    "compare",
    "kernel",
    "rule",
    "doctor",
)

app = typer.Typer(
    name="stepscope",
    help="Shows where one training step of a Transformer spends its time and memory, and says why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in VERBS:
    app.command(verb)(getattr(import_module(f"stepscope.cli.{verb}"), verb))


@app.callback(invoke_without_command=True)
def stepscope(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:  # noqa: FBT003
    if version:
        typer.echo(f"stepscope {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Exit codes are in `errors.Exit`. A request to terminate ends like Ctrl-C, which typer turns into 130: workers are
    ended and rows kept."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _raise_interrupt)
    prepare_streams()
    try:
        _require_text(sys.argv[1:])
        app(args=fill_bare_flags(sys.argv[1:]), standalone_mode=True)
    except StepscopeError as error:
        say(f"error: {error}")
        sys.exit(Exit.BAD_INPUT)
    except KeyboardInterrupt:  # outside of a verb
        sys.exit(Exit.INTERRUPTED)
    except SystemExit as end:
        # What typer makes of any EOFError, with the status of a failed gate.
        if isinstance(end.__context__, typer.Abort):
            _admit()
        raise
    except BaseException:  # noqa: BLE001  # the process boundary: a Rust panic is not an Exception
        _admit()
    sys.exit(Exit.OK)


def _require_text(arguments: list[str]) -> None:
    """Commands and file names go into results, recordings and pages, all of which are UTF-8."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = argument.encode(errors="surrogateescape").decode(errors="backslashreplace")
            raise StepscopeError(f"not valid UTF-8: `{shown}`", hint="rename the file or folder") from None


def _admit() -> NoReturn:
    """A mistake of ours, which must not pass for a verdict: Python's own exit status would read as a failed gate."""
    with suppress(OSError):
        traceback.print_exc()
    sys.exit(Exit.OUR_MISTAKE)


def _raise_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
