"""Forgeries of kernel names, and busywork that the claim does not mention."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

from attack.documents import Launch
from attack.forgery import ALL, COUNTERS, FORWARD, TRACES, Family, redraw, renumber, replace_at
from attack.layers import adopt, other_run
from attack.subject import Forged, Subject, is_gemm
from stepscope.explain.kernel_names import decode

RENAMED = Family("renamed kernels")
BUSYWORK = Family("busywork")
_BF16_TO_FP16 = {
    "nvjet_sm90_tst": "nvjet_sm90_hsh",
    "bf16": "f16",
    "c10::BFloat16": "c10::Half",
    "cutlass::bfloat16_t": "cutlass::half_t",
    "__nv_bfloat16": "__half",
}
_FP16_TO_BF16 = {
    "nvjet_sm90_hsh": "nvjet_sm90_tst",
    "_f16_s": "_bf16_s",
    "gemm_f16": "gemm_bf16",
    "c10::Half": "c10::BFloat16",
    "cutlass::half_t": "cutlass::bfloat16_t",
    "__half": "__nv_bfloat16",
}
_TILE = re.compile(r"(?<=[_e])(\d+)x(\d+)(?=[_x])")


def _translate(launch: Launch, words: dict[str, str]) -> Launch:
    pattern = re.compile("|".join(map(re.escape, words)))
    return replace(launch, name=pattern.sub(lambda found: words[found[0]], launch.name))


def _other_half(subject: Subject, chosen: Callable[[Launch], bool]) -> Forged | None:
    """Rename kernels in bf16 to fp16, or the other way round, and claim that."""
    words, dtype = {"bf16": (_BF16_TO_FP16, "fp16"), "fp16": (_FP16_TO_BF16, "bf16")}.get(
        subject.truth["dtype"], ({}, "")
    )
    if not words:
        return None
    return subject.edit_all(lambda one: _translate(one, words) if chosen(one) else one, dtype=dtype)


@RENAMED.add("All names say fp16 instead of bf16 (or the other way round), but not the counters.", kinds=COUNTERS)
def other_dtype_in_counters(subject: Subject) -> Forged | None:
    return _other_half(subject, lambda _: True)


@RENAMED.add(
    "All names say fp16 instead of bf16 (or the other way round), and the counters of both change places.",
    kinds=COUNTERS,
    undetectable="both dtypes have the same size, tiles and speed, and names and counters agree",
)
def other_dtype_in_names_and_counters(subject: Subject) -> Forged | None:
    forged = _other_half(subject, lambda _: True)
    if forged is None:
        return None
    (file, content), *_ = forged.files
    header, rest = content.split(b"\n", 1)
    columns = {b"_src_bf16_dst_fp32.": b"_src_fp16.", b"_src_fp16.": b"_src_bf16_dst_fp32."}
    swapped = re.sub(b"|".join(map(re.escape, columns)), lambda found: columns[found[0]], header)
    return replace(forged, files=((file, swapped + b"\n" + rest),))


@RENAMED.add(
    "All names say fp16 instead of bf16 (or the other way round).",
    kinds=TRACES,
    undetectable="both dtypes have the same size, tiles and speed; in a trace only the names show which one it is",
)
def other_dtype_in_trace(subject: Subject) -> Forged | None:
    return _other_half(subject, lambda _: True)


@RENAMED.add("Only the names of GEMMs say fp16 instead of bf16 (or the other way round).")
def other_dtype_of_gemms(subject: Subject) -> Forged | None:
    forged = _other_half(subject, is_gemm)
    shows_dtype = subject.kind == "counters" or forged != _other_half(subject, lambda _: True)
    return forged if shows_dtype else None  # no other name has a dtype: the forgery above


@RENAMED.add("GEMMs in tf32 are renamed to those of fp32, which is claimed.")
def tf32_as_fp32(subject: Subject) -> Forged | None:
    if subject.truth["dtype"] != "tf32":
        return None
    words = {"_tf32f32_": "_f32f32_", "tensorop_s1688gemm": "simt_sgemm"}
    return subject.edit_all(lambda one: _translate(one, words), dtype="fp32")


@RENAMED.add("The name of a GEMM in every layer has twice the tile, and twice the d_ff is claimed.")
def larger_tile(subject: Subject) -> Forged | None:
    name = subject.launches[subject.longest_product].name
    tile = _TILE.search(name)
    if tile is None:
        return None
    wider = name[: tile.start()] + f"{2 * int(tile[1])}x{tile[2]}" + name[tile.end() :]
    return subject.edit_all(
        lambda one: replace(one, name=wider) if one.name == name else one, d_ff=2 * subject.truth["d_ff"]
    )


@RENAMED.add("All GEMMs have the name of one kernel of another library.")
def other_library(subject: Subject) -> Forged:
    name = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_64x3_tn_align2>(T1::Params)"
    dtype = "bf16" if subject.truth["dtype"] != "bf16" else None
    claimed = {"dtype": dtype} if dtype else {}
    return subject.edit_all(lambda one: replace(one, name=name) if is_gemm(one) else one, **claimed)


@RENAMED.add(
    "The names of attention kernels have twice the head size, and half of the heads are claimed.", kinds=COUNTERS
)
def larger_heads_in_counters(subject: Subject) -> Forged | None:
    return _widen_heads(subject)


@RENAMED.add(
    "The names of attention kernels have twice the head size, and half of the heads are claimed.",
    kinds=TRACES,
    undetectable="a persistent attention kernel has the same grid for all sizes; other traces refute it",
)
def larger_heads_in_trace(subject: Subject) -> Forged | None:
    return _widen_heads(subject)


def _widen_heads(subject: Subject) -> Forged | None:
    heads, kv_heads, width = (subject.truth[name] for name in ("num_heads", "num_kv_heads", "d_head"))
    if heads % 2 or kv_heads % 2:
        return None
    pattern = re.compile(rf"(?<=[x_<k]){width}(?=[_,])")

    def widen(one: Launch) -> Launch:
        is_attention = decode(one.name).kernel_class == "attention"
        return replace(one, name=pattern.sub(str(2 * width), one.name, count=1)) if is_attention else one

    return subject.edit_all(widen, num_heads=heads // 2, num_kv_heads=kv_heads // 2, d_head=2 * width)


@RENAMED.add("The attention of the last layer has the name of an elementwise kernel, and one layer fewer is claimed.")
def attention_renamed(subject: Subject) -> Forged | None:
    plain = next((one.name for one in subject.launches if decode(one.name).kernel_class == "elementwise"), None)
    block = subject.forward.slice(subject.forward.layers - 1)
    found = [
        index
        for index in range(block.start, block.stop)
        if decode(subject.launches[index].name).kernel_class == "attention"
    ]
    if plain is None or not found:
        return None
    return subject.edit(found[0], lambda one: replace(one, name=plain), num_layers=subject.truth["num_layers"] - 1)


def _hide_layer(subject: Subject, name: str) -> Forged | None:
    """Give the GEMMs and the attention of the last layer this name, and claim one layer fewer."""
    if subject.forward.layers < 2:
        return None  # of two compiled layers, only one is found
    block = subject.forward.slice(subject.forward.layers - 1)
    kernels = [
        replace(one, name=name)
        if block.start <= index < block.stop and decode(one.name).kernel_class in ("GEMM", "attention")
        else one
        for index, one in enumerate(subject.launches)
    ]
    return subject.forge(kernels, num_layers=subject.truth["num_layers"] - 1)


@RENAMED.add(
    "The last layer's GEMMs and attention have the name of a memset, and one layer fewer is claimed.", kinds=FORWARD
)
def layer_as_memset(subject: Subject) -> Forged | None:
    return _hide_layer(subject, "Memset (Device)")


@RENAMED.add(
    "The last layer's GEMMs and attention have the name of a sort, and one layer fewer is claimed.", kinds=FORWARD
)
def layer_as_sort(subject: Subject) -> Forged | None:
    return _hide_layer(subject, "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>(int)")


@RENAMED.add(
    "The last layer's GEMMs and attention have the name of a row sum, and one layer fewer is claimed.", kinds=FORWARD
)
def layer_as_sum(subject: Subject) -> Forged | None:
    functor = "at::native::func_wrapper_t<float, at::native::sum_functor<float> >"
    name = (
        f"void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, {functor}, unsigned int, float, 4> >(int)"
    )
    return _hide_layer(subject, name)


@RENAMED.add(
    "The last layer's GEMMs and attention have the name of a collective, and one layer fewer is claimed.", kinds=FORWARD
)
def layer_as_collective(subject: Subject) -> Forged | None:
    return _hide_layer(subject, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")


@RENAMED.add("A GEMM of one layer has an unknown name.")
def unknown_name(subject: Subject) -> Forged:
    return subject.edit(subject.longest_product, lambda one: replace(one, name="kernel_7f"))


# --- Busywork


def _dummy(subject: Subject, seed: str) -> Launch:
    return redraw([subject.launches[subject.longest_product]], seed)[0]


def _dummies(subject: Subject, number: int) -> list[Launch]:
    return [_dummy(subject, f"{n}") for n in range(number)]


@BUSYWORK.add("Every layer has one more GEMM.")
def gemm_in_each_layer(subject: Subject) -> Forged | None:
    if "gated" not in subject.claim:
        return None  # a layer with one more GEMM may have a gate, and nothing else is claimed
    name = subject.launches[subject.longest_product].name
    kernels: list[Launch] = []
    for index, one in enumerate(subject.launches):
        in_layer = any(region.start <= index < region.end for region in subject.regions)
        kernels += [one, *redraw([one], str(index))] if one.name == name and in_layer else [one]
    return subject.forge(renumber(kernels))


@BUSYWORK.add("GEMMs follow the LM head.")
def gemms_after_head(subject: Subject) -> Forged:
    head = subject.head
    return subject.forge(renumber(replace_at(subject.launches, head, subject.launches[head], *_dummies(subject, 4))))


@BUSYWORK.add("GEMMs that follow the LM head have durations that are too short to matter.")
def short_gemms_after_head(subject: Subject) -> Forged:
    head = subject.head
    short = [replace(_dummy(subject, f"{n}"), duration_ns=32) for n in range(4)]
    return subject.forge(renumber(replace_at(subject.launches, head, subject.launches[head], *short)))


@BUSYWORK.add(
    "GEMMs that took a tenth of the time follow the LM head, and the first kernel is so slow that they take little.",
    kinds=FORWARD,
)
def gemms_behind_a_slow_kernel(subject: Subject) -> Forged:
    head, spent = subject.head, sum(one.duration_ns for one in subject.launches)
    number = math.ceil(0.1 * spent / subject.launches[subject.longest_product].duration_ns)
    _, *kernels = replace_at(subject.launches, head, subject.launches[head], *_dummies(subject, number))
    return subject.forge(renumber([_slow_down(subject), *kernels]))


@BUSYWORK.add(
    "All kernels run again on another stream, and the first one is so slow that they take little of the time."
)
def stream_behind_a_slow_kernel(subject: Subject) -> Forged:
    last = subject.launches[-1]
    again = [
        replace(one, stream=one.stream + 4, number=last.number + 1 + index)
        for index, one in enumerate(redraw(subject.launches[:-1], "again"))
    ]
    return subject.forge(renumber([_slow_down(subject), *subject.launches[1:], *again]))


def _slow_down(subject: Subject) -> Launch:
    """Return the first kernel with a thousand times the duration of all together."""
    return replace(subject.launches[0], duration_ns=1000 * sum(one.duration_ns for one in subject.launches))


@BUSYWORK.add(
    "GEMMs follow the LM head, and a short collective on another stream suggests that ranks share the layers."
)
def gemms_behind_collectives(subject: Subject) -> Forged:
    head, start = subject.head, subject.forward.slice(subject.forward.layers - 1).start
    before = subject.launches[start]
    collective = replace(
        before,
        name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        grid=(2, 1, 1),
        block=(512, 1, 1),
        stream=before.stream + 4,
        duration_ns=1024,
        counters=dict.fromkeys(before.counters, 0.0),
    )
    busy = [_dummy(subject, f"{n}") for n in range(4)]
    kernels = renumber(replace_at(subject.launches, head, subject.launches[head], *busy))
    return subject.forge([*kernels[:start], replace(collective, start_ns=kernels[start].start_ns), *kernels[start:]])


@BUSYWORK.add("After the pass, a second one breaks off in a narrower layer.", kinds=FORWARD)
def narrower_partial_pass(subject: Subject) -> Forged:
    end, index = subject.forward.slice(0).stop, subject.products()[-1]
    again = redraw(subject.launches[:end], subject.name)
    x, y, z = again[index].grid
    again[index] = replace(again[index].scale(0.5, "sm__").slow_down(0.5), grid=(max(1, x // 2), y, z))
    return subject.forge(renumber([*subject.launches, *again]))


@BUSYWORK.add(
    "A GEMM after the LM head takes less than 1% of the time.",
    kinds=FORWARD,
    undetectable="models have small GEMMs of their own, so up to 1% of the time is allowed; such work is listed",
)
def small_gemm_after_head(subject: Subject) -> Forged:
    head = subject.head
    smallest = min((one for one in subject.launches if is_gemm(one)), key=lambda one: one.duration_ns)
    return subject.forge(renumber(replace_at(subject.launches, head, subject.launches[head], *redraw([smallest], "1"))))


@BUSYWORK.add("GEMMs run on another stream.")
def gemms_on_another_stream(subject: Subject) -> Forged:
    busy = [
        replace(
            _dummy(subject, f"{n}"), stream=subject.launches[0].stream + 4, number=subject.launches[-1].number + 1 + n
        )
        for n in range(max(4, len(subject.launches) // 10))
    ]
    return subject.forge([*subject.launches, *busy])


@BUSYWORK.add("Another, smaller model runs on another stream.")
def model_on_another_stream(subject: Subject) -> Forged:
    other = list(adopt(other_run(subject).launches, subject))[: len(subject.launches) // 2]
    stream, last = subject.launches[0].stream + 4, subject.launches[-1]
    busy = [
        replace(
            one,
            stream=stream,
            number=last.number + 1 + index,
            start_ns=last.start_ns + 1000 * index if last.start_ns else 0,
        )
        for index, one in enumerate(other)
    ]
    return subject.forge([*subject.launches, *busy])


@BUSYWORK.add("Every layer has an elementwise kernel over a tensor that the model does not have.")
def odd_tensor_in_each_layer(subject: Subject) -> Forged | None:
    plain = next((one for one in subject.launches if _is_large_elementwise(one)), None)
    if plain is None:
        return None
    odd = replace(plain.scale(977 / plain.grid[0], "sm__sass", "lts"), grid=(977, 1, 1))
    kernels: list[Launch] = []
    starts = {region.slice(layer).start for region in subject.regions for layer in range(region.layers)}
    for index, one in enumerate(subject.launches):
        kernels += [one, *redraw([odd], str(index))] if index in starts else [one]
    return subject.forge(renumber(kernels))


def _is_large_elementwise(launch: Launch) -> bool:
    return decode(launch.name).kernel_class == "elementwise" and launch.grid[0] > 100


@BUSYWORK.add(
    "A smaller model runs, and idle layers of the claimed shape bring the work up to the claim.",
    kinds=ALL,
    undetectable="the evidence is that of the claimed model; counters do not show whether a result was used",
)
def idle_layers(subject: Subject) -> Forged:
    return subject.forge(subject.launches)
