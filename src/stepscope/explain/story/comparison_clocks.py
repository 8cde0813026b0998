"""Whose clock timed a step, and whether two steps can be told apart by it.

A recorder lengthens what the host does, so a step while recorded and one without the recorder differ even where nothing
changed. Two figures are compared only where one kind of clock made both, and by the steps that they are made of.
"""

from fractions import Fraction
from typing import Literal

from stepscope.explain.story.opening import Opening
from stepscope.explain.trace.compare import Verdict, list_plain_steps, step_windows
from stepscope.explain.trace.compare import judge as judge_samples

# By `bench`, by `profile` without its recorder, or while it recorded.
Clock = Literal["timed", "plain", "recorded"]


def find_clock(opening: Opening) -> Clock:
    """Of `Opening.step_ns`."""
    if opening.row is not None:
        return "timed"
    profile = opening.materials.profile
    is_plain = profile is not None and profile.step_ns != profile.recorded_step_ns
    return "plain" if is_plain else "recorded"


def list_steps(opening: Opening) -> list[Fraction]:
    """The steps that `Opening.step_ns` is made of; none where they were not kept one by one."""
    if opening.row is not None and opening.row.measurement is not None:
        return [Fraction(ns) for ns in opening.row.measurement.step_ns]
    profile = opening.materials.profile
    if profile is None:
        return []
    if find_clock(opening) == "plain":
        return list_plain_steps(profile)
    return [Fraction(end - start) for start, end in step_windows(profile)]


def judge_steps(a: Opening, b: Opening) -> Verdict:
    steps = list_steps(a), list_steps(b)
    if find_clock(a) != find_clock(b) or not steps[0] or not steps[1]:
        return "cannot tell"
    return judge_samples(steps[0], steps[1])


def say_doubt(a: Opening, b: Opening) -> str:
    """Why it cannot be told whether two steps differ, where `judge_steps` says so."""
    clocks = find_clock(a), find_clock(b)
    if clocks[0] == clocks[1]:
        return "too few steps to tell it from noise"
    if "recorded" not in clocks:
        return "one by bench, the other by profile's own clock"
    recorded, other = ("A", "B") if clocks[0] == "recorded" else ("B", "A")
    return f"{recorded}'s was timed while recorded, which takes time, {other}'s without the recorder"
