"""The figures of docs/worked-example.md, drawn from recordings, and the tables over all of them.

    python bench/worked_example_figures.py FOLDER OUT       (no GPU; seconds; the tables go to stdout)

FOLDER holds the recordings that bench/profile_recordings.sh makes, by their names; those that are not there are left
out. Figures are for one page, so they are drawn here and not in `report`: stacked bars are what the page needs and the
command line does not. Every segment is the tool's own figure, taken from `Profile` and from the answers.
"""

import argparse
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from stepscope.explain.questions import answer
from stepscope.explain.questions.answers import in_phases, share_by, stepped, time_of
from stepscope.explain.questions.product_roles import extents, find_products
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Cell, Column, Table
from stepscope.recording.readers.formats import open_recording
from stepscope.report.formats import Format
from stepscope.report.tables import render

NAMES = [
    f"{size}-{mode}-{how}"
    for size in ("small", "large")
    for mode in ("inference", "train")
    for how in ("fp32", "bf16", "compiled")
]
SCALE = 1.6
# Okabe and Ito (2008), as in report/chart.py; each segment also carries its figure, for print in black and white.
BLUE, VERMILION, GREEN, PINK, ORANGE, SKY, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#c9c9c9",
)
CLASSES = {
    "matrix products": (BLUE, ("gemm",)),
    "elementwise": (ORANGE, ("elementwise",)),
    "copies and casts": (VERMILION, ("copy", "memcpy")),
    "reductions": (GREEN, ("reduction",)),
    "fused norms": (PINK, ("norm",)),
    "other": (GREY, ()),
}
PHASES = {
    "forward, loss": (BLUE, ("forward", "loss")),
    "backward": (ORANGE, ("backward",)),
    "optimizer": (GREEN, ("optimizer",)),
    "GPU idle": (GREY, ()),
}
Kinds = dict[str, tuple[str, tuple[str, ...]]]
PARTS: Kinds = {"the two products": (BLUE, ()), "softmax": (VERMILION, ())}
Bars = dict[str, dict[str, float]]  # bar, segment, value


def read(folder: Path) -> dict[str, Profile]:
    found = {name: folder / name for name in NAMES if (folder / name).is_dir()}
    if not found:
        raise SystemExit(f"no recordings in {folder}: bench/profile_recordings.sh {folder} makes them")
    return {name: make_profile(open_recording(path)) for name, path in found.items()}


def label(name: str) -> str:
    size, mode, how = name.split("-")
    return f"{size} {mode}, {'bf16 compiled' if how == 'compiled' else how}"


def shares_of_classes(profile: Profile) -> dict[str, float]:
    shares = dict(share_by(stepped(profile), "class").select("class", "share").iter_rows())
    named = {kind: sum(shares.pop(each, 0.0) for each in classes) for kind, (_, classes) in CLASSES.items()}
    return named | {"other": sum(shares.values())}


def ms_of_phases(profile: Profile) -> dict[str, float]:
    busy = {name: time_of(in_phases(profile, *phases)) for name, (_, phases) in PHASES.items() if phases}
    ms = {name: ns / profile.num_steps / 1e6 for name, ns in busy.items()}
    return ms | {"GPU idle": profile.idle_share * profile.step_ns / 1e6}


def attention_of(profiles: dict[str, Profile]) -> Bars:
    """Shares of the two products and of softmax, in operations and, for each recording, in time."""
    bars: Bars = {}
    for name, profile in profiles.items():
        table = next(one.evidence for one in answer([profile]) if one.key == "softmax")
        if "inference" not in name or table is None:
            continue
        keys = [column.key for column in table.columns]
        products, softmax = (dict(zip(keys, row, strict=True)) for row in table.rows[:2])
        for bar, key in (("operations, in all four", "flops"), (f"time, {label(name)}", "per_step_ms")):
            pair = [float(row[key] or 0) for row in (products, softmax)]
            bars[bar] = {part: value / sum(pair) for part, value in zip(PARTS, pair, strict=True)}
    return bars


def ratio_of_softmax(profile: Profile) -> float | None:
    table = next(one.evidence for one in answer([profile]) if one.key == "softmax")
    if table is None:
        return None
    at = [column.key for column in table.columns].index("per_step_ms")
    return float(table.rows[1][at] or 0) / float(table.rows[0][at] or 1)


def tflops_of_products(profile: Profile) -> tuple[float, float] | tuple[None, None]:
    """TFLOP/s of all matrix products, by recorded shapes and the kernels' own time, and the share of the peak."""
    products = find_products(profile)
    known = [one.flops for one in extents(profile, products["op_row"].to_list()) if one is not None]
    case, hardware = profile.recording.manifest.case, profile.hardware
    if len(known) < products.height or case is None or hardware is None:
        return None, None
    speed = sum(known) / time_of(products) * 1e9
    return speed / 1e12, speed / hardware.peak_flops[case.workload.precision]


def overview(profiles: dict[str, Profile]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, profile in profiles.items():
        kernels = stepped(profile)
        busy_ms, share = profile.busy_step_ns / 1e6, shares_of_classes(profile)["matrix products"]
        times = (profile.step_ns / 1e6, busy_ms, profile.idle_share, kernels.height / profile.num_steps)
        rows.append((label(name), *times, share, *tflops_of_products(profile), ratio_of_softmax(profile)))
    return Table(
        title="Ten recordings, per step",
        columns=(
            Column(key="recording", label="recording"),
            Column(key="step_ms", label="step ms", kind="ms"),
            Column(key="busy_ms", label="GPU busy ms", kind="ms"),
            Column(key="idle_share", label="GPU idle", kind="share"),
            Column(key="kernels", label="kernels", kind="count"),
            Column(key="products_share", label="matrix products", kind="share"),
            Column(key="tflops", label="their TFLOP/s", kind="number"),
            Column(key="peak_share", label="of the peak", kind="share"),
            Column(key="softmax_ratio", label="softmax / products", kind="ratio"),
        ),
        rows=tuple(rows),
    )


def forward_clocks(profiles: dict[str, Profile]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, profile in profiles.items():
        table = next(one.evidence for one in answer([profile]) if one.key == "forward-time")
        clocks = {row[0]: row[1] for row in table.rows} if table else {}
        rows.append((label(name), *(clocks.get(clock) for clock in ("kernels", "plain", "span"))))
    return Table(
        title="Forward, per step, in ms",
        columns=(
            Column(key="recording", label="recording"),
            Column(key="kernels_ms", label="kernels", kind="ms"),
            Column(key="plain_ms", label="by the clock", kind="ms"),
            Column(key="span_ms", label="under the recorder", kind="ms"),
        ),
        rows=tuple(rows),
        notes=("train: with the loss",),
    )


def shares_by_phase(profiles: dict[str, Profile]) -> Table:
    """Of matrix products, in each phase and in the whole step; and of the optimizer, in the step."""
    rows: list[tuple[Cell, ...]] = []
    for name, profile in profiles.items():
        if "train" not in name:
            continue
        parts = [in_phases(profile, "forward"), in_phases(profile, "backward"), stepped(profile)]
        products = [time_of(part.filter(pl.col("class") == "gemm")) / time_of(part) for part in parts]
        optimizer = time_of(in_phases(profile, "optimizer")) / time_of(parts[-1])
        other = profiles.get(name.replace("train", "inference"))
        inference = shares_of_classes(other)["matrix products"] if other else None
        rows.append((label(name), inference, *products, optimizer))
    return Table(
        title="Matrix products, share of GPU time",
        columns=(
            Column(key="recording", label="recording"),
            Column(key="inference", label="inference", kind="share"),
            Column(key="forward", label="forward", kind="share"),
            Column(key="backward", label="backward", kind="share"),
            Column(key="step", label="whole step", kind="share"),
            Column(key="optimizer", label="for comparison: optimizer, of the step", kind="share"),
        ),
        rows=tuple(rows),
    )


def segments(bars: Bars, kinds: Kinds, say: Callable[[float], str], least: float) -> list[dict[str, Any]]:
    """One row a segment, with where it begins and ends; a segment narrower than `least` has no room for its figure."""
    rows = []
    for bar, values in bars.items():
        end = 0.0
        for kind in kinds:
            start, end = end, end + values[kind]
            text = say(values[kind]) if values[kind] >= least else ""
            rows.append(
                {"bar": bar, "kind": kind, "start": start, "end": end, "middle": (start + end) / 2, "text": text}
            )
    return rows


def draw(
    bars: Bars, kinds: Kinds, say: Callable[[float], str], *, axis: alt.Axis, most: float, totals: bool = False
) -> alt.LayerChart | alt.FacetChart:
    rows = segments(bars, kinds, say, least=0.042 * most)
    base = alt.Chart(alt.InlineData(values=rows), width=560, height=alt.Step(26)).encode(
        y=alt.Y("bar:N", sort=list(bars), title=None, axis=alt.Axis(labelLimit=260, ticks=False, domain=False))
    )
    colours = alt.Scale(domain=list(kinds), range=[colour for colour, _ in kinds.values()])
    drawn = base.mark_bar(height=20, stroke="white", strokeWidth=0.6).encode(
        x=alt.X("start:Q", axis=axis, scale=alt.Scale(domain=[0, most], nice=False)),
        x2="end:Q",
        color=alt.Color("kind:N", scale=colours, sort=list(kinds), legend=alt.Legend(orient="top", title=None)),
    )
    dark = [kind for kind, (colour, _) in kinds.items() if colour in (BLUE, VERMILION, GREEN)]
    ink = (
        alt.when(alt.FieldOneOfPredicate(field="kind", oneOf=dark))
        .then(alt.value("white"))
        .otherwise(alt.value("#222222"))
    )
    written = base.mark_text(fontSize=11).encode(x="middle:Q", text="text:N", color=ink)
    if totals:
        sums = [
            {"bar": bar, "end": sum(values.values()), "text": say(sum(values.values()))} for bar, values in bars.items()
        ]
        ends = alt.Chart(alt.InlineData(values=sums)).mark_text(fontSize=11, fontWeight="bold", align="left", dx=4)
        y = alt.Y("bar:N", sort=list(bars))
        return alt.layer(drawn, written, ends.encode(x="end:Q", y=y, text="text:N"))
    return alt.layer(drawn, written)


def draw_shares(bars: Bars, kinds: Kinds, title: str, subtitle: str) -> alt.TopLevelMixin:
    axis = alt.Axis(format="%", title=None, grid=False, values=[0, 0.25, 0.5, 0.75, 1])
    chart = draw(bars, kinds, lambda share: f"{share * 100:.0f} %", axis=axis, most=1.0)
    return chart.properties(title=alt.TitleParams(title, subtitle=subtitle))


def draw_steps(profiles: dict[str, Profile]) -> alt.TopLevelMixin:
    panels = []
    for size in ("small", "large"):
        bars = {label(name): ms_of_phases(one) for name, one in profiles.items() if name.startswith(size)}
        if bars:
            most = max(sum(values.values()) for values in bars.values()) * 1.06
            axis = alt.Axis(title=f"ms a step, {size}", grid=False)
            panels.append(draw(bars, PHASES, lambda ms: f"{ms:.3g}", axis=axis, most=most, totals=True))
    title = alt.TitleParams(
        "Where a step goes: GPU time by phase, and idle",
        subtitle="ms, in bold the whole step by the clock without the recorder; each panel has a scale of its own",
    )
    return alt.vconcat(*panels).properties(title=title)


def save(chart: alt.TopLevelMixin, path: Path) -> None:
    styled = (
        chart.configure(font="Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif", background="white")
        .configure_view(stroke=None)
        .configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", labelColor="#222222")
        .configure_title(anchor="start", fontSize=15, subtitleFontSize=12, subtitleColor="#5f5f5f", offset=10)
        .configure_legend(labelFontSize=12, symbolType="square", columnPadding=14)
    )
    version = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
    path.write_bytes(squeeze(vl_convert.vegalite_to_png(styled.to_dict(), vl_version=version, scale=SCALE)))
    print(f"{path}: {path.stat().st_size / 1000:.0f} KB", file=sys.stderr)


def squeeze(png: bytes) -> bytes:
    """The same pixels in fewer bytes: vl-convert hardly compresses. A chunk is length, kind, content, checksum."""
    head, content, at = png[:8], b"", 8
    kept = []
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            content += png[at + 8 : at + 8 + size]
        elif kind in (b"IHDR", b"IEND"):
            kept.append((kind, png[at + 8 : at + 8 + size]))
        at += 12 + size
    kept.insert(1, (b"IDAT", zlib.compress(zlib.decompress(content), 9)))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in kept
    )
    return head + b"".join(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    profiles = read(options.folder)
    options.out.mkdir(parents=True, exist_ok=True)
    for table in (overview(profiles), forward_clocks(profiles), shares_by_phase(profiles)):
        print(render(table, Format.MD))
    classes = {label(name): shares_of_classes(profile) for name, profile in profiles.items()}
    subtitle = "Shares of the kernels' durations, of one step; batch 4, context 256, attention written out, H200"
    save(draw_shares(classes, CLASSES, "GPU time by class", subtitle), options.out / "classes.png")
    save(draw_steps(profiles), options.out / "steps.png")
    subtitle = "Shares of the two products and softmax together, in a forward pass; scaling and masking left out"
    parts = attention_of(profiles)
    save(draw_shares(parts, PARTS, "Attention: operations against time", subtitle), options.out / "softmax.png")


if __name__ == "__main__":
    main()
