"""How long forward takes and whether the clocks agree; which kernel leads; what matters besides matrix products."""

import statistics
from dataclasses import dataclass

import polars as pl

from stepscope.explain.questions.answers import (
    Answer,
    device_word,
    in_phases,
    kernel_word,
    missing,
    say_list,
    say_times,
    share_by,
    stepped,
    time_of,
)
from stepscope.explain.trace.phases import FORWARD_RANGE, number_passes
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell, Column, Table
from stepscope.units import say_count, say_share, say_time

_AGREE = 0.05  # two clocks within this say the same
_MATTERS = 0.01
_NO_FORWARD = "nothing in it is known to belong to a forward pass"
_RECORD = "stepscope profile --mode train"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseClock:
    name: str
    per_step_ns: float
    remark: str


def forward_time(profile: Profile) -> Answer:
    key, question = "forward-time", "How long does the forward pass take, and do the clocks agree?"
    kernels = in_phases(profile, "forward", "loss")
    if not kernels.height:
        return missing(key, question, _NO_FORWARD, _RECORD)
    clocks = _clocks(profile, kernels)
    by_name = {clock.name: clock.per_step_ns for clock in clocks}
    busy, span, plain = by_name["kernels"], by_name["span"], by_name.get("plain")
    sentence = (
        f"The {kernel_word(profile)}s of forward{_with_loss(kernels)} take {say_time(busy)} of {device_word(profile)} "
        f"time a step{_over_devices(profile)}, within a span of {say_time(span)}"
    )
    if plain is None:
        sentence += "; the recording holds no step times measured without the recorder"
    else:
        sentence += f"; the clock without the recorder says {say_time(plain)}, {_judge(span, plain)}"
        doubts = profile.recording.manifest.doubts
        if doubts and abs(span / plain - 1) > _AGREE:
            sentence += f"; that clock is in doubt: {say_list(doubt.text for doubt in doubts)}"
    return Answer(
        key=key,
        question=question,
        figure=say_time(busy if plain is None else plain),
        sentence=sentence + ".",
        evidence=Table(
            title="Forward, per step, by different clocks",
            columns=(
                Column(key="clock", label="clock"),
                Column(key="per_step_ms", label="per step", kind="ms"),
                Column(key="remark", label="what it is"),
            ),
            rows=tuple((clock.name, clock.per_step_ns / 1e6, clock.remark) for clock in clocks),
        ),
        command="" if plain is not None else _RECORD,
    )


def _over_devices(profile: Profile) -> str:
    return f" (over {len(profile.devices)} devices)" if len(profile.devices) > 1 else ""


def _with_loss(kernels: pl.DataFrame) -> str:
    return " (with the loss)" if (kernels["phase"] == "loss").any() else ""


def _clocks(profile: Profile, kernels: pl.DataFrame) -> list[_PhaseClock]:
    word = device_word(profile)
    spans = _spans(profile, kernels)
    clocks = [
        _PhaseClock(
            name="kernels",
            per_step_ns=time_of(kernels) / profile.num_steps,
            remark=f"durations of what ran on the {word}, added up",
        ),
        _PhaseClock(name="span", per_step_ns=statistics.median(spans), remark=f"first start to last end on the {word}"),
    ]
    ranges = profile.recording.ranges.filter(pl.col("name") == FORWARD_RANGE).sort("start_ns")
    if ranges.height:
        case = profile.recording.manifest.case
        passes = case.workload.passes if case else 1
        each = (ranges["end_ns"] - ranges["start_ns"]).to_list()
        host = [sum(each[first : first + passes]) for first in range(0, len(each), passes)]
        clocks.append(
            _PhaseClock(
                name="range", per_step_ns=statistics.median(host), remark="the host's range around forward, recorded"
            )
        )
    plain = plain_forward(profile)
    if plain:
        clock = profile.recording.steps["clock"][0]
        clocks.append(
            _PhaseClock(
                name="plain",
                per_step_ns=statistics.median(plain),
                remark=f"without the recorder, by {clock}: median of {len(plain)} steps",
            )
        )
    return clocks


def _spans(profile: Profile, kernels: pl.DataFrame) -> list[int]:
    """Of each step on each device; where a step has several passes, backward runs in between, and is left out."""
    passes = kernels.with_columns(number=number_passes(profile.recording, kernels["launch_ns"]))
    spans = passes.group_by("step", "process", "device", "number").agg(
        ns=pl.col("end_ns").max() - pl.col("start_ns").min()
    )
    return spans.group_by("step", "process", "device").agg(pl.col("ns").sum())["ns"].to_list()


def plain_forward(profile: Profile) -> list[int]:
    return profile.recording.steps.filter(pl.col("phase") == "forward")["duration_ns"].to_list()


def _judge(span: float, plain: float) -> str:
    away = span / plain - 1
    if abs(away) <= _AGREE:
        return f"which agrees with the span within {say_share(abs(away))}"
    if away > 0:
        return f"so under the recorder it takes {span / plain:.3g} times as long (the host is slower there)"
    return f"so the steps timed alone took {plain / span:.3g} times as long as those recorded"


def top_kernel(profile: Profile) -> Answer:
    key, word = "top-kernel", kernel_word(profile)
    question = f"Which {word} takes the most time in forward, how often is it called, and does it lead backward too?"
    forward = in_phases(profile, "forward")
    if not forward.height:
        return missing(key, question, _NO_FORWARD, _RECORD)
    steps = profile.num_steps
    name, time, count, share = _leader(forward)
    sentence = (
        f"`{_short(forward, name)}` leads forward: {say_times(count / steps)} a step, {say_time(time / steps)}, "
        f"{say_share(share)} of forward's {device_word(profile)} time"
    )
    both = in_phases(profile, "forward", "loss", "backward")
    scopes = [("forward", forward)]
    if both.height > forward.height and (both["phase"] == "backward").any():
        scopes += [("forward and backward", both), ("whole step", stepped(profile))]
        sentence += "; " + _others(scopes[1:], name, both=both)
    else:
        sentence += "; nothing in this recording is known to run backward"
    rows: list[tuple[Cell, ...]] = []
    for scope, kernels in scopes:
        for each in share_by(kernels, "name").head(5).iter_rows(named=True):
            short = _short(kernels, each["name"])
            rows.append(
                (scope, short, each["count"] / steps, each["time_ns"] / steps / 1e6, each["share"], each["name"])
            )
    return Answer(
        key=key,
        question=question,
        figure=f"{say_share(share)} of forward",
        sentence=sentence + ".",
        evidence=_kernel_table(f"The {word}s with the most time, per step", tuple(rows), "over"),
    )


def _leader(kernels: pl.DataFrame) -> tuple[str, int, int, float]:
    first = share_by(kernels, "name").row(0, named=True)
    return first["name"], first["time_ns"], first["count"], first["share"]


def _short(kernels: pl.DataFrame, name: str) -> str:
    return str(kernels.filter(pl.col("name") == name)["short"][0])


def _others(scopes: list[tuple[str, pl.DataFrame]], forward_name: str, *, both: pl.DataFrame) -> str:
    (name, _, _, share), whole = _leader(both), _leader(scopes[1][1])
    if name == forward_name:
        said = f"it also leads forward and backward together ({say_share(share)})"
    else:
        said = f"over forward and backward `{_short(both, name)}` leads instead ({say_share(share)})"
    same = "the same one" if whole[0] == name else f"`{_short(scopes[1][1], whole[0])}`"
    return f"{said}, and over the whole step {same} ({say_share(whole[3])})"


def _kernel_table(title: str, rows: tuple[tuple[Cell, ...], ...], scope: str) -> Table:
    return Table(
        title=title,
        columns=(
            Column(key="scope", label=scope),
            Column(key="kernel", label="name"),
            Column(key="per_step", label="calls", kind="number"),
            Column(key="per_step_ms", label="time", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="recorded_name", label="name as recorded", detail=True),
        ),
        rows=rows,
    )


def what_else_matters(profile: Profile) -> Answer:
    key, question = "besides-products", "What takes time in forward besides matrix products?"
    forward = in_phases(profile, "forward")
    if not forward.height:
        return missing(key, question, _NO_FORWARD, _RECORD)
    steps, classes = profile.num_steps, share_by(forward, "class")
    products = float(classes.filter(pl.col("class") == "GEMM")["share"].sum())
    others = classes.filter((pl.col("class") != "GEMM") & (pl.col("share") >= _MATTERS))
    named = [f"{row['class']} {say_share(row['share'])}" for row in others.iter_rows(named=True)]
    rest = forward.filter(pl.col("class") != "GEMM")
    if not others.height:
        sentence = f"Nothing else takes 1% of forward: matrix products are {say_share(products)} of it."
    else:
        name, _, count, _ = _leader(rest)
        share = time_of(rest.filter(pl.col("name") == name)) / max(1, time_of(forward))
        sentence = (
            f"Besides matrix products ({say_share(products)} of forward) there is {say_list(named)}; the largest "
            f"single one is `{_short(rest, name)}` with {say_share(share)} in {say_count(count / steps)} calls a step."
        )
    rows: list[tuple[Cell, ...]] = [
        ("class", row["class"], row["count"] / steps, row["time_ns"] / steps / 1e6, row["share"], None)
        for row in others.iter_rows(named=True)
    ]
    total = max(1, time_of(forward))
    for row in share_by(rest, "name", "short").iter_rows(named=True):
        share = row["time_ns"] / total
        if share >= _MATTERS:
            rows.append(
                ("kernel", row["short"], row["count"] / steps, row["time_ns"] / steps / 1e6, share, row["name"])
            )
    table = _kernel_table("What is not a matrix product and takes 1% of forward or more, per step", tuple(rows), "")
    hidden = [kind for kind in ("attention", "convolution") if kind in others["class"].to_list()]
    notes = [f"{kind}: its kernels hold matrix products of their own, which a name cannot separate" for kind in hidden]
    return Answer(
        key=key,
        question=question,
        figure=say_share(1 - products),
        sentence=sentence,
        evidence=Table(title=table.title, columns=table.columns, rows=table.rows, notes=tuple(notes)),
    )
