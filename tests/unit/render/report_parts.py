"""The parts of invented reports, made from kernels as a recording has them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepscope.explain.trace.module_tree import fold_modules, plant_tree
from stepscope.findings import (
    Advice,
    Axis,
    Breakdown,
    Column,
    Copyable,
    Dimension,
    Figure,
    Finding,
    Lanes,
    Point,
    Question,
    Questions,
    Roof,
    Roofline,
    RoofPoint,
    Spans,
    StepBar,
    StepPhase,
    StepPicture,
    Table,
    Track,
)

NUM_LAYERS = 12
WALL_NS = 60_910_000
COMMAND = "stepscope report --size small --batch 4 --context 512 --precision bf16"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of a step: it runs `count` times in a row, `length_ns` each."""

    kind: str
    phase: str
    layer: str
    module: str
    name: str
    length_ns: int
    count: int = 1


_FULL = "void at::native::vectorized_elementwise_kernel<4, at::native::{}<float>, std::array<char*, 3ul>>(int, {})"
# Class, module, readable name, time in the forward pass and count.
_LAYER = (
    ("norm", "norm1", "layer norm forward bf16", 6_100, 1),
    ("GEMM", "attention.qkv", "GEMM bf16 128×128×64 tn", 21_400, 1),
    ("copy", "attention", "cast to bf16, vectorized ×8", 2_390, 4),
    ("attention", "attention", "flash attention forward bf16, head 64", 18_700, 1),
    ("GEMM", "attention.out", "GEMM bf16 128×64×64 tn", 9_800, 1),
    ("norm", "norm2", "layer norm forward bf16", 6_100, 1),
    ("GEMM", "mlp.up", "GEMM bf16 128×256×64 tn", 26_300, 1),
    ("elementwise", "mlp", "gelu bf16, vectorized ×8", 7_900, 1),
    ("GEMM", "mlp.down", "GEMM bf16 128×128×64 tn", 25_900, 1),
    ("elementwise", "", "add bf16, vectorized ×8", 3_300, 2),
)


_OPERATORS = {"GEMM": "aten::mm", "attention": "aten::_flash_attention", "copy": "aten::copy_"}


def kernels_of_step() -> list[Kernel]:
    """Forward, loss, backward and AdamW of a small GPT, in the order they run."""
    forward, backward = [], []
    for number in range(NUM_LAYERS):
        layer = f"layers.{number}"
        for kind, module, name, length, count in _LAYER:
            path = ".".join(part for part in (layer, module) if part)
            here = Kernel(kind=kind, phase="forward", layer=layer, module=path, name=name, length_ns=length)
            forward.append(replace(here, count=count))
            name = name.replace("forward", "backward").replace(" tn", " nn")
            backward.append(replace(here, phase="backward", name=name, count=2 * count, length_ns=int(1.1 * length)))
    ends = [
        Kernel(kind="embedding", phase="forward", layer="", module="embedding", name="embedding bf16", length_ns=4_400),
        Kernel(
            kind="GEMM", phase="forward", layer="", module="head", name="GEMM bf16 256×128×64 tn", length_ns=412_000
        ),
        Kernel(kind="loss", phase="loss", layer="", module="", name="cross entropy fp32", length_ns=105_000),
    ]
    adamw = Kernel(
        kind="optimizer", phase="optimizer", layer="", module="", name="AdamW, many tensors", length_ns=61_000, count=36
    )
    return [ends[0], *forward, *ends[1:], *reversed(backward), adamw]


def break_down(runs: Sequence[Sequence[Kernel]], walls_ns: Sequence[float]) -> Breakdown:
    """Return the breakdown of kernels, one list per run; one run is named "", several get letters."""
    readers: dict[str, tuple[str, Callable[[Kernel], str]]] = {
        "class": ("Class", lambda kernel: kernel.kind),
        "phase": ("Phase", lambda kernel: kernel.phase),
        "module": ("Module", lambda kernel: kernel.module or "unknown"),
        "op": ("Operator", lambda kernel: _OPERATORS.get(kernel.kind, "aten::add")),
        "kernel": ("Kernel", lambda kernel: kernel.name),
    }
    values: dict[str, dict[str, int]] = {key: {} for key in readers}
    rows: dict[tuple[int, ...], list[list[float]]] = {}
    for run, kernels in enumerate(runs):
        for kernel in kernels:
            place = tuple(values[key].setdefault(read(kernel), len(values[key])) for key, (_, read) in readers.items())
            own = rows.setdefault(place, [[0.0, 0.0, 0.0, 0.0] for _ in runs])[run]
            length = float(kernel.length_ns)
            own[2] = min(own[2], length) if own[1] else length
            own[3] = max(own[3], length)
            own[0] += length * kernel.count
            own[1] += kernel.count

    def column(which: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(row[run][which] for row in rows.values()) for run in range(len(runs)))

    def spread(which: int) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(row[run][which] if row[run][1] else None for row in rows.values()) for run in range(len(runs))
        )

    names, modules = values["kernel"], tuple(values["module"])
    details = tuple(f"{name}: what its name says\n{_FULL.format(name, 'int')}" for name in names)
    busy = [sum(kernel.length_ns * kernel.count for kernel in kernels) for kernels in runs]
    return Breakdown(
        title="Where the time goes",
        runs=("",) if len(runs) == 1 else tuple("AB"[: len(runs)]),
        dimensions=tuple(
            Dimension(key=key, label=label, values=tuple(values[key]), details=details if key == "kernel" else ())
            for key, (label, _) in readers.items()
        ),
        places=tuple(rows),
        times_ns=column(0),
        counts=column(1),
        shortest_ns=spread(2),
        longest_ns=spread(3),
        walls_ns=tuple(walls_ns),
        idles_ns=tuple(max(0.0, wall - own) for wall, own in zip(walls_ns, busy, strict=True)),
        tree=plant_tree(modules, fold_modules(dict.fromkeys(modules, ""))),
        lines=("model.py:31 forward",),
        sources=tuple(0 if at else -1 for at in range(len(rows))),
        notes=("Times are a mean of 3 steps.", "Layer norm is counted to the block it stands in."),
    )


def picture_steps(runs: Sequence[Sequence[Kernel]], walls_ns: Sequence[float]) -> StepPicture:
    """Return the picture of steps whose idle time is in the backward pass; one run is named "", several get letters."""
    bars = []
    for kernels, wall_ns in zip(runs, walls_ns, strict=True):
        times: dict[str, dict[str, float]] = {}
        for kernel in kernels:
            own = times.setdefault(kernel.phase, {})
            own[kernel.kind] = own.get(kernel.kind, 0.0) + kernel.length_ns * kernel.count
        busy = sum(sum(own.values()) for own in times.values())
        phases = tuple(
            StepPhase(
                name=name,
                classes=tuple(own),
                times_ns=tuple(own.values()),
                idle_ns=wall_ns - busy if name == "backward" else 0.0,
            )
            for name, own in times.items()
        )
        bars.append(StepBar(step_ns=wall_ns, busy_ns=busy, phases=phases))
    names = ("",) if len(runs) == 1 else tuple("AB"[: len(runs)])
    return StepPicture(title="The step by phase", runs=names, bars=tuple(bars), notes=("idle time is spread",))


def lay_lanes(kernels: Sequence[Kernel], title: str = "One step as it ran", gap_ns: int = 9_000) -> Lanes:
    """Return the timeline of kernels on one stream, with a pause after each."""
    names: dict[str, int] = {}
    groups: dict[str, int] = {"": 0}
    tracks: dict[str, list[tuple[int, int, int, int, int]]] = {"phase": [], "layer": [], "stream": []}
    now = 0

    def add(track: str, start: int, end: int, name: str, group: str) -> None:
        place = names.setdefault(name, len(names)), groups.setdefault(group, len(groups))
        last = tracks[track][-1] if tracks[track] else None
        if track != "stream" and last is not None and (last[2], last[3]) == place:
            tracks[track][-1] = (last[0], end - last[0], *place, last[4] + 1)
        else:
            tracks[track].append((start, end - start, *place, 1))

    for kernel in kernels:
        for _ in range(kernel.count):
            end = now + kernel.length_ns
            add("stream", now, end, kernel.name, kernel.kind)
            add("phase", now, end, kernel.phase, kernel.phase)
            if kernel.layer:
                add("layer", now, end, kernel.layer, "")
            now = end + gap_ns
    kinds: tuple[tuple[Any, str], ...] = (("phase", "phase"), ("layer", "layer"), ("stream", "stream 7"))
    return Lanes(
        title=title,
        span_ns=now,
        tracks=tuple(Track(label=label, kind=kind, spans=_spans(tracks[kind])) for kind, label in kinds),
        names=tuple(names),
        details=tuple(f"{name}: decoded" for name in names),
        lines=("operator: aten::mm [[64,32],[32,16]]", "module: blocks.0", "source: model.py:31 forward"),
        origins=((0, 1), (0, 2), ()),
        groups=tuple(groups),
        notes=("The second of 3 steps.",),
    )


def _spans(spans: Sequence[tuple[int, int, int, int, int]]) -> Spans:
    columns = tuple(zip(*spans, strict=True)) or ((),) * 5
    return Spans(
        starts_ns=columns[0],
        lengths_ns=columns[1],
        names=columns[2],
        groups=columns[3],
        counts=columns[4],
        origins=tuple(at % 4 - 1 for at in range(len(columns[0]))),
    )


def draw_roofline(runs: tuple[str, ...] = ("",)) -> Roofline:
    """Operators at their FLOP/s; those with an intensity of 0 only move memory, at their B/s."""
    cases = (
        ("mm 2048×768 · 768×3072", "GEMM", 341.0, 4.1e14, 0.62, "compute"),
        ("mm 2048×768 · 768×2304", "GEMM", 307.0, 3.6e14, 0.51, "compute"),
        ("mm 2048×768 · 768×50257", "GEMM", 502.0, 5.9e14, 0.41, "compute"),
        ("flash attention 4×12×512×64", "attention", 128.0, 1.3e14, 0.44, "compute"),
        ("layer norm 2048×768", "norm", 0.0, 2.1e12, 0.29, "memory"),
        ("gelu 2048×3072", "elementwise", 0.0, 3.3e12, 0.19, "memory"),
        ("add 2048×768", "elementwise", 0.0, 2.6e11, 0.16, "launch"),
        ("cross entropy 2048×50257", "loss", 0.9, 1.9e12, 0.11, "memory"),
    )
    points = tuple(
        RoofPoint(
            label=label,
            group=group,
            intensity=intensity,
            flops_per_s=rate * (1 - 0.3 * run) if intensity else 0.0,
            bytes_per_s=rate * (1 - 0.3 * run) / (intensity or 1.0),
            time_ms=time,
            share=time / 2.73,
            reached=min(1.0, rate / min(989e12, (intensity or 1.0) * 4.8e12)),
            bound=bound,
            detail="12 calls per step",
            run=run,
        )
        for run in range(len(runs))
        for label, group, intensity, rate, time, bound in cases
    )
    roofs = (Roof(label="bf16 tensor cores", flops_per_s=989e12), Roof(label="fp32", flops_per_s=67e12))
    return Roofline(
        title="Roofline", runs=runs, bytes_per_s=4.8e12, roofs=roofs, points=points, notes=("Of NVIDIA H200.",)
    )


def categories_table(num_rows: int = 5) -> Table:
    names = ("activations", "optimizer state", "parameters", "gradients", "temporaries")
    rows = tuple(
        (names[at] if at < len(names) else f"part {at}", (9_710 - 37 * at) << 20, 0.51 / (at + 1), 12 * at, f"row {at}")
        for at in range(num_rows)
    )
    return Table(
        title="What the peak is made of",
        columns=(
            Column(key="category", label="category"),
            Column(key="bytes", label="at the peak", kind="bytes"),
            Column(key="share", label="share", kind="share"),
            Column(key="tensors", label="tensors", kind="count"),
            Column(key="where", label="where", detail=True),
        ),
        rows=rows,
        notes=("At the highest instant of the second step.",),
    )


def draw_attention() -> Figure:
    points = tuple(
        Point(panel=panel, series=series, x=float(length), y=factor * (length / 512) ** 1.9, low=None, high=None)
        for panel in ("forward", "forward and backward")
        for series, factor in (("plain", 0.9), ("sdpa", 0.21), ("ours", 0.18))
        for length in (512, 1024, 2048, 4096, 8192)
    )
    return Figure(
        title="Attention by length",
        subtitle="bf16, 12 heads of 64, causal",
        x=Axis(label="length", unit="tokens", log=True),
        y=Axis(label="time", unit="ms", log=True),
        points=points,
        series=("plain", "sdpa", "ours"),
        series_label="implementation",
        panel_label="pass",
    )


def ask() -> Questions:
    evidence = categories_table(3)
    return Questions(
        title="Questions",
        questions=(
            Question(
                question="How does the forward pass compare with the timed one?",
                figure="16.2 ms",
                answer="The recorder lengthens the step by 2.3×; kernels take as long as without it.",
                evidence=evidence,
            ),
            Question(
                question="Which kernel takes most of the forward pass?",
                figure="GEMM, 48%",
                answer="It runs 49 times per step; backward uses the same kernel.",
            ),
            Question(
                question="How much of the step is communication?",
                figure="",
                answer="The recording is of one rank.",
                command="stepscope profile --ranks 2",
                is_answered=False,
            ),
        ),
    )


def advise() -> tuple[Advice, ...]:
    cases = (
        ("SS001", "Launch-bound: the GPU is idle 79% of the step", 27_890_000, "Run with `--compile`"),
        ("SS003", "1,832 small kernels per step could be fused", 21_300_000, "Run with `--compile`"),
        ("SS008", "Dtype conversions: 511 casts per step", 12_130_000, "Run with `--compile`"),
        ("SS007", "Optimizer launches 888 kernels per step", 6_020_000, "Use `fused=True`"),
        ("SS015", "Memory-bound GEMMs take 2.1 ms per step", None, "Run with `--batch 8`"),
    )
    remark = Finding(
        code="SS019",
        title="CPU stalls: the GPU sits idle for over 1 ms",
        evidence="3 times per step the CPU launches nothing for over 1 ms",
        saving_ns=1_950_000,
        share=1_950_000 / WALL_NS,
        action="Find out what the CPU does during the stalls",
    )
    command = Copyable(label="measure it", text=f"{COMMAND} --compile")
    code = Copyable(label="in your own code", text="model = torch.compile(model)\nfor batch in data:\n    step(batch)")
    cards = tuple(
        Advice(
            finding=Finding(
                code=name,
                title=title,
                evidence="2,400 of 3,292 kernels per step start late because the CPU launched them late; a kernel runs "
                "for 3.8 µs on average.",
                action=action,
                fix=f"{COMMAND} --compile",
                saving_ns=saving,
                share=saving / WALL_NS if saving is not None else None,
            ),
            fixes=(command, code) if saving is not None else (command,),
        )
        for name, title, saving, action in cases
    )
    return (*cards, Advice(finding=remark))
