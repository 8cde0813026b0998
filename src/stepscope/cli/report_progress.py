"""Progress of a report: on a terminal a live line per stage with the time left, elsewhere a line per finished stage."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stepscope.cli.output import say
from stepscope.jobs.report.run import Ending, Watcher
from stepscope.render.formats import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 10  # of the stage names


@contextmanager
def watching() -> Iterator[Watcher]:
    if sys.stderr is None or not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False)
    display = Display(console)
    with Live(get_renderable=display.render, console=console, refresh_per_second=4) as live:
        yield display
        display.close()
        live.refresh()


class Lines:
    """Prints a line per finished stage."""

    def plan(self, expected_s: Mapping[str, float]) -> None:
        pass

    def start(self, stage: str) -> None:
        pass

    def doing(self, text: str) -> None:
        pass

    def finish(self, stage: str, ending: Ending, outcome: str) -> None:
        say(f"{stage}: {_say_ending(ending, outcome)}")


def _say_ending(ending: Ending, outcome: str) -> str:
    match ending:
        case Ending.DONE:
            return outcome
        case Ending.REUSED:
            return f"{outcome} (reused; --fresh runs it again)"
        case Ending.FAILED:
            return f"failed: {outcome}"
        case Ending.LEFT_OUT:
            return f"skipped: {outcome}" if not outcome.startswith("skipped") else outcome


class Forecast:
    """The time left: the expected time, scaled by how long earlier stages took compared with theirs."""

    def __init__(self) -> None:
        self._expected_s: dict[str, float] = {}
        self._took_s = self._expected_so_far_s = 0.0

    def plan(self, expected_s: Mapping[str, float]) -> None:
        self._expected_s = dict(expected_s)

    def take(self, stage: str, took_s: float) -> None:
        expected_s = self._expected_s.pop(stage, 0.0)
        if expected_s:
            self._took_s += took_s
            self._expected_so_far_s += expected_s

    def left_s(self, stage: str, elapsed_s: float) -> float:
        """The time left after `stage` has run for `elapsed_s`. An overdue stage is expected to end any moment."""
        factor = self._took_s / self._expected_so_far_s if self._expected_so_far_s else 1.0
        left = {name: factor * expected_s for name, expected_s in self._expected_s.items()}
        current = max(0.0, left.pop(stage, 0.0) - elapsed_s)
        return current + sum(left.values())


class Display:
    """A line per stage: finished ones with their result, the running one with its activity, then the waiting ones."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._forecast: Forecast | None = None
        self._done: dict[str, str] = {}
        self._waiting: list[str] = []
        self._stage = ""
        self._doing = "starting"
        self._began = self._since = time.monotonic()
        self._is_closed = False

    def plan(self, expected_s: Mapping[str, float]) -> None:
        self._forecast = Forecast()
        self._forecast.plan(expected_s)
        self._waiting = list(expected_s)

    def start(self, stage: str) -> None:
        self._stage, self._doing, self._since = stage, "starting", time.monotonic()
        self._waiting.remove(stage)

    def doing(self, text: str) -> None:
        self._doing = text

    def finish(self, stage: str, ending: Ending, outcome: str) -> None:
        took_s = time.monotonic() - self._since
        if self._forecast is not None and stage == self._stage:
            self._forecast.take(stage, took_s)
        took = f"  {took_s:.0f} s" if ending is Ending.DONE else ""
        self._done[stage] = _say_ending(ending, outcome) + took
        self._stage, self._since = "", time.monotonic()

    def close(self) -> None:
        self._is_closed = True

    def render(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"{stage:<{_WIDTH}} ").append(visible(text), style="bold") for stage, text in self._done.items()]
        if not self._is_closed:
            elapsed_s = time.monotonic() - self._since
            name = self._stage or "…"
            lines.append(Text(f"{name:<{_WIDTH}} {visible(self._doing)}  {elapsed_s:.0f} s", style="cyan"))
            lines += [Text(f"{stage:<{_WIDTH}} waiting", style="dim") for stage in self._waiting]
            lines.append(Text(self._say_time()))
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(*lines)

    def _say_time(self) -> str:
        gone_s = time.monotonic() - self._began
        if self._forecast is None:
            return f"{gone_s:.0f} s elapsed"
        left_s = self._forecast.left_s(self._stage, time.monotonic() - self._since)
        return f"{gone_s:.0f} s elapsed, about {left_s:.0f} s left"
