"""A report: the story of one run or of two, from the sentence at the top to the command that makes it again.

`explain.story` tells it, `report.site` makes one page of it, and `report.export` files for a paper. A report holds raw
values with their kind, and text that may come from anybody's file: who draws it formats and escapes. Nothing in it
names a colour, a size in pixels or a tag.

Where something is of one run or of two side by side, `runs` names them (`("",)` for one, `("A", "B")` for two), and
values come one a run in that order.
"""

from typing import Literal, NamedTuple

import msgspec

from stepscope.findings.elements import Cell, Figure, Finding, Quantity, Table, Timeline


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One of the few numbers at the top. `before` is A's value in a comparison, where `value` is B's. Their ratio means
    something only where `is_comparable`: not of shares of two peaks, nor of sizes measured in two ways."""

    key: str  # stable: step, memory, mfu, bound, busy, tokens
    label: str
    value: Cell
    kind: Quantity = "text"
    note: str = ""
    before: Cell = None
    is_comparable: bool = True


class Copyable(msgspec.Struct, frozen=True, kw_only=True):
    """Something to type or to paste, exactly as it stands."""

    label: str
    text: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with what to do about it, to copy."""

    finding: Finding
    fixes: tuple[Copyable, ...] = ()


class Soundness(msgspec.Struct, frozen=True, kw_only=True):
    """How far the figures can be trusted: in a sentence, and what it rests on."""

    verdict: Literal["sound", "doubtful", "unknown"]
    sentence: str
    details: tuple[str, ...] = ()


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Something that belongs here and is not there: what, why, and the command that would bring it."""

    what: str
    why: str
    command: str = ""


class StageText(NamedTuple):
    """What a stage of a report makes, and what it shows on the page."""

    makes: str
    shows: str


# The stages of a report, in the order in which they run.
STAGES: dict[str, StageText] = {
    "bench": StageText("step times", "step times"),
    "profile": StageText("a recording of the step", "the kernels of a step"),
    "memory": StageText("a recording of memory", "memory over time"),
    "precision": StageText("precisions compared", "dtypes and errors of low precision"),
    "attention": StageText("implementations of attention compared", "attention alone, in several implementations"),
}


# --- Parts: what a section shows, beside tables and the figures of `pieces` -------------------------------------------


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """One way of taking time apart. `details` are shown on request, one text a value, or none at all."""

    key: str  # class, phase, layer, module, kernel
    label: str
    values: tuple[str, ...]
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.details or len(self.details) == len(self.values), "a detail for each value, or for none"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels' time of a step taken apart in several ways at once: choosing a value of one narrows the others.

    A row is all kernels that agree in every dimension: `places` has one number a dimension, the place of its value
    there. All times are of a step. `walls_ns` and `idles_ns` are a step's wall time and how much of it nothing ran.
    """

    title: str
    runs: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    places: tuple[tuple[int, ...], ...]  # a tuple a row
    times_ns: tuple[tuple[float, ...], ...]  # a tuple a run, in it a number a row
    counts: tuple[tuple[float, ...], ...]
    shortest_ns: tuple[tuple[float | None, ...], ...]  # None where this run has no such kernel
    longest_ns: tuple[tuple[float | None, ...], ...]
    walls_ns: tuple[float, ...]
    idles_ns: tuple[float, ...]
    what: str = "kernels"  # operators, on a CPU
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.dimensions) for row in self.places), "a place in every dimension"
        for columns in (self.times_ns, self.counts, self.shortest_ns, self.longest_ns):
            assert len(columns) == len(self.runs), "a column a run"
            assert all(len(column) == len(self.places) for column in columns), "a number a row"


class Spans(msgspec.Struct, frozen=True, kw_only=True):
    """Stretches of time on one track, in order, as columns. `names` and `groups` are places in those of the `Lanes`;
    `counts` is how many kernels a stretch stands for, more than one where they were too many to draw each."""

    starts_ns: tuple[int, ...]
    lengths_ns: tuple[int, ...]
    names: tuple[int, ...]
    groups: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        columns = (self.starts_ns, self.lengths_ns, self.names, self.groups, self.counts)
        assert len({len(column) for column in columns}) == 1, "columns of one length"


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a step's timeline. Spans of one track do not overlap."""

    label: str
    kind: Literal["phase", "layer", "module", "stream", "host"]
    spans: Spans


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """One step as it ran, from its beginning at 0: phases, layers and modules above what ran on each stream.

    `details` are shown on request, one text a name, or none at all. `groups` are what is told apart by colour: phases
    for the track of phases, classes for streams; the empty group is for what has none.
    """

    title: str
    span_ns: int
    tracks: tuple[Track, ...]
    names: tuple[str, ...]
    details: tuple[str, ...] = ()
    groups: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.details or len(self.details) == len(self.names), "a detail for each name, or for none"


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of the device: so many operations a second, in one precision."""

    label: str
    flops_per_s: float


class RoofPoint(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with one shape. `reached` is the share of what the device allows it."""

    label: str
    group: str  # its class
    intensity: float  # FLOP a byte
    flops_per_s: float
    time_ms: float  # a step
    share: float  # of all kernels' time
    reached: float | None
    bound: str  # memory, compute or launch
    detail: str = ""
    run: int = 0


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    runs: tuple[str, ...]
    bytes_per_s: float
    roofs: tuple[Roof, ...]
    points: tuple[RoofPoint, ...]
    notes: tuple[str, ...] = ()


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths side by side: a bar for each label and series, on top of each other where `is_stacked`."""

    title: str
    kind: Quantity
    labels: tuple[str, ...]
    series: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]  # a tuple a series, in it a number a label
    is_stacked: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.series), "a column a series"
        assert all(len(column) == len(self.labels) for column in self.values), "a number a label"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """`is_answered` false: `answer` says why it cannot be, and `command` makes the recording that would."""

    question: str
    figure: str
    answer: str
    evidence: Table | None = None
    command: str = ""
    is_answered: bool = True


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    questions: tuple[Question, ...]


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """The same thing of each run, side by side where there is room. None where a run has no such thing."""

    title: str
    runs: tuple[str, ...]
    parts: "tuple[Part | None, ...]"


Part = Table | Figure | Timeline | Breakdown | Lanes | Roofline | Bars | Questions | Beside


class Exhibit(msgspec.Struct, frozen=True, kw_only=True):
    """A part under a stable key, which is its place on the page and its name as a file. Letters, digits and hyphens."""

    key: str
    part: Part


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """`lead` says in a sentence or two what the section shows."""

    key: str
    title: str
    lead: str = ""
    exhibits: tuple[Exhibit, ...] = ()
    missing: tuple[Missing, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` is the run in one sentence, `advice` what would save most, the largest first, and at its end what a
    fix from above mends as well; `commands` make the report again."""

    title: str
    subtitle: str
    runs: tuple[str, ...] = ("",)
    sentence: str
    facts: tuple[Fact, ...]
    advice: tuple[Advice, ...] | None  # None where nothing was looked for
    soundness: Soundness
    sections: tuple[Section, ...]
    commands: tuple[Copyable, ...] = ()
    version: str = ""  # of stepscope
    is_partial: bool = False  # interrupted, or still being made
