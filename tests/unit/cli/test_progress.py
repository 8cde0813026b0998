"""Progress without a terminal: a log says at once that something runs."""

import pytest

from stepscope.cli.progress import choose_listener
from stepscope.jobs.experiments.sweep import Planned
from tests.unit.rows import row


def test_log_says_at_once_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    done = row()
    planned = [Planned(case=done.case, environment=done.environment, source=None)] * 2
    with choose_listener(lambda _: "ok", lambda _: "small") as listener:
        assert capsys.readouterr().err == "inspecting the device\n"
        listener.begin(planned, [], 0)
        listener.start(planned[0])
        assert capsys.readouterr().err == "[1/2] small: running\n"
        listener.finish(done)
        listener.start(planned[1])
        assert capsys.readouterr().err.startswith("[1/2] small: ")
