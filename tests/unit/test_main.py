"""The process boundary: what a script reads from the exit status is never a mistake of ours."""

import pytest

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
    assert capsys.readouterr().err == "error: a\N{REPLACEMENT CHARACTER}[31mb\n"
