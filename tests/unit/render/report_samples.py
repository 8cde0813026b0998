"""Whole reports of invented runs: what pages and exports are tried on.

`one_run`, `two_runs`, `many_runs`, `partial`, `empty`, `huge` (many kernels, many rows) and `hostile`, in which every
text was written by somebody who wants out of the page.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import msgspec

from stepscope.findings import (
    Axis,
    Bars,
    Column,
    Copyable,
    Exhibit,
    Fact,
    Missing,
    Part,
    Questions,
    Report,
    Section,
    SideBySide,
    Soundness,
    StepBar,
    StepPicture,
    Table,
    Timeline,
)
from stepscope.findings.compared import AlignedMemory, AlignedSteps, Trend
from tests.unit.render.comparison_samples import aligned_memory, aligned_steps, trend_of_cases, trend_of_steps
from tests.unit.render.report_parts import (
    COMMAND,
    WALL_NS,
    Kernel,
    advise,
    ask,
    break_down,
    categories_table,
    draw_attention,
    draw_roofline,
    kernels_of_step,
    lay_lanes,
    picture_steps,
)
from tests.unit.render.timelines import training_step

# What ends a script or an attribute, runs in a picture's place, turns the line around, cannot be seen, and is endless.
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '"><img src=x onerror="window.hacked=1">',
    "' onclick='window.hacked=1' x='",
    "<!-- &lt;b&gt; ${window.hacked=1} {{hacked}} -->",
    "\u202egnp.exe\u2066\x00\x1b[31m\u200b",
    "javascript:window.hacked=1",
    "A" * 1_000_000,
    "/home/eve/secret/model.py",
)


def tell_facts(before: bool = False) -> tuple[Fact, ...]:
    facts = (
        Fact(key="step", label="step", value=60.91, kind="ms", note="p20 to p80: 57.0 to 66.4", before=141.6),
        Fact(key="memory", label="peak memory", value=int(4.83 * 2**30), kind="bytes", before=int(9.1 * 2**30)),
        Fact(key="mfu", label="MFU", value=0.0631, kind="share", note="of 989 TFLOP/s, bf16", before=0.0214),
        Fact(key="busy", label="GPU busy", value=0.206, kind="share", before=0.64),
        Fact(key="tokens", label="tokens a second", value=33_624.0, kind="count", before=14_463.0),
        Fact(key="bound", label="bound by", value="the host", before="the GPU"),
    )
    return facts if before else tuple(msgspec.structs.replace(fact, before=None) for fact in facts)


def one_run() -> Report:
    """A training step on one GPU with everything but precision."""
    kernels = kernels_of_step()
    return Report(
        title="small, training, bf16",
        subtitle="GPT with 12 layers, batch 4, context 512, AdamW on NVIDIA H200",
        sentence="A step takes 60.9 ms and 4.83 GiB; the GPU is idle 79% of it, waiting for the host, and MFU is 6.3%.",
        facts=tell_facts(),
        picture=picture_steps([kernels], [WALL_NS]),
        advice=advise(),
        soundness=Soundness(
            verdict="doubtful",
            sentence="The steps spread over 18% of the median.",
            details=("20 steps after 5 to warm up.", "The GPU was done 51 µs after the last kernel was issued."),
        ),
        sections=tuple(_sections(kernels)),
        commands=(
            Copyable(label="this report", text=COMMAND),
            Copyable(label="as JSON", text=f"{COMMAND} --format json"),
        ),
        version="0.1.0",
    )


def _sections(kernels: Sequence[Kernel]) -> Iterable[Section]:
    yield _section("timeline", "Timeline", Exhibit(key="step-timeline", part=lay_lanes(kernels)))
    yield _section("time", "Time", Exhibit(key="breakdown", part=break_down([kernels], [WALL_NS])))
    yield _section("roofline", "Roofline", Exhibit(key="roofline", part=draw_roofline()))
    yield _section(
        "memory",
        "Memory",
        Exhibit(key="memory-timeline", part=training_step(400)),
        Exhibit(key="memory-categories", part=categories_table()),
        Exhibit(key="memory-largest", part=msgspec.structs.replace(categories_table(60), title="Largest tensors")),
    )
    why = "the stage was not run"
    absent = Missing(what="precision", why=why, command="stepscope precision --size small")
    yield Section(key="precision", title="Precision", lead="How far bf16 is from float64.", missing=(absent,))
    yield _section("attention", "Attention", Exhibit(key="attention", part=draw_attention()))
    bars = Bars(
        title="Communication a rank",
        kind="ms",
        labels=("rank 0", "rank 1"),
        series=("hidden", "exposed"),
        values=((3.1, 2.9), (0.8, None)),
        is_stacked=True,
        notes=("Exposed is what the step waited for.",),
    )
    yield _section("ranks", "Ranks", Exhibit(key="ranks", part=bars))
    yield _section("questions", "Questions", Exhibit(key="questions", part=ask()))
    versions = (("GPU", "NVIDIA H200"), ("driver", "570.86"), ("torch", "2.11.0"), ("python", "3.11.9"))
    columns = (Column(key="what", label="what"), Column(key="value", label="value"))
    table = Table(title="Versions", columns=columns, rows=versions)
    yield _section("environment", "Environment", Exhibit(key="versions", part=table))


def _section(key: str, title: str, *exhibits: Exhibit) -> Section:
    lead = f"{title} of the step, in a sentence or two: what stands out, and what it is a share of."
    return Section(key=key, title=title, lead=lead, exhibits=exhibits)


def two_runs() -> Report:
    """A against B: B is compiled, so its kernels are fewer and some are new."""
    before = kernels_of_step()
    after = [
        replace(kernel, name=f"fused {kernel.kind} (triton)", count=1)
        if kernel.kind in ("elementwise", "copy")
        else kernel
        for kernel in before
    ]
    runs = ("A", "B")
    changes = Bars(
        title="The step by class",
        kind="ms",
        labels=("GEMM", "elementwise", "copy"),
        series=runs,
        values=((2.9, 1.4, 0.7), (2.9, 0.5, 0.1)),
    )
    lanes = SideBySide(title="One step as it ran", runs=runs, parts=(lay_lanes(before), lay_lanes(after)))
    memory = SideBySide(title="Memory", runs=runs, parts=(training_step(300), None))
    tables = SideBySide(title="Categories", runs=runs, parts=(categories_table(), categories_table(4)))
    asked = ask()
    both = SideBySide(
        title="Questions", runs=runs, parts=(asked, msgspec.structs.replace(asked, questions=asked.questions[:2]))
    )
    sections = (
        _section(
            "changes",
            "What changed",
            Exhibit(key="changes-steps", part=aligned_steps()),
            Exhibit(key="changes", part=changes),
            Exhibit(key="changes-memory", part=aligned_memory()),
        ),
        _section("timeline", "Timeline", Exhibit(key="step-timeline", part=lanes)),
        _section("time", "Time", Exhibit(key="breakdown", part=break_down([before, after], [141.6e6, WALL_NS]))),
        _section("roofline", "Roofline", Exhibit(key="roofline", part=draw_roofline(runs))),
        _section("memory", "Memory", Exhibit(key="memory", part=memory), Exhibit(key="categories", part=tables)),
        _section("questions", "Questions", Exhibit(key="questions", part=both)),
    )
    return msgspec.structs.replace(
        one_run(),
        title="small eager against compiled",
        runs=runs,
        sentence="B takes 60.9 ms, 2.3× less than A: 1,900 kernels fewer, and half the memory.",
        facts=tell_facts(before=True),
        picture=picture_steps([before, after], [141.6e6, WALL_NS]),
        sections=sections,
    )


def many_runs() -> Report:
    """Five runs compared with the first."""
    trends = (trend_of_steps(), trend_of_cases())
    exhibits = tuple(Exhibit(key=f"trend-{number}", part=trend) for number, trend in enumerate(trends))
    return msgspec.structs.replace(
        one_run(),
        title="small: 5 runs",
        runs=trends[0].runs,
        sentence="5 runs: the fourth one is the fastest, 48.0 ms per step.",
        picture=None,
        advice=None,
        sections=(_section("runs", "Runs compared", *exhibits),),
    )


def partial() -> Report:
    report = one_run()
    why = Missing(what="Memory", why="The report was interrupted before this stage.", command="stepscope memory")
    kept = [section for section in report.sections if section.key in ("timeline", "time")]
    absent = Section(key="memory", title="Memory", missing=(why,))
    return msgspec.structs.replace(report, is_partial=True, advice=None, sections=(*kept, absent))


def empty() -> Report:
    """Nothing was measured: every kind of part is there, and empty."""
    parts: tuple[Part, ...] = (
        lay_lanes([]),
        break_down([[]], [0.0]),
        msgspec.structs.replace(draw_roofline(), points=(), roofs=()),
        msgspec.structs.replace(draw_attention(), points=()),
        Bars(title="Bars", kind="ms", labels=(), series=(), values=()),
        msgspec.structs.replace(categories_table(), rows=()),
        Questions(title="Questions", questions=()),
        Timeline(title="", subtitle="", x=Axis(label=""), y=Axis(label=""), times=(), areas=()),
        AlignedSteps(title="", runs=("A", "B"), places=()),
        AlignedMemory(title="", runs=("A", "B"), categories=(), stretches=(), heights=((), ())),
        Trend(title="", label="", kind="ms", runs=(), lines=(), baseline=0),
    )
    exhibits = tuple(Exhibit(key=f"part-{number}", part=part) for number, part in enumerate(parts))
    return Report(
        title="",
        subtitle="",
        sentence="",
        facts=(),
        picture=StepPicture(title="", runs=("A", "B"), bars=(StepBar(step_ns=0.0, busy_ns=0.0, phases=()), None)),
        advice=(),
        soundness=Soundness(verdict="unknown", sentence=""),
        sections=(Section(key="parts", title="Parts", exhibits=exhibits), Section(key="bare", title="Bare")),
    )


def huge() -> Report:
    """Thousands of kernels in a breakdown and a table of thousands of rows."""
    kernels = [
        replace(kernel, name=f"{kernel.name} variant {number}", length_ns=kernel.length_ns + 13 * number)
        for number in range(40)
        for kernel in kernels_of_step()
    ]
    time = Exhibit(key="breakdown", part=break_down([kernels], [9e9]))
    table = Exhibit(key="memory-largest", part=msgspec.structs.replace(categories_table(3000), title="Largest tensors"))
    sections = (_section("time", "Time", time), _section("memory", "Memory", table))
    return msgspec.structs.replace(one_run(), sections=sections)


def hostile() -> Report:
    """`one_run`, `two_runs` and `many_runs` with every text replaced, except keys, units and kinds."""
    one = one_run()
    sections = one.sections + tuple(
        msgspec.structs.replace(
            section,
            key=f"{section.key}-of-others",
            exhibits=tuple(Exhibit(key=f"{e.key}-of-others", part=e.part) for e in section.exhibits),
        )
        for other in (two_runs(), many_runs())
        for section in other.sections
    )
    report = msgspec.structs.replace(one, sections=sections, is_partial=True)
    spoilt = _spoil(report, cycle(HOSTILE))
    assert isinstance(spoilt, Report)
    return spoilt


def _spoil(value: Any, names: Iterator[str]) -> Any:
    """Return the same with every text replaced, except fixed choices."""
    if isinstance(value, str):
        return next(names)
    if isinstance(value, tuple):
        return tuple(_spoil(item, names) for item in value)
    if isinstance(value, msgspec.Struct):
        kept = ("key", "kind", "verdict", "unit", "runs") if not isinstance(value, Report) else ("runs",)
        fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in kept}
        return msgspec.structs.replace(value, **{name: _spoil(field, names) for name, field in fields.items()})
    return value
