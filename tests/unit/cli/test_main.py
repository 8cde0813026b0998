"""The process boundary: exit codes never hide a bug in stepscope."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import typer

from stepscope.cli import main as cli
from stepscope.cli.output import say
from stepscope.errors import Exit


def test_a_bug_does_not_exit_like_a_failed_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(**_: object) -> None:
        raise OverflowError("ours")

    monkeypatch.setattr(cli, "app", break_down)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == Exit.OUR_MISTAKE
    assert left.value.code not in (Exit.OK, Exit.GATE_FAILED, Exit.BAD_INPUT, Exit.UNDECIDED)
    assert "OverflowError: ours" in capsys.readouterr().err


def test_messages_escape_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    say("error: a\x1b[31mb")
    assert capsys.readouterr().err == "error: a\\u001b[31mb\n"


class Panic(BaseException):
    """Like a Rust panic in polars: not an Exception."""


@pytest.mark.parametrize("failure", [Panic, EOFError, MemoryError, RecursionError, GeneratorExit, AssertionError])
def test_any_exception_inside_a_verb_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: type[BaseException]
) -> None:
    def break_down() -> None:
        raise failure("ours")

    assert run(monkeypatch, break_down) == Exit.OUR_MISTAKE
    assert failure.__name__ in capsys.readouterr().err


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.EACCES])
def test_a_path_that_cannot_be_looked_up_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    def look_up() -> None:
        raise OSError(code, os.strerror(code), "x" * 300)

    assert run(monkeypatch, look_up) == Exit.BAD_INPUT
    said = capsys.readouterr().err
    assert said == f"error: {os.strerror(code)}: `{'x' * 100}…`\n"


def test_other_os_errors_are_internal_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "file")

    assert run(monkeypatch, fail) == Exit.OUR_MISTAKE
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("code", list(Exit))
def test_a_verb_chooses_its_exit_status(monkeypatch: pytest.MonkeyPatch, code: Exit) -> None:
    def end() -> None:
        raise typer.Exit(code)

    assert run(monkeypatch, end) == code


def test_an_interrupt_exits_with_130_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run(monkeypatch, stop) == Exit.INTERRUPTED
    monkeypatch.setattr(cli, "fill_bare_flags", stop)
    assert run(monkeypatch, lambda: None) == Exit.INTERRUPTED


def test_the_list_of_verbs_fits_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["stepscope", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(cli.VERBS)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def run(monkeypatch: pytest.MonkeyPatch, verb: Callable[[], None]) -> object:
    app = typer.Typer()
    app.command("verb")(lambda: verb())
    app.callback()(lambda: None)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["stepscope", "verb"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["plan", "--ranks", "0"], "error: invalid value for `--ranks`: ", "stepscope plan --help"),
        (["plan", "--foo"], "error: no such option: --foo", "stepscope plan --help"),
        (["plan", "--fit"], "error: option `--fit` requires an argument\n", "stepscope plan --help"),
        (["explain"], "error: missing argument `FILE…`\n", "stepscope explain --help"),
        (["explian"], "error: no such command `explian`. Did you mean `explain`", "stepscope --help"),
    ],
)
def test_wrong_flags_are_reported_like_all_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str, hint: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["stepscope", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.endswith(f"\nhint: {hint}\n")


def test_no_verb_is_a_call_for_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["stepscope"])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr()
    assert "Usage: " in shown.out + shown.err
    assert "error:" not in shown.err


INTERRUPTED = """
import os, signal, threading, time
import polars as pl
from stepscope.cli.main import Interrupts

signal.signal(signal.SIGINT, Interrupts())
frame = pl.DataFrame({"a": range(1_000_000)}).with_columns(b=pl.col("a") % 1000)

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        frame.lazy().sort("b").group_by("b").agg(pl.col("a").sort().sum()).collect()

def wait():
    time.sleep(10)

def press():
    os.kill(os.getpid(), signal.SIGINT)

threading.Timer(0.3, press).start()
try:
    compute(10)
except KeyboardInterrupt:
    compute(0.1)
    print("saved")
    threading.Timer(0.1, press).start()
    try:
        wait()
    except KeyboardInterrupt:
        print("left")
"""


def test_ctrl_c_while_polars_computes_interrupts_once_and_a_second_one_again() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "saved\nleft\n", done.stderr


def test_ctrl_c_is_raised_if_something_else_is_handled() -> None:
    interrupts = cli.Interrupts()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        try:
            raise ValueError("theirs")
        except ValueError:
            interrupts(signal.SIGINT, None)


def test_ctrl_c_is_left_to_what_raised_it_once() -> None:
    interrupts = cli.Interrupts()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupts(signal.SIGINT, None)
        with pytest.raises(KeyboardInterrupt):
            interrupts(signal.SIGINT, None)
