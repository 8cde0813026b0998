"""What an analysis says: findings, tables and figures, before anybody decides how they look.

This is the waist between the half that computes (`explain`) and the half that draws (`report`). A `Table` keeps raw
values with their unit; formatting, rounding and colours belong to the renderer, so that CSV and JSON carry full
precision while the terminal shows three digits. `None` is a value that does not exist (a case that ran out of memory
has no step time).

A `Report` is the story of one run or of two, from the sentence at the top to the command that makes it again.
`explain.story` tells it, `render.site` makes one page of it, and `render.export` files for a paper. A report holds raw
values with their kind, and text that may come from anybody's file: who draws it formats and escapes. Nothing in it
names a colour, a size in pixels or a tag.

Where something is of one run or of two side by side, `runs` names them (`("",)` for one, `("A", "B")` for two), and
values come one a run in that order.
"""

from typing import Literal, NamedTuple

import msgspec

Cell = str | int | float | None
# What a number is; the renderer derives digits and units from it. `share` is a fraction shown in per cent, `ratio` a
# factor shown as 1.23×, `count` an integer with thousands separators, `ms` milliseconds.
Quantity = Literal["text", "ms", "us", "bytes", "count", "number", "share", "ratio"]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `key` is its stable name in CSV and JSON; `label` is what a person reads above it."""

    key: str
    label: str
    kind: Quantity = "text"
    # A detail column stands in CSV and JSON always, and in text, Markdown and LaTeX only when the user asks for all.
    detail: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of raw values under typed columns, with a title above and notes below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    # Columns whose cells are to be doubted, each with the column that says why: where that has a text, a question mark
    # follows the cell. Both are keys.
    doubted_by: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        assert len(set(keys)) == len(keys), f"two columns of one name among {keys}"
        assert {*self.doubted_by, *self.doubted_by.values()} <= set(keys), f"no such columns: {self.doubted_by}"
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells under {len(self.columns)} columns"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs time: what is wrong, the evidence, and what to do. `stepscope rule CODE` explains the code,
    which is stable.

    `action` is an imperative sentence ("Use `fused=True`") and `fix` the code or command that applies it. A finding
    without one is a remark: it is listed after the findings that can be fixed by pasting something. `saving_ns` is how
    much shorter one step would be, None if there is no estimate.
    """

    code: str
    title: str
    evidence: str
    fix: str = ""
    saving_ns: int | None = None
    share: float | None = None  # of the step's wall time
    action: str = ""

    @property
    def is_remark(self) -> bool:
        return not self.fix

    @property
    def saving_ms(self) -> float | None:
        return None if self.saving_ns is None else self.saving_ns / 1e6


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    unit: str = ""
    log: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One mark of a figure. `low` and `high` are its spread, drawn as a band or bar where given."""

    panel: str
    series: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A line chart in panels side by side: what is drawn, not how."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    series: tuple[str, ...] = ()  # their order in the legend; those not named come after, as the points name them
    series_label: str = ""
    panel_label: str = ""


class Area(msgspec.Struct, frozen=True, kw_only=True):
    """One band of a timeline: its height in every slice."""

    name: str
    values: tuple[int, ...]


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a timeline with a name, such as a phase; `end` is exclusive, both are slices."""

    label: str
    start: int
    end: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an area that can be told apart from the rest of it: in slices `start` to `end` (exclusive) it takes
    `size` of the area's height. `detail` is shown on request, a line each."""

    area: int
    start: int
    end: int
    size: int
    label: str
    detail: tuple[str, ...] = ()


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Areas on top of each other over time, with their largest pieces told apart, the largest first.

    Time is cut into slices, each showing its highest instant, so that a peak is in the picture however short it was.
    `times` are where the slices begin, in the unit of `x`. `line` lies over the areas, such as what is reserved.
    """

    title: str
    subtitle: str
    x: Axis
    y: Axis
    times: tuple[float, ...]
    areas: tuple[Area, ...]
    stretches: tuple[Stretch, ...] = ()
    pieces: tuple[Piece, ...] = ()
    line: Area | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for area in (*self.areas, *([self.line] if self.line else [])):
            assert len(area.values) == len(self.times), f"{len(area.values)} values for {len(self.times)} slices"


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One screen: a few lines on what this is, tables, and what to do about it."""

    headline: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...] | None  # None where they were not looked for


# --- A report ---------------------------------------------------------------------------------------------------------


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


# --- Parts: what a section shows, besides tables and figures ----------------------------------------------------------


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
