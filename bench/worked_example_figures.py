"""The figures of docs/worked-example.md, drawn from recordings, and the tables over all of them.

    python bench/worked_example_figures.py DIR OUT    (no GPU; seconds; the tables go to stdout)

DIR holds the recordings made by bench/profile_recordings.sh, under their names; missing ones are left out. Every
segment is the tool's own number, from `Profile` and from the answers.
"""

import argparse
import struct
import sys
import zlib
from pathlib import Path

import polars as pl
import vl_convert

from stepscope.explain.questions import answer
from stepscope.explain.questions.answers import in_phases, share_by, stepped, time_of
from stepscope.explain.questions.product_roles import extents, find_products
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Bars, Cell, Column, Quantity, Table
from stepscope.recording.readers.formats import open_recording
from stepscope.render.drawing import draw_part
from stepscope.render.formats import Format
from stepscope.render.tables import render

NAMES = [
    f"{size}-{mode}-{how}"
    for size in ("small", "large")
    for mode in ("inference", "train")
    for how in ("fp32", "bf16", "compiled")
]
SCALE = 1.6
Kinds = dict[str, tuple[str, ...]]
CLASSES: Kinds = {
    "GEMM": ("GEMM",),
    "elementwise": ("elementwise",),
    "copies and casts": ("copy", "memcpy"),
    "reductions": ("reduction",),
    "fused norms": ("norm",),
    "other": (),
}
PHASES: Kinds = {"forward, loss": ("forward", "loss"), "backward": ("backward",), "optimizer": ("optimizer",)}
IDLE, OTHER = "GPU idle", "other"
PARTS = ("the two GEMMs", "softmax")
Segments = dict[str, dict[str, float]]  # bar, segment, value


def read(folder: Path) -> dict[str, Profile]:
    found = {name: folder / name for name in NAMES if (folder / name).is_dir()}
    if not found:
        raise SystemExit(f"no recordings in {folder}; create them with: bench/profile_recordings.sh {folder}")
    return {name: make_profile(open_recording(path)) for name, path in found.items()}


def label(name: str) -> str:
    size, mode, how = name.split("-")
    return f"{size} {mode}, {'bf16 compiled' if how == 'compiled' else how}"


def shares_of_classes(profile: Profile) -> dict[str, float]:
    shares = dict(share_by(stepped(profile), "class").select("class", "share").iter_rows())
    named = {kind: sum(shares.pop(each, 0.0) for each in classes) for kind, classes in CLASSES.items()}
    return named | {OTHER: sum(shares.values())}


def ms_of_phases(profile: Profile) -> dict[str, float]:
    busy = {name: time_of(in_phases(profile, *phases)) for name, phases in PHASES.items()}
    ms = {name: ns / profile.num_steps / 1e6 for name, ns in busy.items()}
    return ms | {IDLE: profile.idle_share * profile.step_ns / 1e6}


def attention_of(profiles: dict[str, Profile]) -> Segments:
    """Shares of the two GEMMs and of softmax, in operations and, for each recording, in time."""
    bars: Segments = {}
    for name, profile in profiles.items():
        table = next(one.evidence for one in answer([profile]) if one.key == "softmax")
        if "inference" not in name or table is None:
            continue
        keys = [column.key for column in table.columns]
        products, softmax = (dict(zip(keys, row, strict=True)) for row in table.rows[:2])
        for bar, key in (("operations, all four runs", "flops"), (f"time, {label(name)}", "per_step_ms")):
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
    """TFLOP/s of all GEMMs, from recorded shapes and kernel durations, and the share of the peak."""
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
        busy_ms, share = profile.clock.busy_ns / 1e6, shares_of_classes(profile)["GEMM"]
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
            Column(key="products_share", label="GEMM", kind="share"),
            Column(key="tflops", label="GEMM TFLOP/s", kind="number"),
            Column(key="peak_share", label="share of peak", kind="share"),
            Column(key="softmax_ratio", label="softmax / GEMMs", kind="ratio"),
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
            Column(key="plain_ms", label="unprofiled", kind="ms"),
            Column(key="span_ms", label="profiled", kind="ms"),
        ),
        rows=tuple(rows),
        notes=("train: includes the loss",),
    )


def shares_by_phase(profiles: dict[str, Profile]) -> Table:
    """Share of GEMMs, in each phase and in the whole step; and of the optimizer, in the step."""
    rows: list[tuple[Cell, ...]] = []
    for name, profile in profiles.items():
        if "train" not in name:
            continue
        parts = [in_phases(profile, "forward"), in_phases(profile, "backward"), stepped(profile)]
        products = [time_of(part.filter(pl.col("class") == "GEMM")) / time_of(part) for part in parts]
        optimizer = time_of(in_phases(profile, "optimizer")) / time_of(parts[-1])
        other = profiles.get(name.replace("train", "inference"))
        inference = shares_of_classes(other)["GEMM"] if other else None
        rows.append((label(name), inference, *products, optimizer))
    return Table(
        title="GEMMs, share of GPU time",
        columns=(
            Column(key="recording", label="recording"),
            Column(key="inference", label="inference", kind="share"),
            Column(key="forward", label="forward", kind="share"),
            Column(key="backward", label="backward", kind="share"),
            Column(key="step", label="whole step", kind="share"),
            Column(key="optimizer", label="optimizer, share of step", kind="share"),
        ),
        rows=tuple(rows),
    )


def draw_segments(bars: Segments, kind: Quantity, title: str, note: str) -> str:
    """Stacked bars, with the value of each segment in it."""
    series = tuple(next(iter(bars.values())))
    values = tuple(tuple(segments[name] for segments in bars.values()) for name in series)
    return draw_part(
        Bars(title=title, kind=kind, labels=tuple(bars), series=series, values=values, is_stacked=True, notes=(note,))
    )


def save(svg: str, path: Path) -> None:
    path.write_bytes(squeeze(vl_convert.svg_to_png(svg, scale=SCALE)))
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
    note = "Share of kernel time, one step; batch 4, context 256, unfused attention, H200"
    save(draw_segments(classes, "share", "GPU time by class", note), options.out / "classes.png")
    for size in ("small", "large"):
        steps = {label(name): ms_of_phases(one) for name, one in profiles.items() if name.startswith(size)}
        note = "Next to each bar: the unprofiled step time"
        if steps:
            title = f"Step time, {size}: GPU time by phase, and idle time"
            save(draw_segments(steps, "ms", title, note), options.out / f"steps_{size}.png")
    note = "Shares of the two GEMMs and softmax together, in a forward pass; scaling and masking left out"
    parts = attention_of(profiles)
    save(draw_segments(parts, "share", "Attention: share of operations and of time", note), options.out / "softmax.png")


if __name__ == "__main__":
    main()
