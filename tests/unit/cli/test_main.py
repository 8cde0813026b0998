"""The process boundary: what a script reads from the exit status is never a mistake of ours."""

import sys
from collections.abc import Callable

import pytest
import typer

from stepscope.cli import main as cli
from stepscope.cli.output import say
from stepscope.errors import Exit


def test_a_mistake_of_ours_is_no_failed_gate(
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


def test_a_strangers_words_reach_the_terminal_without_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    say("error: a\x1b[31mb")
    assert capsys.readouterr().err == "error: a\\u001b[31mb\n"


class Panic(BaseException):
    """As polars raises them: not an Exception."""


@pytest.mark.parametrize("failure", [Panic, EOFError, MemoryError, RecursionError, GeneratorExit, AssertionError])
def test_whatever_breaks_inside_a_verb_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: type[BaseException]
) -> None:
    def break_down() -> None:
        raise failure("ours")

    assert run(monkeypatch, break_down) == Exit.OUR_MISTAKE
    assert failure.__name__ in capsys.readouterr().err


@pytest.mark.parametrize("code", list(Exit))
def test_a_verb_ends_with_the_status_that_it_chose(monkeypatch: pytest.MonkeyPatch, code: Exit) -> None:
    def end() -> None:
        raise typer.Exit(code)

    assert run(monkeypatch, end) == code


def test_an_interrupt_is_one_wherever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run(monkeypatch, stop) == Exit.INTERRUPTED
    monkeypatch.setattr(cli, "fill_bare_flags", stop)
    assert run(monkeypatch, lambda: None) == Exit.INTERRUPTED


def run(monkeypatch: pytest.MonkeyPatch, verb: Callable[[], None]) -> object:
    app = typer.Typer()
    app.command("verb")(lambda: verb())
    app.callback()(lambda: None)
    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["stepscope", "verb"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code
