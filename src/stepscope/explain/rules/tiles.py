"""Rules about the tiles of GEMMs: sizes that do not fit them, and waves that do not fill the GPU."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import polars as pl

from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, StepEvidence, ms
from stepscope.explain.rules.gemm import gemms, memory_bound, row_counts, without_attention
from stepscope.explain.rules.rule import Hit, Rule, count_per_step, grow_batch, settle, workload_of
from stepscope.explain.trace.roofline import least_ns
from stepscope.recording.nesting import look_up
from stepscope.recording.store import Manifest
from stepscope.spec import ModelShape
from stepscope.units import say_percent

ALIGNED_BYTES = 16
PADDED_TO = 64
USUAL_ALIGNED_SHARE = 0.65  # of the peak, assumed if the recording has no aligned GEMM to compare with
LEAST_PADDING = 0.15
LEAST_TAIL = 0.10
MOST_WAVES = 6
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp8": 1}
_ALIGNMENT = re.compile(r"align[abc]?(\d+)")
# Where the size of a GEMM comes from. Only a vocabulary can be padded without changing what the model computes.
_VOCABULARY, _ROWS, _WIDTH, _BATCHED = "vocabulary", "rows", "width", "batched"
_SAY_ORIGIN = {
    _VOCABULARY: "the vocabulary",
    _ROWS: "the number of rows, batch × length",
    _WIDTH: "a width of the model",
    _BATCHED: "a size of a batched GEMM",
}
_ACTIONS = {
    _ROWS: "Choose batch × length to fill the tiles",
    _WIDTH: "Choose widths that are multiples of 64 in the next model",
    _BATCHED: "",
}
# What one multiprocessor holds: threads, and KiB of shared memory that all of its blocks share. By GPU name.
_REGISTERS, _MOST_BLOCKS = 65_536, 32
_MULTIPROCESSORS = (
    (r"H100|H200|B200", 2_048, 228),
    (r"A100", 2_048, 164),
    (r"V100", 2_048, 96),
    (r"L40S|RTX [34]0", 1_536, 100),
    (r"RTX 20|T4", 1_024, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Misfit:
    """One kernel whose size does not fit: which size (m, n or k), its value, why, and the time with a size that
    fits."""

    row: int
    sizes: tuple[int, int, int]
    letter: str
    size: int
    why: str
    origin: str
    lost_ns: float


def find_odd_sizes(evidence: StepEvidence) -> Hit | None:
    misfits = _find_misfits(evidence)
    padded = [one for one in misfits if one.origin == _VOCABULARY]
    others = [one for one in misfits if one.origin != _VOCABULARY]
    chosen = padded if sum(one.lost_ns for one in padded) >= sum(one.lost_ns for one in others) else others
    if not chosen:
        return None
    lost = {one.row: one.lost_ns for one in chosen}
    new = evidence.durations.copy()
    time = new[list(lost)].sum() / evidence.num_steps
    new[list(lost)] -= list(lost.values())
    gain = evidence.gain_of(new)
    worst = _name_costliest(chosen)
    text = (
        f"the costliest is {' × '.join(map(str, worst.sizes))} (M × N × K): {worst.letter.upper()}, "
        f"{_SAY_ORIGIN[worst.origin]}, {worst.why}; together they take {ms(time)}, with sizes that fit about "
        f"{ms(time - gain.gpu_ns)}"
    )
    hit = settle(
        evidence, gain, text, title=f"Sizes do not fit the tiles: {count_per_step(evidence, len(lost), 'GEMM')}"
    )
    if hit is None:
        return None
    if worst.origin != _VOCABULARY:
        return replace(hit, action=_ACTIONS[worst.origin], paste="")
    size = PADDED_TO * math.ceil(worst.size / PADDED_TO)
    paste = f"vocab = {size}  # not {worst.size}: a multiple of {PADDED_TO}; no token has the extra numbers"
    return replace(hit, action=f"Pad the vocabulary to {size}", paste=paste)


def _find_misfits(evidence: StepEvidence) -> list[_Misfit]:
    every = gemms(evidence)
    products = every.filter(
        pl.col("m").is_not_null()
        & (pl.col("flops") > 0)
        & pl.col("dtype").is_in(list(_ELEMENT_BYTES))
        & pl.col("tensor_cores").fill_null(value=True)
    )
    products = without_attention(evidence, products)
    # Arithmetic that is left out does not shorten a memory-bound GEMM: see SS015.
    products = products.filter(~pl.col("row").is_in(memory_bound(evidence, products)["row"].implode()))
    strides = look_up(evidence.profile.ops, "strides", products["op_row"])
    products = products.with_columns(strides=strides)
    keys = ["name", "dtype", "op", "shapes", "strides"]
    distinct = products.select(*keys, "m", "n", "k").unique(keys, maintain_order=True)
    odd = [_unaligned(row) for row in distinct.iter_rows(named=True)]
    marks = distinct.select(keys).with_columns(odd=pl.Series(odd, dtype=pl.String))
    products = products.join(marks, on=keys, how="left", nulls_equal=True, maintain_order="left")
    speeds = {
        key: _aligned_speed(evidence, products, *key)
        for key in products.filter(pl.col("odd") != "").select("dtype", "flops").unique().rows()
    }
    rows, vocabularies = set(row_counts(every)), _find_vocabularies(evidence)
    misfits = []
    for row in products.iter_rows(named=True):
        if row["odd"]:
            better, letter = _aligned_ns(evidence, row, speeds[row["dtype"], row["flops"]]), row["odd"]
            why = f"is {row[letter]}, not a multiple of {ALIGNED_BYTES // _ELEMENT_BYTES[row['dtype']]}"
        else:
            better, letter, why = _unpadded(evidence, row)
        if better is None or better >= row["time_ns"]:
            continue
        if row["batched"]:
            origin = _BATCHED
        elif row[letter] in vocabularies:
            origin = _VOCABULARY
        else:
            origin = _ROWS if row[letter] in rows else _WIDTH
        misfits.append(
            _Misfit(
                row=row["row"],
                sizes=(row["m"], row["n"], row["k"]),
                letter=letter,
                size=row[letter],
                why=why,
                origin=origin,
                lost_ns=row["time_ns"] - better,
            )
        )
    return misfits


def _name_costliest(misfits: Sequence[_Misfit]) -> _Misfit:
    """Return one of the kernels whose size costs most in total."""
    lost: dict[tuple[object, ...], float] = {}
    for one in misfits:
        key = (one.sizes, one.letter)
        lost[key] = lost.get(key, 0.0) + one.lost_ns
    return max(misfits, key=lambda one: (lost[one.sizes, one.letter], one.sizes, one.letter, -one.row))


def _find_vocabularies(evidence: StepEvidence) -> set[int]:
    """Return the sizes that are vocabularies: that of the case, and the rows of embeddings."""
    model = evidence.case.workload.model if evidence.case else None
    found = {model.vocab} if isinstance(model, ModelShape) else set()
    ops = evidence.profile.ops.filter(pl.col("shapes").is_not_null())
    for shapes in ops.filter(pl.col("name") == "aten::embedding")["shapes"].unique().to_list():
        first = (msgspec.json.decode(shapes) or [[]])[0]
        if len(first) > 1 and isinstance(first[0], int):
            found.add(first[0])
    return found


def _unaligned(row: dict[str, Any]) -> str:
    """Return which size keeps the kernel from loading or storing 16 bytes at a time: m, n or k, empty if none does.

    Only the size along which memory is contiguous matters: the number of rows of a row-major matrix may be odd. Without
    recorded strides, matrices are taken to be row-major, as the inputs and results of linear layers are.
    """
    multiple = ALIGNED_BYTES // _ELEMENT_BYTES[row["dtype"]]
    named = [int(number) for number in _ALIGNMENT.findall(row["name"])]
    if named and min(named) >= multiple:
        return ""
    letters = [*_contiguous(row["op"], row["strides"]), "n"]
    return next((one for one in letters if row[one] > 1 and row[one] % multiple), "")


def _contiguous(op: str, strides: str | None) -> tuple[str, str]:
    """Return the contiguous size of both operands, that of row-major ones if strides are unknown."""
    recorded = msgspec.json.decode(strides) if strides else []
    place = 1 if op.rpartition("::")[2] in ("addmm", "baddbmm") else 0
    left, right = [*recorded[place : place + 2], [], []][:2]
    is_transposed = [len(one) > 1 and one[-2] == 1 != one[-1] for one in (left, right)]
    return ("m" if is_transposed[0] else "k", "k" if is_transposed[1] else "n")


def _aligned_speed(evidence: StepEvidence, products: pl.DataFrame, dtype: str, flops: float) -> float | None:
    """Return the FLOP/ns of the fastest aligned GEMM with at least half as many FLOPs."""
    like = products.filter(
        (pl.col("odd") == "") & (pl.col("dtype") == dtype) & (pl.col("flops") >= flops / 2) & (pl.col("time_ns") > 0)
    )
    best = (like["flops"] / like["time_ns"]).max()
    peak = evidence.hardware.peak_flops.get(dtype) if evidence.hardware else None
    if isinstance(best, float):
        return best
    return peak * USUAL_ALIGNED_SHARE * 1e-9 if peak else None


def _aligned_ns(evidence: StepEvidence, row: dict[str, Any], speed: float | None) -> float | None:
    """Return the time of the padded GEMM at `speed`, and at least the time that its bytes take."""
    if speed is None:
        return None
    m, n, k = (PADDED_TO * math.ceil(row[size] / PADDED_TO) if row[size] > PADDED_TO else row[size] for size in "mnk")
    limit = least_ns(evidence.hardware, str(row["dtype"]), 0, row["bytes"]) or 0.0
    return float(max(row["flops"] * (m * n * k) / (row["m"] * row["n"] * row["k"]) / speed, limit / BANDWIDTH_SHARE))


def _unpadded(evidence: StepEvidence, row: dict[str, Any]) -> tuple[float | None, str, str]:
    """Return the time without the part of the tiles outside the result, and at least the time that its bytes take, None
    if that part is small, the size that leaves most of it empty, and why."""
    if not row["tile_m"] or not row["tile_n"]:
        return None, "", ""
    # Libraries compute a row-major result as the transpose of a column-major one, so either size may come first.
    tiles = max(
        ((row["tile_m"], row["tile_n"]), (row["tile_n"], row["tile_m"])),
        key=lambda pair: _fill(row["m"], pair[0]) * _fill(row["n"], pair[1]),
    )
    filled = {"m": _fill(row["m"], tiles[0]), "n": _fill(row["n"], tiles[1])}
    useful = math.prod(filled.values())
    letter = min(filled, key=lambda one: filled[one])
    tile = tiles["mn".index(letter)]
    why = f"is {row[letter]} and leaves {say_percent(1 - filled[letter])} of its tiles of {tile} empty"
    limit = least_ns(evidence.hardware, str(row["dtype"]), 0, row["bytes"]) or 0.0
    better = max(row["time_ns"] * useful, limit / BANDWIDTH_SHARE)
    return (None if 1 - useful < LEAST_PADDING else better), letter, why


def _fill(size: int, tile: int) -> float:
    return size / (tile * math.ceil(size / tile))


def find_empty_waves(evidence: StepEvidence) -> Hit | None:
    multiprocessors = evidence.profile.recording.manifest.device_sms
    name = evidence.hardware.name if evidence.hardware else ""
    limits = next(((threads, kib) for known, threads, kib in _MULTIPROCESSORS if re.search(known, name)), None)
    if not multiprocessors or limits is None:
        return None
    new = evidence.durations.copy()
    lost: dict[tuple[str, float], float] = {}
    count = 0
    for row in without_attention(evidence, gemms(evidence)).iter_rows(named=True):
        waves = _waves(row, multiprocessors, *limits)
        if waves is None or not 1 < waves <= MOST_WAVES:
            continue
        filled = waves / math.ceil(waves)
        if 1 - filled >= LEAST_TAIL:
            new[row["row"]] *= filled
            key = (row["short"], waves)
            lost[key] = lost.get(key, 0.0) + row["time_ns"] * (1 - filled)
            count += 1
    if not lost:
        return None
    gain = evidence.gain_of(new)
    short, waves = max(lost, key=lambda key: (lost[key], key))
    text = (
        f"the costliest, {short}, makes {waves:.2f} waves on {multiprocessors} multiprocessors, so its last wave is "
        f"{say_percent(waves - math.floor(waves))} full; this costs up to {ms(gain.gpu_ns)} of GPU time"
    )
    return settle(evidence, gain, text, title=f"Last wave partly empty: {count_per_step(evidence, count, 'GEMM')}")


def _waves(row: dict[str, Any], multiprocessors: int, threads: int, shared_kib: int) -> float | None:
    """Return the number of waves: from the tiles of the result if a persistent kernel (as many blocks as
    multiprocessors) works through them, otherwise from its blocks and how many fit on a multiprocessor at once."""
    grid, block = (
        math.prod(int(row[f"{name}_{axis}"] or 1) for axis in "xyz") if row[f"{name}_x"] else 0
        for name in ("grid", "block")
    )
    if not grid or not block:
        return None
    if grid <= multiprocessors:
        m, n, tile_m, tile_n = (row[key] for key in ("m", "n", "tile_m", "tile_n"))
        if not (m and n and tile_m and tile_n) or grid < 0.9 * multiprocessors:
            return None
        tiles = min(math.ceil(m / tile_m) * math.ceil(n / tile_n), math.ceil(n / tile_m) * math.ceil(m / tile_n))
        return float((row["batch"] or 1) * tiles / grid)
    warps = math.ceil(block / 32)
    # Registers are given to warps 256 at a time, and the driver keeps 1 KiB of shared memory per block.
    registers = warps * 256 * math.ceil((row["registers"] or 0) * 32 / 256)
    fits = [
        threads // (32 * warps),
        _REGISTERS // registers if registers else _MOST_BLOCKS,
        shared_kib * 1024 // ((row["shared_bytes"] or 0) + 1024),
        _MOST_BLOCKS,
    ]
    return grid / (multiprocessors * max(1, min(fits)))


def _pad_vocabulary(manifest: Manifest) -> dict[str, object]:
    model = workload_of(manifest).model
    if not isinstance(model, ModelShape) or model.vocab % PADDED_TO == 0:
        return {}
    return {"model": msgspec.structs.replace(model, vocab=PADDED_TO * math.ceil(model.vocab / PADDED_TO))}


RULES = (
    Rule(
        code="SS009",
        title="GEMM sizes do not fit the tiles",
        action="Pad the vocabulary to a multiple of 64",
        check=find_odd_sizes,
        meaning="""GEMMs are computed in tiles and loaded 16 bytes at a time. A size that is not a multiple of 8 (in 16
            bits; 4 in TF32) needs slower loads and kernels, if memory is contiguous along it. With a size just above a
            multiple of the tile, the last tiles compute mostly padding. Only a vocabulary can be padded without
            changing the model: other sizes make this a remark.""",
        seen="""GEMMs on tensor cores with a size, contiguous in memory, that is not such a multiple, or whose tiles
            (from the kernel's name) are at least 15% empty. The GEMMs of unfused attention (SS004) and memory-bound
            ones (SS015) are left out. A size is the vocabulary if an embedding or a loss has it too.""",
        saving="""For unaligned sizes: the GEMM, padded to a multiple of 64, at the speed of the fastest aligned GEMM of
            its kind in the recording (65% of the peak if there is none). For partly filled tiles: the share of the
            padding. The result is replayed. In one check on a CPU-bound step the estimate was zero, and the fastest
            steps indeed took the same time (51.6 ms). The GPU time of unaligned sizes was not checked, because the
            kernels that cuBLAS has for them change between versions.""",
        builtin="--vocab 10048 instead of 10007: the next multiple of 64",
        own=(
            "vocab = 64 * math.ceil(vocab / 64)  # no token has the extra numbers",
            "# in a new model: widths and head dimensions that are multiples of 64",
        ),
        change=_pad_vocabulary,
    ),
    Rule(
        code="SS010",
        title="The last wave of a GEMM is partly empty",
        action="Let the compiler choose the tiles",
        check=find_empty_waves,
        meaning="""Thread blocks run in waves, each as large as the GPU can hold at once. 133 tiles on 132
            multiprocessors take as long as 264.""",
        seen="""GEMMs whose tiles make one to six waves, with at least 10% of all slots empty in the last one, on a GPU
            whose multiprocessors are known. The GEMMs of unfused attention are left out: see SS004.""",
        saving="""The empty share of their time. This is an upper bound: libraries split work along K to fill the last
            wave, and the result depends on all sizes together. Treat it as a reason to try, not as a promise.""",
        builtin="another --batch: batch × context decides the number of tiles",
        own=(
            (
                "# choose rows (batch × context) so that ceil(M / tile) × ceil(N / tile) is just below a multiple of "
                "the number of multiprocessors"
            ),
            "torch._inductor.config.max_autotune_gemm = True  # lets the compiler choose the tiles",
        ),
        paste='model = torch.compile(model, mode="max-autotune")  # chooses the tiles',
        change=grow_batch,
    ),
)
