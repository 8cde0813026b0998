"""Forgeries of numbers: single values, scaled counters, times, devices, and values that are large."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attack.documents import (
    INSTRUCTIONS,
    READS,
    SECTORS,
    STORES,
    TENSOR_OPS,
    CounterDocument,
    Document,
    Launch,
    TraceDocument,
)
from attack.forgery import COUNTERS, FORWARD, TRACES, Family, redraw
from attack.subject import Forged, Subject, is_gemm
from stepscope.explain.kernel_names import decode

EDITED = Family("edited numbers")
SCALED = Family("scaled counters")
TIMES = Family("edited times")
DEVICES = Family("mixed devices")
LARGE = Family("large numbers")
_MANY_REPEATED = 12  # durations
_ALL_COUNTERS = ("sm__", "lts__", "dram__")


def _edit(subject: Subject, **changes: Any) -> Forged:
    """Edit the longest GEMM of the last layer."""
    return subject.edit(subject.longest_product, lambda one: replace(one, **changes))


@EDITED.add("The grid of one GEMM is twice as large.")
def edited_grid(subject: Subject) -> Forged:
    x, y, z = subject.launches[subject.longest_product].grid
    return _edit(subject, grid=(2 * x, y, z))


@EDITED.add("The block of one GEMM is twice as large.")
def edited_block(subject: Subject) -> Forged:
    x, y, z = subject.launches[subject.longest_product].block
    return _edit(subject, block=(2 * x, y, z))


@EDITED.add("One GEMM has other registers per thread than the same kernel elsewhere.")
def edited_registers(subject: Subject) -> Forged:
    return _edit(subject, registers=subject.launches[subject.longest_product].registers - 8)


@EDITED.add("One GEMM has other shared memory than the same kernel elsewhere.")
def edited_shared_memory(subject: Subject) -> Forged:
    return _edit(subject, shared_bytes=subject.launches[subject.longest_product].shared_bytes // 2)


def _scale(subject: Subject, factor: float, *counters: str) -> Forged | None:
    launch = subject.launches[subject.longest_product]
    changed = launch.scale(factor, *counters)
    return None if changed == launch else subject.edit(subject.longest_product, lambda _: changed)


@EDITED.add("One GEMM has half of its tensor core operations.", kinds=COUNTERS)
def edited_tensor_ops(subject: Subject) -> Forged | None:
    return _scale(subject, 0.5, TENSOR_OPS)


@EDITED.add("One GEMM has half of its operations and half of its instructions.", kinds=COUNTERS)
def edited_work(subject: Subject) -> Forged | None:
    return _scale(subject, 0.5, TENSOR_OPS, INSTRUCTIONS, "sm__sass_thread_inst")


@EDITED.add("One GEMM stores half of its result.", kinds=COUNTERS)
def edited_stores(subject: Subject) -> Forged | None:
    return _scale(subject, 0.5, STORES)


@EDITED.add("One GEMM writes a hundredth of its sectors.", kinds=COUNTERS)
def edited_sectors(subject: Subject) -> Forged | None:
    return _scale(subject, 0.01, SECTORS)


@EDITED.add("One GEMM reads a thousand times as many bytes.", kinds=COUNTERS)
def edited_traffic(subject: Subject) -> Forged | None:
    return _scale(subject, 1000, READS)


@EDITED.add("The counters of every second GEMM are removed.", kinds=COUNTERS)
def removed_counters(subject: Subject) -> Forged:
    gone = set([index for index, one in enumerate(subject.launches) if is_gemm(one)][::2])
    return subject.forge(_strip(subject, gone))


@EDITED.add("The counters of the last layer are removed.", kinds=COUNTERS)
def removed_counters_of_a_layer(subject: Subject) -> Forged:
    block = subject.forward.slice(subject.forward.layers - 1)
    return subject.forge(_strip(subject, set(range(block.start, block.stop))))


def _strip(subject: Subject, gone: set[int]) -> list[Launch]:
    return [replace(one, counters={}) if index in gone else one for index, one in enumerate(subject.launches)]


# --- Scaled counters


@SCALED.add("All counters and times are twice as large, and twice the batch is claimed.", kinds=COUNTERS)
def doubled_counters(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: one.scale(2, *_ALL_COUNTERS).slow_down(2), batch=2 * subject.truth["batch"])


@SCALED.add(
    "All counters, times and grids are twice as large, and twice the batch is claimed.",
    undetectable="if whole tiles double, this is the file of a run with twice the batch; elsewhere it is refuted",
)
def doubled_everything(subject: Subject) -> Forged:
    def double(one: Launch) -> Launch:
        x, y, z = one.grid
        return replace(one.scale(2, *_ALL_COUNTERS).slow_down(2), grid=(2 * x, y, z))

    return subject.edit_all(double, batch=2 * subject.truth["batch"])


@SCALED.add("All counters and times are halved, and half of d_ff is claimed.", kinds=COUNTERS)
def halved_counters(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: one.scale(0.5, *_ALL_COUNTERS).slow_down(0.5), d_ff=subject.truth["d_ff"] // 2)


@SCALED.add("Only the tensor core operations are twice as large, and twice the d_ff is claimed.", kinds=COUNTERS)
def doubled_operations(subject: Subject) -> Forged:
    return subject.edit_all(
        lambda one: one.scale(2, TENSOR_OPS, INSTRUCTIONS, "sm__sass_thread_inst"), d_ff=2 * subject.truth["d_ff"]
    )


@SCALED.add(
    "All numbers of the LM head are twice as large, its grid too, and twice the vocab_size is claimed.",
    kinds=COUNTERS,
    undetectable="in a forward pass no other kernel depends on vocab_size; where its grid does not fit, it is refuted",
)
def doubled_head(subject: Subject) -> Forged:
    def double(one: Launch) -> Launch:
        x, y, z = one.grid
        return replace(one.scale(2, *_ALL_COUNTERS).slow_down(2), grid=(x, 2 * y, z))

    return subject.edit(subject.head, double, vocab_size=2 * subject.truth["vocab_size"])


# --- Times


@TIMES.add("Every kernel starts before the previous one on its stream ends.", kinds=TRACES)
def overlapping_kernels(subject: Subject) -> Forged:
    time, done = subject.launches[0].start_ns, []
    for one in subject.launches:
        done.append(replace(one, start_ns=time))
        time += one.duration_ns / 2
    return subject.forge(done)


@TIMES.add("All kernels start at the same time.", kinds=TRACES)
def simultaneous_kernels(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: replace(one, start_ns=subject.launches[0].start_ns))


@TIMES.add("All kernels start at the same time, and are marked as those of a CUDA graph.", kinds=TRACES)
def simultaneous_kernels_of_a_graph(subject: Subject) -> Forged:
    start = subject.launches[0].start_ns
    return subject.forge(
        replace(one, start_ns=start + index, raw=_mark(one.raw, index)) for index, one in enumerate(subject.launches)
    )


def _mark(event: Mapping[str, Any], node: int) -> dict[str, Any]:
    return {**event, "args": {**event["args"], "graph id": 1, "graph node id": node + 1}}


@TIMES.add("Every third duration is negative.")
def negative_durations(subject: Subject) -> Forged:
    return subject.forge(
        replace(one, duration_ns=-one.duration_ns) if index % 3 == 1 else one
        for index, one in enumerate(subject.launches)
    )


@TIMES.add("All durations are zero.")
def zero_durations(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: replace(one, duration_ns=0))


@TIMES.add("All kernels take the same time.")
def constant_durations(subject: Subject) -> Forged:
    longest = max(one.duration_ns for one in subject.launches)
    return subject.edit_all(lambda one: replace(one, duration_ns=longest))


@TIMES.add("All kernels are 50 times as fast.")
def fast_kernels(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: replace(one, duration_ns=round(one.duration_ns / 50)))


@TIMES.add("Every layer has exactly the durations of the first one.", kinds=FORWARD)
def repeated_durations(subject: Subject) -> Forged | None:
    return _repeat_durations(subject) if _count_repeated(subject) >= _MANY_REPEATED else None


@TIMES.add(
    "Every layer has the durations of the first one, and that is fewer than a dozen kernels.",
    kinds=FORWARD,
    undetectable="so few durations can agree by chance: only copies with a chance below one in a million are refuted",
)
def few_repeated_durations(subject: Subject) -> Forged | None:
    return _repeat_durations(subject) if 0 < _count_repeated(subject) < _MANY_REPEATED else None


def _count_repeated(subject: Subject) -> int:
    return subject.forward.period * (subject.forward.layers - 1)


def _repeat_durations(subject: Subject) -> Forged:
    region, rows = subject.forward, list(subject.launches)
    for index in range(region.start + region.period, region.end):
        rows[index] = replace(rows[index], duration_ns=rows[index - region.period].duration_ns)
    return subject.forge(rows)


@TIMES.add(
    "All kernels are ten times as slow.",
    undetectable="lower clocks, a limit on power or other programs on the GPU slow kernels down as well",
)
def slow_kernels(subject: Subject) -> Forged:
    return subject.forge(_stretch(subject.launches, 10))


def _stretch(launches: Sequence[Launch], factor: float) -> list[Launch]:
    first = launches[0].start_ns
    return [
        replace(one.slow_down(factor), start_ns=first + factor * (one.start_ns - first) if first else 0.0)
        for one in launches
    ]


@TIMES.add(
    "The whole trace is one day later.",
    kinds=TRACES,
    undetectable="the clock of a trace has an arbitrary origin; a nonce that decides batch and context dates the run",
)
def later_trace(subject: Subject) -> Forged:
    return subject.edit_all(lambda one: replace(one, start_ns=one.start_ns + 86_400e9))


# --- Devices

_A100 = "NVIDIA A100-SXM4-80GB"
_H100 = "NVIDIA H100 80GB HBM3"
_NAME = "device__attribute_display_name"


def _rename_device(document: Document, name: str) -> Document:
    if isinstance(document, CounterDocument):
        return document.with_launches(_rename_row(one, name) for one in document.launches)
    assert isinstance(document, TraceDocument)
    properties = [{**one, "name": name} for one in document.rest["deviceProperties"]]
    return replace(document, rest={**document.rest, "deviceProperties": properties})


def _rename_row(launch: Launch, name: str) -> Launch:
    return replace(launch, raw={**launch.raw, _NAME: name})


def _forge_document(subject: Subject, document: Document) -> Forged:
    return Forged(files=((document.file, document.write()),), claim=subject.false_claim())


@DEVICES.add("Every second kernel ran on a second GPU.")
def kernels_of_two_devices(subject: Subject) -> Forged:
    return subject.forge(replace(one, device=one.device + index % 2) for index, one in enumerate(subject.launches))


@DEVICES.add("The kernels appear again on a second GPU, and twice the batch is claimed.")
def second_rank(subject: Subject) -> Forged:
    last = subject.launches[-1].number + 1
    again = [
        replace(one, device=one.device + 1, number=last + index)
        for index, one in enumerate(redraw(subject.launches, subject.name))
    ]
    return subject.forge([*subject.launches, *again], batch=2 * subject.truth["batch"])


@DEVICES.add("The last layer's rows are from another kind of GPU, with the same index.", kinds=COUNTERS)
def rows_of_another_device(subject: Subject) -> Forged:
    block = subject.forward.slice(subject.forward.layers - 1)
    return subject.forge(
        _rename_row(one, _A100) if block.start <= index < block.stop else one
        for index, one in enumerate(subject.launches)
    )


@DEVICES.add("The GPU's name is that of an A100, with an H200's number of SMs and kernels.")
def other_device_name(subject: Subject) -> Forged:
    return _forge_document(subject, _rename_device(subject.document, _A100))


@DEVICES.add(
    "The GPU's name is that of an H100 with the same chip.",
    undetectable="both have the same chip and run the same kernels; only memory traffic above an H100's limit differs",
)
def sibling_device_name(subject: Subject) -> Forged:
    return _forge_document(subject, _rename_device(subject.document, _H100))


# --- Large numbers

_LARGEST = 2**31 - 1


def _enlarge(subject: Subject, *, products: bool, others: bool, grid: tuple[int, int, int]) -> Forged:
    """Claim only what needs a search for the sizes."""
    kernels = [replace(one, grid=grid) if (products if is_gemm(one) else others) else one for one in subject.launches]
    document = subject.document.with_launches(kernels)
    claim = {"num_layers": subject.truth["num_layers"], "d_ff": subject.truth["d_ff"]}
    return Forged(files=((document.file, document.write()),), claim=claim)


@LARGE.add("All grids are as large as CUDA allows.", exhausts=True)
def largest_grids(subject: Subject) -> Forged:
    return _enlarge(subject, products=True, others=True, grid=(_LARGEST, 65535, 65535))


@LARGE.add("The grids of GEMMs are as large as CUDA allows.", exhausts=True)
def largest_product_grids(subject: Subject) -> Forged:
    return _enlarge(subject, products=True, others=False, grid=(_LARGEST, 1, 1))


@LARGE.add("The grids of all other kernels are as large as CUDA allows.", exhausts=True)
def largest_other_grids(subject: Subject) -> Forged:
    return _enlarge(subject, products=False, others=True, grid=(_LARGEST, 1, 1))


@LARGE.add("All grids have 720,720 blocks, a number with 240 divisors.", exhausts=True)
def divisible_grids(subject: Subject) -> Forged:
    return _enlarge(subject, products=True, others=True, grid=(720_720, 1, 1))


@LARGE.add("The grids of all kernels but GEMMs have 735,134,400 blocks, a number with 1,344 divisors.", exhausts=True)
def divisible_other_grids(subject: Subject) -> Forged:
    return _enlarge(subject, products=False, others=True, grid=(735_134_400, 1, 1))


def _add_tokens(subject: Subject, tokens: int, *, counted: bool) -> Forged:
    """Scale everything that grows with the number of tokens, except attention, whose grid then has to be searched for.
    GEMMs of a trace are often persistent, so their grids stay; their counters grow."""
    share = tokens / (subject.truth["batch"] * subject.truth["context"])

    def grow(one: Launch) -> Launch:
        x, y, z = one.grid
        kind = decode(one.name).kernel_class
        keeps_grid = kind == "attention" or (kind == "GEMM" and not counted)
        grid = one.grid if keeps_grid else (min(_LARGEST, max(1, round(x * share))), y, z)
        return replace(one.scale(share, *_ALL_COUNTERS) if kind != "attention" else one, grid=grid)

    document = subject.document.with_launches(map(grow, subject.launches))
    claim = {"num_layers": subject.truth["num_layers"], "d_ff": subject.truth["d_ff"]}
    return Forged(files=((document.file, document.write()),), claim=claim)


@LARGE.add("Norms, lookups and elementwise kernels are those of 2^24 tokens.", exhausts=True)
def many_tokens(subject: Subject) -> Forged:
    return _add_tokens(subject, 2**24, counted=False)


@LARGE.add(
    "Norms, lookups and elementwise kernels are those of 14,414,400 tokens, which has 504 divisors.", exhausts=True
)
def divisible_tokens(subject: Subject) -> Forged:
    return _add_tokens(subject, 14_414_400, counted=False)


@LARGE.add("All kernels but attention are those of 720,720 tokens, which has 240 divisors.", exhausts=True)
def divisible_tokens_in_products(subject: Subject) -> Forged:
    return _add_tokens(subject, 720_720, counted=True)


@LARGE.add("Every counter is 10^18.", kinds=COUNTERS, exhausts=True)
def largest_counters(subject: Subject) -> Forged:
    claim = {"num_layers": subject.truth["num_layers"], "d_ff": subject.truth["d_ff"]}
    kernels = [replace(one, counters=dict.fromkeys(one.counters, 1e18)) for one in subject.launches]
    document = subject.document.with_launches(kernels)
    return Forged(files=((document.file, document.write()),), claim=claim)


@LARGE.add("The layers are pasted again until the file has 5,000 kernels.", exhausts=True)
def many_layers(subject: Subject) -> Forged:
    region = subject.forward
    copies = 5_000 // (region.period * region.layers)
    block = subject.launches[region.start : region.end]
    kernels = [*subject.launches[: region.end], *(one for _ in range(copies) for one in block)]
    layers = subject.truth["num_layers"] + copies * region.layers
    return subject.forge([*kernels, *subject.launches[region.end :]], num_layers=layers)
