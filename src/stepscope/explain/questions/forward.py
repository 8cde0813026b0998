"""How long forward takes, which kernel takes the most time, and what takes time besides GEMMs."""

import statistics
from dataclasses import dataclass

import polars as pl

from stepscope.explain.questions.answers import (
    Answer,
    in_phases,
    missing,
    share_by,
    time_of,
    why_unknown,
)
from stepscope.explain.trace.attribution.phases import FORWARD_RANGE
from stepscope.explain.trace.profile import Profile, device_word, kernel_word
from stepscope.findings import Cell, Column, Table
from stepscope.units import count_noun, say_factor, say_list, say_share, say_time

_AGREE = 0.05  # largest difference between clocks that agree
_MATTERS = 0.01
_RECORD = "stepscope profile --mode train"
_RECORD_FORWARD = "stepscope profile --mode inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PhaseClock:
    name: str
    per_step_ns: float
    remark: str


def forward_time(profile: Profile) -> Answer:
    key, question = "forward-time", "How long does the forward pass take?"
    kernels = in_phases(profile, "forward", "loss")
    if reason := why_unknown(profile, "forward", "loss"):
        return missing(key, question, reason, _RECORD)
    spans = _spans(profile)
    clocks = _clocks(profile, kernels, spans["ns"].to_list())
    by_name = {clock.name: clock.per_step_ns for clock in clocks}
    busy, span, plain = by_name["kernels"], by_name["span"], by_name.get("plain")
    sentence = (
        f"{say_time(busy)} of {kernel_word(profile)} time {profile.clock.say_per_step}{_over_devices(profile)}"
        f"{_with_loss(kernels)}, {say_time(span)} from the first {kernel_word(profile)} to the last"
        f"{' of each pass' if (spans['passes'] > 1).any() else ''}"
    )
    if plain is None:
        sentence += "; the recording has no unprofiled times of this pass"
    elif profile.clock.kind == "unprofiled":
        sentence += f". Unprofiled, it takes {say_time(plain)} with its idle time, {_judge(span, plain)}"
        doubts = profile.recording.manifest.doubts
        if doubts and abs(span / plain - 1) > _AGREE:
            sentence += f". The unprofiled time is unreliable: {say_list(doubt.text for doubt in doubts)}"
    return Answer(
        key=key,
        question=question,
        figure=say_time(busy),
        sentence=sentence + ".",
        evidence=Table(
            title=f"Forward pass {profile.clock.say_per_step}, by clock",
            columns=(
                Column(key="clock", label="clock"),
                Column(key="per_step_ms", label="time", kind="ms"),
                Column(key="remark", label="meaning"),
            ),
            rows=tuple((clock.name, clock.per_step_ns / 1e6, clock.remark) for clock in clocks),
        ),
        command="" if plain is not None else _RECORD if _is_training(profile) else _RECORD_FORWARD,
    )


def _is_training(profile: Profile) -> bool:
    return bool(profile.kernels["phase"].is_in(["backward", "optimizer"]).any())


def _over_devices(profile: Profile) -> str:
    return f" (sum over {len(profile.devices)} devices)" if len(profile.devices) > 1 else ""


def _with_loss(kernels: pl.DataFrame) -> str:
    return ", loss included" if (kernels["phase"] == "loss").any() else ""


def _clocks(profile: Profile, kernels: pl.DataFrame, spans: list[int]) -> list[_PhaseClock]:
    word = device_word(profile)
    clocks = [
        _PhaseClock(
            name="kernels",
            per_step_ns=time_of(kernels) / profile.num_steps,
            remark=f"sum of the durations on the {word}",
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
                name="range", per_step_ns=statistics.median(host), remark="CPU range around forward, while profiling"
            )
        )
    plain = plain_forward(profile)
    if plain:
        clock = profile.recording.steps["clock"][0]
        clocks.append(
            _PhaseClock(
                name="plain",
                per_step_ns=statistics.median(plain),
                remark=f"unprofiled, by {clock}: median of {count_noun(len(plain), 'step')}",
            )
        )
    return clocks


def _spans(profile: Profile) -> pl.DataFrame:
    """The span of forward (`ns`) and the number of its `passes`, for each step and device. The span is the sum over
    passes, without what runs between them. A pass ends where a kernel of backward or of the optimizer is launched: the
    next micro-batch, or the next step where steps are not marked, begins another."""
    device = ("process", "device")
    # Kernels launched before the recording run while the CPU already launches the next pass.
    ends_pass = (
        pl.col("phase").is_in(["backward", "optimizer"]).fill_null(value=False) & pl.col("launch_ns").is_not_null()
    )
    launched = profile.kernels.sort(pl.coalesce("launch_ns", "start_ns"), maintain_order=True)
    numbered = launched.with_columns(number=ends_pass.cum_sum().over(device))
    kernels = numbered.filter(pl.col("phase").is_in(["forward", "loss"]))
    marked = kernels.filter(pl.col("step").is_not_null())
    passes = (marked if marked.height else kernels).group_by("step", *device, "number")
    spans = passes.agg(ns=pl.col("end_ns").max() - pl.col("start_ns").min())
    return spans.group_by("step", *device).agg(pl.col("ns").sum(), passes=pl.len())


def plain_forward(profile: Profile) -> list[int]:
    return profile.recording.steps.filter(pl.col("phase") == "forward")["duration_ns"].to_list()


def _judge(span: float, plain: float) -> str:
    away = span / plain - 1
    if abs(away) <= _AGREE:
        return f"which agrees with the profiled span within {say_share(abs(away))}"
    if away > 0:
        return f"and the profiled span is {say_factor(span / plain)} as long, because profiling slows the CPU"
    return f"{say_factor(plain / span)} as long as the profiled span"


def top_kernel(profile: Profile) -> Answer:
    key, word = "top-kernel", kernel_word(profile)
    question = f"Which {word} takes the most time?"
    forward = in_phases(profile, "forward")
    if reason := why_unknown(profile, "forward"):
        return missing(key, question, reason, _RECORD)
    steps, per_step = profile.num_steps, profile.clock.say_per_step
    name, time, count, share = _leader(forward)
    sentence = (
        f"`{_short(forward, name)}` in forward: {count_noun(count / steps, 'call')} {per_step}, "
        f"{say_time(time / steps)}, {say_share(share)} of forward's {device_word(profile)} time"
    )
    both = in_phases(profile, "forward", "loss", "backward")
    scopes = [("forward", forward)]
    if both.height > forward.height and (both["phase"] == "backward").any():
        scopes += [
            ("forward and backward", both),
            (f"whole {'step' if profile.has_steps else 'trace'}", profile.kernels),
        ]
        sentence += "; " + _others(scopes[1:], name, both=both)
    else:
        sentence += "; this recording has no backward pass"
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
        figure=_short(forward, name),
        sentence=sentence + ".",
        evidence=_kernel_table(f"{word.capitalize()}s that take the most time, {per_step}", tuple(rows), "in"),
    )


def _leader(kernels: pl.DataFrame) -> tuple[str, int, int, float]:
    first = share_by(kernels, "name").row(0, named=True)
    return first["name"], first["time_ns"], first["count"], first["share"]


def _short(kernels: pl.DataFrame, name: str) -> str:
    return str(kernels.filter(pl.col("name") == name)["short"][0])


def _others(scopes: list[tuple[str, pl.DataFrame]], forward_name: str, *, both: pl.DataFrame) -> str:
    (name, _, _, share), whole = _leader(both), _leader(scopes[1][1])
    if name == forward_name:
        said = f"also in forward and backward together ({say_share(share)})"
    else:
        said = f"in forward and backward together it is `{_short(both, name)}` ({say_share(share)})"
    if whole[0] == name:
        return f"{said} and in the {scopes[1][0]} ({say_share(whole[3])})"
    return f"{said}, and in the {scopes[1][0]} it is `{_short(scopes[1][1], whole[0])}` ({say_share(whole[3])})"


def _kernel_table(title: str, rows: tuple[tuple[Cell, ...], ...], scope: str) -> Table:
    return Table(
        title=title,
        columns=(
            Column(key="scope", label=scope),
            Column(key="kernel", label="name"),
            Column(key="per_step", label="calls", kind="number"),
            Column(key="per_step_ms", label="time", kind="ms"),
            Column(key="share", label="share", kind="share"),
            Column(key="recorded_name", label="recorded name", detail=True),
        ),
        rows=rows,
    )


def what_else_matters(profile: Profile) -> Answer:
    key, question = "besides-products", "What takes time in forward besides GEMMs?"
    forward = in_phases(profile, "forward")
    if reason := why_unknown(profile, "forward"):
        return missing(key, question, reason, _RECORD)
    steps, classes = profile.num_steps, share_by(forward, "class")
    products = float(classes.filter(pl.col("class") == "GEMM")["share"].sum())
    others = classes.filter((pl.col("class") != "GEMM") & (pl.col("share") >= _MATTERS))
    named = [f"{row['class']} {say_share(row['share'])}" for row in others.iter_rows(named=True)]
    rest = forward.filter(pl.col("class") != "GEMM")
    if not others.height:
        sentence = f"Nothing else takes 1% of forward; GEMMs take {say_share(products)}."
    else:
        name, _, count, _ = _leader(rest)
        share = time_of(rest.filter(pl.col("name") == name)) / max(1, time_of(forward))
        named[0] = named[0][0].upper() + named[0][1:]
        calls = f"{count_noun(count / steps, 'call')} {profile.clock.say_per_step}"
        sentence = (
            f"{say_list(named)}; GEMMs take {say_share(products)}. The largest other {kernel_word(profile)} is "
            f"`{_short(rest, name)}`: {say_share(share)}, {calls}."
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
    title = f"Non-GEMM time in forward, {profile.clock.say_per_step} (at least 1% of forward)"
    table = _kernel_table(title, tuple(rows), "")
    hidden = [kind for kind in ("attention", "convolution") if kind in others["class"].to_list()]
    notes = [f"{kind}: these kernels contain GEMMs, which a kernel name cannot separate" for kind in hidden]
    return Answer(
        key=key,
        question=question,
        figure=say_share(1 - products),
        sentence=sentence,
        evidence=Table(title=table.title, columns=table.columns, rows=table.rows, notes=tuple(notes)),
    )
