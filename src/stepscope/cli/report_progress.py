"""What a person sees while a report is made: on a terminal a line a stage with the time left, elsewhere a line when one
is done."""

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

_WIDTH = 10  # of a stage's name


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
    """A line a stage, as it is done."""

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
            return f"{outcome} (done before; --fresh runs it again)"
        case Ending.FAILED:
            return f"failed: {outcome}"
        case Ending.LEFT_OUT:
            return f"left out: {outcome}" if not outcome.startswith("left out") else outcome


class Forecast:
    """How long the rest will take: what was expected, corrected by how long the stages so far took against that."""

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
        """While `stage` has run for `elapsed_s`. One that takes longer than expected is expected to end at once."""
        factor = self._took_s / self._expected_so_far_s if self._expected_so_far_s else 1.0
        left = {name: factor * expected_s for name, expected_s in self._expected_s.items()}
        current = max(0.0, left.pop(stage, 0.0) - elapsed_s)
        return current + sum(left.values())


class Display:
    """A line a stage: done ones with their figure, the one that runs with what it does, those to come."""

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
            lines += [Text(f"{stage:<{_WIDTH}} to come", style="dim") for stage in self._waiting]
            lines.append(Text(self._say_time()))
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(*lines)

    def _say_time(self) -> str:
        gone_s = time.monotonic() - self._began
        if self._forecast is None:
            return f"{gone_s:.0f} s so far"
        left_s = self._forecast.left_s(self._stage, time.monotonic() - self._since)
        return f"{gone_s:.0f} s so far, about {left_s:.0f} s left"
