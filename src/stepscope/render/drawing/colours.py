"""The colour of everything, in files and on the page: a pair for light and dark.

The hues are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Kernel classes and memory
categories have fixed colours, the same in every report, so that two pages can be compared. There are more classes than
hues: classes that are rarely next to each other share a hue, in a darker and a lighter tone. Phases and layers are
tones of slate.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from stepscope.findings import Bars, Breakdown, Figure, Lanes, Part, Roofline, SideBySide, StepPicture, Timeline
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend

Pair = tuple[str, str]
# Strongest contrast on white first; grey replaces their yellow, which is invisible on white. Then the same hues, light
# enough for a dark page.
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
_LINES_ON_DARK = ("#4AA3DF", "#EF7F36", "#2DBE94", "#DD94BC", "#F0B03A", "#7CC8F2", "#D8D8D8", "#A3A3A3")
_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, _GREY = zip(_LINES, _LINES_ON_DARK, strict=True)
NEUTRAL: Pair = ("#8b93a1", "#7d8796")
# Text colours on fills; and greys for everything but data, in files: the page has its own.
_ON_FILLS = ("#14171c", "#ffffff")
_INK, _FAINT, _GRID, _FRAME, _PAPER = "#222222", "#5f5f5f", "#e3e3e3", "#9a9a9a", "#ffffff"


def mix(colour: str, other: str, share: float) -> str:
    """Return `colour` mixed with a share of `other`."""
    pairs = [(int(colour[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(own + (its - own) * share):02x}" for own, its in pairs)


def choose_ink(fill: str) -> str:
    """Return black or white, whichever has the better contrast on this colour, as WCAG defines it."""
    return max(_ON_FILLS, key=lambda ink: _find_contrast(ink, fill))


def _find_contrast(one: str, other: str) -> float:
    low, high = sorted((_find_luminance(one), _find_luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _find_luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _deep(pair: Pair) -> Pair:
    return mix(pair[0], "#000000", 0.35), mix(pair[1], "#000000", 0.3)


def _pale(pair: Pair) -> Pair:
    return mix(pair[0], "#ffffff", 0.4), mix(pair[1], "#ffffff", 0.45)


_KNOWN: dict[str, Pair] = {
    "GEMM": _BLUE,
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
    "clipping": ("#b08ca3", "#8a6a80"),
    "scheduler": ("#c9b9a2", "#7d705c"),
    "logging": ("#a9bfae", "#647a69"),
    "checkpoint": ("#bfa98f", "#94795c"),
    "waiting for DataLoader workers": _VERMILION,
    "loading in the main process": _VERMILION,
    "loading input": _pale(_VERMILION),
    "collating samples": _ORANGE,
    "pinning memory": _pale(_ORANGE),
    "copies to the GPU": _deep(_SKY),
    "gradient clipping": ("#b08ca3", "#8a6a80"),
    "waiting for the GPU": _PINK,
    "waiting": _pale(_VERMILION),
    "GPU idle": _pale(_GREY),
    "idle": _pale(_GREY),
    "outside operators": _pale(_GREY),
    "the rest": _GREY,
    "A": _GREY,
    "B": _BLUE,
}
_OTHERS = (_BLUE, _VERMILION, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, _deep(_PINK), _pale(_GREEN), _GREY)


def colour_of(group: str, taken: Collection[Pair] = ()) -> Pair:
    """Return the pair for light and dark. A group without its own gets the first that is free."""
    if not group:
        return NEUTRAL
    free = next((pair for pair in _OTHERS if pair not in taken), _OTHERS[len(taken) % len(_OTHERS)])
    return _KNOWN.get(group, free)


def assign_colours(parts: Iterable[Part | None]) -> dict[str, Pair]:
    """Return a colour for every group in the parts; groups of the same part differ."""
    pairs: dict[str, Pair] = {"": NEUTRAL}
    for part in parts:
        groups = list(dict.fromkeys(groups_of(part)))
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
            return [value for one in part.dimensions if one.key in ("class", "phase") for value in one.values]
        case AlignedMemory():
            return part.categories
        case Trend():
            return [line.name for line in part.lines if line.name]
        case AlignedSteps():
            return [name for place in part.places for side in place.sides for name in side.classes]
        case StepPicture():
            return [name for bar in part.bars if bar for phase in bar.phases for name in phase.classes]
        case Roofline():
            return [point.group for point in part.points]
        case Timeline():
            return [area.name for area in part.areas]
        case Figure():
            return [*part.series, *(point.series for point in part.points)]
        case Bars():
            return part.series if len(part.series) > 1 else ()  # a single group needs no colour
        case SideBySide():
            return [group for inner in part.parts for group in groups_of(inner)]
        case _:
            return ()


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours for SVG: literal and light in a file, CSS variables on the page."""

    pairs: Mapping[str, Pair]
    on_page: bool = False

    @property
    def ink(self) -> str:
        return "var(--ink)" if self.on_page else _INK

    @property
    def faint(self) -> str:
        return "var(--faint)" if self.on_page else _FAINT

    @property
    def grid(self) -> str:
        return "var(--grid)" if self.on_page else _GRID

    @property
    def frame(self) -> str:
        return "var(--hatch)" if self.on_page else _FRAME

    @property
    def paper(self) -> str:
        return "var(--paper)" if self.on_page else _PAPER

    def change(self, value: float, *, pale: bool = False) -> str:
        """The colour of a change: of more, or of less time or memory."""
        name = ("bad" if value > 0 else "good") + ("-pale" if pale else "")
        return f"var(--{name})" if self.on_page else _THEME[name][0]

    @property
    def plain(self) -> str:
        """The colour of a single series."""
        return self._write(_BLUE)

    def fill(self, group: str) -> str:
        return self._write(self.pairs.get(group, NEUTRAL))

    def _write(self, pair: Pair) -> str:
        return f"var(--{_name_pair(pair)})" if self.on_page else pair[0]

    def ink_on(self, group: str) -> str:
        """Return a readable text colour on the colour of a group."""
        pair = self.pairs.get(group, NEUTRAL)
        return f"var(--on-{_name_pair(pair)})" if self.on_page else choose_ink(pair[0])


# The colours of the page, by their names in the style sheet.
_THEME: dict[str, Pair] = {
    "paper": ("#ffffff", "#101216"),
    "raised": ("#ffffff", "#181b21"),
    "sunk": ("#f6f7f9", "#171a20"),
    "code": ("#f6f7f9", "#0a0c0f"),
    "ink": ("#14171c", "#eceef2"),
    "soft": ("#3d4450", "#c3c9d3"),
    "faint": ("#626b7a", "#98a1b0"),
    "line": ("#e2e5ea", "#2a2f38"),
    "grid": ("#eceef2", "#22262e"),
    "accent": ("#4353c9", "#98a5ff"),
    "accent-soft": ("#eef0fd", "#20253f"),
    "hatch": ("#b9c0cb", "#4d5563"),
    "good": ("#0a7a55", "#4fcf9f"),
    "bad": ("#b8431a", "#ff8f66"),
    "good-pale": ("#85bdaa", "#2f705a"),
    "bad-pale": ("#dca18d", "#87503c"),
    "doubt": ("#9a5b00", "#f0b03a"),
    "shadow": (
        "0 1px 2px rgb(20 23 28 / 0.05), 0 8px 28px rgb(20 23 28 / 0.12)",
        "0 1px 2px rgb(0 0 0 / 0.4), 0 8px 28px rgb(0 0 0 / 0.5)",
    ),
}


def _name_pair(pair: Pair) -> str:
    return f"c{pair[0][1:]}"


def write_colours(pairs: Iterable[Pair]) -> str:
    """Return a style sheet that names the colours of the page and its data, for light and dark."""
    named = dict(_THEME)
    for pair in (*pairs, NEUTRAL, _BLUE):
        named[_name_pair(pair)] = pair
        named[f"on-{_name_pair(pair)}"] = (choose_ink(pair[0]), choose_ink(pair[1]))
    light, dark = ("".join(f"--{name}:{pair[at]};" for name, pair in named.items()) for at in (0, 1))
    # Twice, for the chosen theme and for the system's: a style sheet has no "or".
    chosen = f':root[data-theme="dark"]{{{dark}}}'
    system = f'@media (prefers-color-scheme: dark){{:root[data-theme="auto"]{{{dark}}}}}'
    return f":root{{{light}}}{chosen}{system}\n"
