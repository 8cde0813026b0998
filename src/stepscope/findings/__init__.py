"""The results of an analysis: findings, tables, figures and reports, independent of how they are rendered.

This is the interface between the packages that compute (`explain`) and those that draw (`render`). A `Table` keeps raw
values with their unit. Formatting, rounding and colors belong to the renderer, so CSV and JSON have full precision
while the terminal shows three digits. `None` is a missing value: a case that ran out of memory has no step time.

A `Report` describes one run or compares several, from the headline to the command that reproduces it. `explain.story`
creates it, `render.site` turns it into a page, and `render.export` into files for a paper. A report has raw values with
their kind, and text that may come from any file: renderers format and escape it. It names no colors, pixel sizes or
tags.

Parts that show one run or two have `runs` (`("",)` for one, `("A", "B")` for two), and one value per run in that order.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend

Cell = str | int | float | None
# The kind of a number, from which the renderer derives digits and units. `share` is a fraction shown in percent,
# `ratio` a factor shown as 1.23×, `count` an integer with thousands separators, `ms` milliseconds.
Quantity = Literal["text", "ms", "us", "bytes", "count", "number", "share", "ratio"]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column. `key` is its stable name in CSV and JSON; `label` is its heading."""

    key: str
    label: str
    kind: Quantity = "text"
    # CSV and JSON always have the detail columns; text, Markdown and LaTeX only with `--detail`.
    detail: bool = False


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of raw values under typed columns, with a title above and notes below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    # Keys of columns with unreliable cells, each with the key of the column that says why: a cell whose reason is not
    # empty is shown with a question mark.
    doubted_by: dict[str, str] = msgspec.field(default_factory=dict)
    # Keys of columns whose values readers compare along a row: they have the same number of decimals.
    compared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        assert len(set(keys)) == len(keys), f"duplicate columns: {keys}"
        named = {*self.doubted_by, *self.doubted_by.values(), *self.compared}
        assert named <= set(keys), f"unknown columns: {named - set(keys)}"
        for row in self.rows:
            assert len(row) == len(self.columns), f"{len(row)} cells for {len(self.columns)} columns"


_SHIFTED = 1.2


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that costs time: what is wrong, the evidence, and what to do. `stepscope rule CODE` explains the code,
    which is stable.

    `action` is an imperative sentence ("Use `fused=True`") and `fix` the code or command that applies it. A finding
    without a fix is a remark: it is listed after the findings that can be fixed by pasting something.

    `saving_ns` is how much shorter one step would be with this fix alone, None without an estimate. Savings overlap and
    do not add up: `joint_ns` is what the fix adds to the saving of all fixes together (`joint_saving`). `also` has
    findings about the same time: the fix covers them too, or theirs would save the same time.
    """

    code: str
    title: str
    evidence: str
    fix: str = ""
    saving_ns: int | None = None
    share: float | None = None  # saving_ns as a share of the step
    action: str = ""
    joint_ns: int | None = None
    joint_share: float | None = None  # joint_ns as a share of the step
    about: float | None = None  # the share of the step that the finding is about, saved or not
    also: "tuple[Finding, ...]" = ()
    is_measured: bool = False  # saving_ns was measured with the fix, not estimated
    unit: Literal["step", "trace"] = "step"  # what savings and shares refer to: the trace, if it has no marked steps
    # Out of memory: what the fix saves of it, and whether that alone is enough. None without an estimate.
    saving_bytes: int | None = None
    is_enough: bool | None = None

    @property
    def is_remark(self) -> bool:
        return not self.fix

    @property
    def saving_ms(self) -> float | None:
        return None if self.saving_ns is None else self.saving_ns / 1e6

    @property
    def say_after(self) -> str:
        """What follows `joint_ns`. A fix can save more after others than alone: once the GPU has less to do, a step may
        wait for the launches that the fix removes."""
        shifts = (self.joint_ns or 0) > _SHIFTED * (self.saving_ns or 0)
        return "once the fixes above are in" + (", which shift the bottleneck" if shifts else "")


class JointSaving(NamedTuple):
    """How much shorter one step would be with the fixes of all findings."""

    saving_ns: int
    share: float  # of the step
    overlaps: bool  # whether the findings save more one by one than together


_ADDS_UP = 1.02  # savings that are this close to their sum add up


def joint_saving(findings: Iterable[Finding]) -> JointSaving | None:
    """Return the joint saving of all findings, None if none has an estimate."""
    parts = [one for one in findings if one.joint_ns is not None]
    if not parts:
        return None
    joint_ns = sum(one.joint_ns or 0 for one in parts)
    alone_ns = sum(one.saving_ns or 0 for one in parts)
    share = min(1.0, sum(one.joint_share or 0.0 for one in parts))
    return JointSaving(joint_ns, share, overlaps=alone_ns > _ADDS_UP * joint_ns)


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    unit: str = ""
    log: bool = False


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One point of a figure. `low` and `high` are its spread, drawn as a band or bar."""

    panel: str
    series: str
    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A line chart with panels side by side."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    series: tuple[str, ...] = ()  # their order in the legend; others follow in the order of the points
    series_label: str = ""
    panel_label: str = ""


class Area(msgspec.Struct, frozen=True, kw_only=True):
    """One band of a timeline: its height in every slice."""

    name: str
    values: tuple[int, ...]


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """A named part of a timeline, such as a phase, from slice `start` to slice `end` (exclusive)."""

    label: str
    start: int
    end: int


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an area that is shown separately: in slices `start` to `end` (exclusive) it takes `size` of the area's
    height. `detail` has lines that are shown on request."""

    area: int
    start: int
    end: int
    size: int
    label: str
    detail: tuple[str, ...] = ()


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Stacked areas over time, with their largest pieces shown separately, the largest first.

    Time is cut into slices, and each shows its maximum, so even a short peak is visible. `times` are the starts of the
    slices, in the unit of `x`. `line` is drawn over the areas, such as reserved memory.
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
    """One screen: a headline, tables and findings."""

    headline: str
    tables: tuple[Table, ...]
    findings: tuple[Finding, ...] | None  # None if no rules ran


# --- A report ---------------------------------------------------------------------------------------------------------


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One of the numbers at the top. In a comparison `before` is A's value and `value` is B's. Their ratio is
    meaningful only if `is_comparable`: not for shares of two different peaks, or for sizes measured in different
    ways."""

    key: str  # stable: step, memory, mfu, bound, busy, tokens
    label: str
    value: Cell
    kind: Quantity = "text"
    note: str = ""
    before: Cell = None
    is_comparable: bool = True


class Copyable(msgspec.Struct, frozen=True, kw_only=True):
    """A command or code to copy verbatim."""

    label: str
    text: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A finding with its fixes to copy; a remark has commands that tell more."""

    finding: Finding
    fixes: tuple[Copyable, ...] = ()


class MemoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """A change that needs less memory, or the largest batch that fits, with the command that runs it. `saving_bytes` is
    None if it saves none. `adds_ns` is what it adds to the step, negative if it shortens it, None if that is unknown or
    not its purpose; `finding` is the title of the finding that has this time."""

    title: str
    command: str
    saving_bytes: int | None = None
    adds_ns: int | None = None
    is_measured: bool = False  # both were measured with the change, not predicted
    finding: str = ""
    note: str = ""


class MemoryCard(msgspec.Struct, frozen=True, kw_only=True):
    """What `stepscope plan` predicts for a run. `sentences` compare it with what was measured. The lines that matter
    most come first; `command` searches further."""

    sentences: tuple[str, ...]
    lines: tuple[MemoryLine, ...]
    command: str
    notes: tuple[str, ...] = ()


class Soundness(msgspec.Struct, frozen=True, kw_only=True):
    """The measurement quality: a verdict in one sentence, and the details behind it."""

    verdict: Literal["sound", "doubtful", "unknown"]
    sentence: str
    details: tuple[str, ...] = ()


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was not measured: what, why, and the command that measures it."""

    what: str
    why: str
    command: str = ""


class StageText(NamedTuple):
    """What a stage of a report produces, and what it adds to the page."""

    makes: str
    shows: str


# The stages of a report, in running order.
STAGES: dict[str, StageText] = {
    "bench": StageText("step times", "step times"),
    "profile": StageText("recording of a step", "kernels of a step"),
    "memory": StageText("memory snapshot", "memory over time"),
    "precision": StageText("comparison of precisions", "low-precision dtypes and errors"),
    "attention": StageText("comparison of attention implementations", "attention implementations"),
    "plan": StageText("predictions of other settings", "advice on memory"),
}
# Those that run only on request, after the others.
STAGES_ON_REQUEST: dict[str, StageText] = {
    "optimise": StageText("optimized step", "changes that make the step faster"),
}


# --- Parts of a section, in addition to tables and figures ----------------------------------------------------------


class Dimension(msgspec.Struct, frozen=True, kw_only=True):
    """One way to break down time. `details` are shown on request: one text per value, or none."""

    key: str  # class, phase, module, op, kernel
    label: str
    values: tuple[str, ...]
    details: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.details or len(self.details) == len(self.values), "one detail per value, or none"


class ModuleTree(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of a breakdown as a tree in which the same module of alike layers is one node. Nodes are in the order
    of the model, each after its parent; labels and singles are indices into `names`."""

    names: tuple[str, ...]
    parents: tuple[int, ...]  # of the nodes, -1 at the top
    labels: tuple[int, ...]  # of the nodes: `blocks.*`, `attention`
    copies: tuple[int, ...]  # how many modules each node is
    nodes: tuple[int, ...]  # of the modules, in the order of their dimension
    singles: tuple[tuple[int, ...], ...]  # of the modules, one per level from the top: `blocks.3`, `attention`

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.labels) == len(self.copies), "columns of equal length"
        assert all(parent < at for at, parent in enumerate(self.parents)), "parents come first"
        assert len(self.nodes) == len(self.singles), "a node and its names per module"


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel time of a step, broken down along several dimensions at once: choosing a value of one filters the
    others.

    A row is all kernels that agree in every dimension: `places` has the index of its value in each. All times are per
    step. `walls_ns` and `idles_ns` are the wall time and idle time of a step. `sources` has the line of code of each
    row, an index into `lines`, -1 if it is unknown.
    """

    title: str
    runs: tuple[str, ...]
    dimensions: tuple[Dimension, ...]
    places: tuple[tuple[int, ...], ...]  # one tuple per row
    times_ns: tuple[tuple[float, ...], ...]  # one tuple per run, with one number per row
    counts: tuple[tuple[float, ...], ...]
    shortest_ns: tuple[tuple[float | None, ...], ...]  # None if the run has no such kernel
    longest_ns: tuple[tuple[float | None, ...], ...]
    walls_ns: tuple[float, ...]
    idles_ns: tuple[float, ...]
    what: str = "kernels"  # operators, on a CPU
    unit: Literal["step", "trace"] = "step"  # the trace, if no run has marked steps
    num_devices: int = 1  # kernel times are sums over them, `walls_ns` and `idles_ns` are means
    tree: ModuleTree | None = None  # None without modules
    lines: tuple[str, ...] = ()
    sources: tuple[int, ...] = ()  # empty if no line is known
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.sources) in (0, len(self.places)), "a line per row, or none"
        assert all(len(row) == len(self.dimensions) for row in self.places), "one index per dimension"
        for columns in (self.times_ns, self.counts, self.shortest_ns, self.longest_ns):
            assert len(columns) == len(self.runs), "one column per run"
            assert all(len(column) == len(self.places) for column in columns), "one number per row"


class Spans(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of time on one track, in order, as columns. `names`, `groups` and `origins` are indices into those of the
    `Lanes`, -1 for an unknown origin; `counts` is the number of kernels in a span, more than one if they are too many
    to draw separately."""

    starts_ns: tuple[int, ...]
    lengths_ns: tuple[int, ...]
    names: tuple[int, ...]
    groups: tuple[int, ...]
    counts: tuple[int, ...]
    origins: tuple[int, ...] = ()  # empty if none is known

    def __post_init__(self) -> None:
        columns = (self.starts_ns, self.lengths_ns, self.names, self.groups, self.counts)
        assert len({len(column) for column in columns}) == 1, "columns of equal length"
        assert len(self.origins) in (0, len(self.names)), "an origin per span, or none"


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a step's timeline. Spans of one track do not overlap. A timeline of ranks has one track per rank."""

    label: str
    kind: Literal["phase", "layer", "module", "stream", "host", "rank"]
    spans: Spans


class Lanes(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one step, starting at 0: phases, layers and modules above the kernels on each stream.

    `details` are shown on request: one text per name, or none. `groups` decide the color: phases on the track of
    phases, classes on streams; the empty group is for spans without one. `origins` say what launched a kernel: the
    operator with its shapes, its module and its line of code, each an index into `lines`.
    """

    title: str
    unit: Literal["step", "trace"] = "step"
    span_ns: int
    tracks: tuple[Track, ...]
    names: tuple[str, ...]
    details: tuple[str, ...] = ()
    groups: tuple[str, ...]
    origins: tuple[tuple[int, ...], ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert not self.details or len(self.details) == len(self.names), "one detail per name, or none"


class StepPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a step: the time of each kernel class, the longest first, and the idle time. All times are per step,
    and overlapping kernels count once."""

    name: str  # empty if the phases are unknown
    classes: tuple[str, ...]
    times_ns: tuple[float, ...]
    idle_ns: float

    def __post_init__(self) -> None:
        assert len(self.times_ns) == len(self.classes), "one time per class"

    @property
    def busy_ns(self) -> float:
        return sum(self.times_ns)


class StepBar(msgspec.Struct, frozen=True, kw_only=True):
    """The step of one run: its phases in order, which add up to `busy_ns` and `step_ns`."""

    step_ns: float
    busy_ns: float
    phases: tuple[StepPhase, ...]
    is_step: bool = True  # a whole trace if it marks no steps
    device: str = "GPU"


class StepPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A step as one bar to scale, or two below each other; None if a run has no profile."""

    title: str
    runs: tuple[str, ...]
    bars: tuple[StepBar | None, ...]
    notes: tuple[str, ...] = ()


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """A peak of the device in one precision."""

    label: str
    flops_per_s: float


class RoofPoint(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with one shape. `reached` is the share of the speed that the device allows. An operator
    that only moves memory has no FLOPs: its `intensity` and `flops_per_s` are 0."""

    label: str
    group: str  # its class
    intensity: float  # FLOP per byte
    flops_per_s: float
    bytes_per_s: float = 0.0
    time_ms: float  # per step
    share: float  # of total kernel time
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
    unit: Literal["step", "trace"] = "step"  # the trace, if no run has marked steps
    notes: tuple[str, ...] = ()


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Bars, one per label and series, stacked if `is_stacked`."""

    title: str
    kind: Quantity
    labels: tuple[str, ...]
    series: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]  # one tuple per series, with one number per label
    is_stacked: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.values) == len(self.series), "one column per series"
        assert all(len(column) == len(self.labels) for column in self.values), "one number per label"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """If not `is_answered`, `answer` gives the reason and `command` makes the recording that can answer it."""

    question: str
    figure: str
    answer: str
    evidence: Table | None = None
    command: str = ""
    is_answered: bool = True


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    questions: tuple[Question, ...]


class SideBySide(msgspec.Struct, frozen=True, kw_only=True):
    """The same part of each run, side by side if there is room. None if a run does not have it."""

    title: str
    runs: tuple[str, ...]
    parts: "tuple[Part | None, ...]"


OfSeveral = AlignedSteps | AlignedMemory | Trend
Part = (
    Table | Figure | Timeline | Breakdown | Lanes | StepPicture | Roofline | Bars | Questions | SideBySide | OfSeveral
)


class Exhibit(msgspec.Struct, frozen=True, kw_only=True):
    """A part with a stable key of letters, digits and hyphens: its anchor on the page and its file name."""

    key: str
    part: Part


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """`lead` summarizes the section in one or two sentences."""

    key: str
    title: str
    lead: str = ""
    exhibits: tuple[Exhibit, ...] = ()
    missing: tuple[Missing, ...] = ()


CHANGES = "changes"  # the key of the section of a comparison that comes before the findings


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` is the run in one sentence. `advice` has the findings, what matters most first, then remarks.
    `commands` reproduce the report."""

    title: str
    subtitle: str
    runs: tuple[str, ...] = ("",)
    sentence: str
    facts: tuple[Fact, ...]
    picture: StepPicture | None = None  # None without a profile
    advice: tuple[Advice, ...] | None  # None if no rules ran
    memory_card: MemoryCard | None = None  # None without predictions
    soundness: Soundness
    sections: tuple[Section, ...]
    commands: tuple[Copyable, ...] = ()
    version: str = ""  # of stepscope
    is_partial: bool = False  # interrupted, or still being made
