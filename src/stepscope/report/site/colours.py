"""Which colour stands for what, everywhere on a page: a pair for light and for dark.

Classes of kernels and categories of memory have hues, the same in every report, so that two pages can be compared.
There are more classes than hues that everybody can tell apart: those that seldom stand beside one another share one, in
a darker and a lighter tone. Phases and layers are drawn around them and have tones of slate.
"""

from collections.abc import Collection, Iterable

from stepscope.findings import Bars, Beside, Breakdown, Figure, Lanes, Part, Report, Roofline, Timeline
from stepscope.report.palette import LINES, LINES_ON_DARK
from stepscope.report.timeline_layout import mix

Pair = tuple[str, str]
_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, _GREY = zip(LINES, LINES_ON_DARK, strict=True)
NEUTRAL: Pair = ("#8b93a1", "#7d8796")


def _deep(pair: Pair) -> Pair:
    return mix(pair[0], "#000000", 0.35), mix(pair[1], "#000000", 0.3)


def _pale(pair: Pair) -> Pair:
    return mix(pair[0], "#ffffff", 0.4), mix(pair[1], "#ffffff", 0.45)


_KNOWN: dict[str, Pair] = {
    "gemm": _BLUE,
    "attention": _VERMILION,
    "softmax": _pale(_VERMILION),
    "norm": _GREEN,
    "elementwise": _ORANGE,
    "reduction": _PINK,
    "copy": _SKY,
    "memcpy": _deep(_SKY),
    "memset": _pale(_SKY),
    "index": _deep(_PINK),
    "embedding": _pale(_GREEN),
    "loss": _deep(_VERMILION),
    "optimizer": _deep(_ORANGE),
    "random": _pale(_PINK),
    "sort": _pale(_ORANGE),
    "communication": _deep(_GREEN),
    "convolution": _deep(_BLUE),
    "other": _GREY,
    "unknown": _GREY,
    "parameters": _BLUE,
    "optimizer state": _ORANGE,
    "gradients": _GREEN,
    "activations": _PINK,
    "temporaries": _SKY,
    "autocast copies": _VERMILION,
    "workspaces": _deep(_GREEN),
    "forward": ("#9fb3cc", "#6d86a6"),
    "backward": ("#6b82a1", "#8fa9cb"),
    "input": ("#d3dbe6", "#46566c"),
    "warm-up": ("#d3dbe6", "#46566c"),
    "A": _GREY,
    "B": _BLUE,
}
_OTHERS = (_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, *map(_pale, (_BLUE, _GREEN)), _GREY)


def colour_of(group: str, taken: Collection[Pair] = ()) -> Pair:
    """The pair for light and for dark. A group that has none of its own gets the first that is not taken."""
    if not group:
        return NEUTRAL
    free = next((pair for pair in _OTHERS if pair not in taken), _OTHERS[len(taken) % len(_OTHERS)])
    return _KNOWN.get(group, free)


def assign_colours(report: Report) -> dict[str, Pair]:
    """A colour for everything in a report that is told apart by one; what stands in one exhibit differs."""
    pairs: dict[str, Pair] = {"": NEUTRAL}
    for section in report.sections:
        for exhibit in section.exhibits:
            groups = list(dict.fromkeys(groups_of(exhibit.part)))
            taken = [pairs.get(group) or _KNOWN[group] for group in groups if group in pairs or group in _KNOWN]
            for group in groups:
                if group not in pairs:
                    pairs[group] = colour_of(group, taken)
                    taken.append(pairs[group])
    return pairs


def groups_of(part: Part | None) -> Iterable[str]:
    match part:
        case Lanes():
            return part.groups
        case Breakdown():
            return next((dimension.values for dimension in part.dimensions if dimension.key == "class"), ())
        case Roofline():
            return [point.group for point in part.points]
        case Timeline():
            return [area.name for area in part.areas]
        case Figure():
            return [*part.series, *(point.series for point in part.points)]
        case Bars():
            return part.series if len(part.series) > 1 else ()  # one alone needs no colour to be told apart
        case Beside():
            return [group for inner in part.parts for group in groups_of(inner)]
        case _:
            return ()
