"""Synthetic runs: the kernels that a model of any size would launch, scaled from a recorded pass.

Names and order are those of a recording. Its element counts are attributed to tensors and computed again for other
sizes; GEMMs and attention are launched as their libraries do. At the recorded sizes the result must equal the
recording, which a test checks. The rules are implemented here independently of the tested code.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

import msgspec

from stepscope.explain.kernel_names import decode
from stepscope.recover.evidence.order import is_product
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.facts import Sighting, Triple
from tests.unit.recover.evidence_runs import read_evidence, truth_of

SMS = 132
_LIKE = Sighting(index=0, name=decode("nvjet"), grid=(1, 1, 1), block=(384, 1, 1))
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Tiles (columns by rows) and clusters from nvjet names.
_NVJET = (
    "nvjet_sm90_tst_64x152_64x7_2x4_h_bz_bias_NNT",
    "nvjet_sm90_tst_64x64_64x13_4x2_h_bz_bias_NNT",
    "nvjet_sm90_tst_128x104_64x7_4x2_h_bz_bias_NNT",
    "nvjet_sm90_tst_64x40_64x16_2x4_h_bz_bias_TNT",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
    "nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT",
    "nvjet_sm90_tst_96x64_64x10_1x2_h_bz_TNN",
    "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT",
    "nvjet_sm90_tst_128x168_64x5_4x2_h_bz_TNT",
    "nvjet_sm90_tst_64x48_64x15_2x4_h_bz_TNT",
)
_XMMA = (
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize{}x{}x8_stage3_warpsize1x4x1"
    "_ffma_aligna4_alignc4_execute_kernel__5x_cublas"
)
_XMMA_TILES = ((64, 64), (64, 128), (32, 32), (128, 128))
_ALIGNED_ODD = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_128x128_tn_align1>(T1::Params)"
_SIMT_ODD = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x128_8x4_nt_align1>(T1::Params)"
_NVJET_PARTS = re.compile(r"_(\d+)x(\d+)_(\d+)x\d+_(\d+)x(\d+)_[hv]_")
_OPAQUE = re.compile(r"OpaqueType<(?:\(unsigned int\))?(\d+)u?>")
_STRIDED = re.compile(r"elementwise_kernel(?:_manual_unroll)?<(?:\(int\))?128, (?:\(int\))?(\d+),")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    batch: int
    context: int
    dtype: str = "bf16"

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    @property
    def query_width(self) -> int:
        return self.num_heads * self.d_head

    @property
    def key_width(self) -> int:
        return self.num_kv_heads * self.d_head


def model_of(file: str) -> Model:
    truth = truth_of(file)
    return Model(**{name: truth[name] for name in Model.__dataclass_fields__})


def _counts(model: Model, zone: str) -> dict[str, int]:
    """Return what the elements of a tensor can be, most likely first."""
    tokens, context = model.tokens, model.context
    query, key = tokens * model.query_width, tokens * model.key_width
    match zone:
        case "heads" | "merge":
            return {"of queries": query, "of keys": key, "half of queries": query // 2, "half of keys": key // 2}
        case "feed_forward":
            return {"inner": tokens * model.d_ff}
        case "before":
            return {
                "stream": tokens * model.d_model,
                "rotary": context * model.d_head,
                "half rotary": context * model.d_head // 2,
                "positions": context * model.d_model,
                "tokens": tokens,
                "packed": tokens + model.batch,
                "context": context,
                "half head": model.d_head // 2,
                "batch": model.batch,
            }
    return {"stream": tokens * model.d_model, "tokens": tokens}


@dataclass(frozen=True, slots=True)
class _Part:
    """A kernel of the recording: a GEMM role, attention, or the count that it depends on."""

    sighting: Sighting
    role: str
    zone: str = ""
    bytes_each: int = 0


@cache
def _template(file: str) -> dict[str, list[_Part]]:
    """The parts before the layers, of a layer, and after the layers."""
    sightings = read_evidence(file).sightings
    structure = find_structure(sightings)
    (attentions,) = structure.layer_indices
    reading = structure.readings[0]
    head = reading.products["head"].index
    period = attentions[1] - attentions[0]
    last = head - len(reading.zones["final"]) - 1  # the last GEMM of the last layer
    end = last + 1 + (len(reading.zones["between"]) - _norm_length(reading.zones["between"]))
    start = end - period * len(attentions)
    roles = {(one.index - start) % period: role for role, one in reading.products.items() if role != "head"}
    zones = {one.index: zone for zone, ones in reading.zones.items() for one in ones}
    model = model_of(file)

    def part(sighting: Sighting, zone: str) -> _Part | None:
        stored = sighting.counters.get("store_bytes", 0)
        for name, count in _counts(model, zone).items():
            if sighting.name.kernel_class == "norm":
                return _Part(sighting, "norm", zone)
            if stored and count and stored % count == 0 and stored // count in _sizes(sighting, model):
                return _Part(sighting, name, zone, stored // count)
        return None

    def part_of_layer(sighting: Sighting) -> _Part | None:
        place = sighting.index - start
        if is_product(sighting):
            return _Part(sighting, roles[place])
        if sighting.name.kernel_class == "attention":
            return _Part(sighting, "attention")
        return part(sighting, zones.get(sighting.index) or zones.get(sighting.index + period) or "between")

    layer = [part_of_layer(one) for one in sightings[start : start + period]]
    before = [part(one, "before") for one in sightings[:start] if not is_product(one)]
    final = [part(one, "final") for one in sightings[end:head]]
    after: list[_Part | None] = [_Part(reading.products["head"], "head")]
    found = {"before": before, "layer": layer, "final": final, "head": after}
    return {name: [one for one in parts if one is not None] for name, parts in found.items()}


def _sizes(sighting: Sighting, model: Model) -> tuple[int, ...]:
    """Return the bytes per element."""
    short = sighting.name.short
    if sighting.name.operation == "compare":
        return (1,)
    if found := _OPAQUE.search(sighting.name.name):
        return (int(found[1]),)
    return (8,) if "int64" in short else (4,) if "fp32" in short else (_BYTES[model.dtype],)


def _norm_length(kernels: tuple[Sighting, ...]) -> int:
    """Return the kernels of a norm, which belongs to the next layer. The first ones add to the residual stream."""
    adds = [i for i, one in enumerate(kernels) if one.name.operation == "add"]
    return len(kernels) - (adds[0] + 1 if adds else 0)


Change = Callable[[str, list[Sighting]], Iterable[Sighting]]  # from a part's role and kernels to those that run instead


def launch(model: Model, file: str, *, seed: int | None = 0, counted: bool = True) -> KernelEvidence:
    """Return the run. `seed` chooses the GEMM tiles; None keeps those of the recording."""
    return collect(launch_parts(model, file, ("before", "layers", "final", "head"), seed=seed), counted=counted)


def launch_parts(
    model: Model, file: str, names: Iterable[str], *, seed: int | None = 0, change: Change = lambda _, made: made
) -> list[Sighting]:
    """Return the kernels of these parts of a run: before, layers, attention (the first half of each), final, head."""
    parts = _template(file)
    found = {**parts, "layers": parts["layer"] * model.num_layers, "attention": _attention_half(parts["layer"])}
    choice = None if seed is None else random.Random(seed)
    tiles: dict[str, str] = {}
    return [
        one
        for name in names
        for part in found[name]
        for one in change(part.role, list(_scale(part, model, tiles, choice)))
    ]


def _attention_half(layer: list[_Part]) -> list[_Part]:
    """Return the parts up to the sum with the residual stream after the output projection."""
    output = next(place for place, part in enumerate(layer) if part.role == "output")
    return layer[: output + 2]


def collect(made: Iterable[Sighting], *, counted: bool = True) -> KernelEvidence:
    # No two launches take the same time.
    numbered = tuple(
        msgspec.structs.replace(
            one,
            index=index,
            launch=index,
            start_ns=None,
            duration_ns=one.duration_ns + index * index % 401,
            counters=one.counters if counted else {},
            tensor_dtypes={},
            noise={},
        )
        for index, one in enumerate(made)
    )
    return KernelEvidence(source="nsight compute", file="made", sightings=numbered, device_sms=SMS)


def _scale(part: _Part, model: Model, tiles: dict[str, str], choice: random.Random | None) -> Iterator[Sighting]:
    one = part.sighting
    if part.role == "attention":
        yield _attend(one, model)
    elif sizes := _product_sizes(model).get(part.role):
        if part.role not in tiles:
            tiles[part.role] = one.name.name if choice is None else _choose(part.role, model, choice)
        yield multiply(tiles[part.role], *sizes, one)
    elif part.role == "norm":
        each = _BYTES[model.dtype]
        yield _again(one, (model.tokens, 1, 1), one.block, model.tokens * (model.d_model * each + 8))
    else:
        count = _counts(model, part.zone)[part.role]
        yield _move(one, count, part.bytes_each, model)


def _product_sizes(model: Model) -> dict[str, tuple[int, int, int]]:
    """Return rows, columns and inner."""
    tokens, width, query, key = model.tokens, model.d_model, model.query_width, model.key_width
    return {
        "query_key_value": (tokens, query + 2 * key, width),
        "query": (tokens, query, width),
        "key": (tokens, key, width),
        "value": (tokens, key, width),
        "output": (tokens, width, query),
        "up": (tokens, model.d_ff, width),
        "gate": (tokens, model.d_ff, width),
        "down": (tokens, width, model.d_ff),
        "head": (tokens, model.vocab_size, width),
    }


def _choose(role: str, model: Model, choice: random.Random) -> str:
    _, columns, inner = _product_sizes(model)[role]
    if model.dtype == "fp32":
        return _SIMT_ODD if columns % 4 or inner % 4 else _XMMA.format(*choice.choice(_XMMA_TILES))
    return _ALIGNED_ODD if columns % 8 or inner % 8 else choice.choice(_NVJET)


def multiply(name: str, rows: int, columns: int, inner: int, like: Sighting = _LIKE) -> Sighting:
    decoded = decode(name)
    tile = decoded.tile or (0, 0)
    if found := _NVJET_PARTS.search(name):
        across, down, depth, wide, high = (int(number) for number in found.groups())
        tiles_across = ceil(ceil(columns / across) / wide) * wide
        tiles_down = ceil(ceil(rows / down) / high) * high
        cluster = wide * high
        blocks = min(tiles_across * tiles_down, SMS // 2 * 2 if cluster <= 2 else 120)
        padded = ceil(inner / depth) * depth
        counters = {"tensor_ops": 2 * tiles_across * across * tiles_down * down * padded, "store_bytes": 0}
        if "_bias_" in name:
            counters["fadd"] = ceil(columns / across) * across * ceil(rows / down) * down
        return _product(decoded, (cluster, blocks // cluster, 1), like, counters)
    if "xmma" in name:
        grid = (ceil(rows / tile[0]), ceil(columns / tile[1]), 1)
        area = grid[0] * tile[0] * grid[1] * tile[1]
        counters = {"ffma": area * (ceil(inner / 8) * 8 + 1), "store_bytes": 4 * rows * columns}
        return _product(decoded, grid, like, counters)
    across, down = ceil(columns / tile[0]), ceil(rows / tile[1])
    strip = 8 if across >= 6 else 4 if across >= 3 else across
    area = across * tile[0] * down * tile[1]
    each = 4 if "simt" in name else 2
    work = {"ffma": area * ceil(inner / 8) * 8} if "simt" in name else {"tensor_ops": 2 * area * ceil(inner / 32) * 32}
    counters = {**work, "fmul": area, "store_bytes": each * rows * columns}
    return _product(decoded, (down * strip, ceil(across / strip), 1), like, counters)


def _product(name: object, grid: Triple, like: Sighting, counters: dict[str, int]) -> Sighting:
    return msgspec.structs.replace(
        like, name=name, grid=grid, registers=None, shared_bytes=None, counters=counters, told=None
    )


def _attend(one: Sighting, model: Model) -> Sighting:
    sequences, context = model.batch * model.num_heads, model.context
    if "fmha_cutlassF" in one.name.name:
        narrow = model.d_head <= 64
        name = one.name.name.replace(
            "64x64_rf", "64x64_rf" if narrow else "64x128_rf" if model.d_head <= 128 else "64x128_gmem"
        )
        stored = 4 * sequences * context * model.d_head
        grid = (ceil(context / 64), model.num_heads, model.batch)
        return msgspec.structs.replace(one, name=decode(name), grid=grid, counters={"store_bytes": stored})
    if "flash_fwd_kernel" in one.name.name or model.d_head > 128 or model.d_head % 8:
        return _attend_by_flash(one, model)
    width = 64 if model.d_head <= 64 else 128
    name = re.sub(r"64x128x\d+", f"64x128x{width}", one.name.name)
    tiles = ceil(context / 128)
    pairs = sum(min(tiles, ceil((tile + 1) * 128 / 128)) for tile in range(tiles))
    wanted = sequences * tiles
    counters = {"tensor_ops": 4 * pairs * 128 * 128 * width * sequences, "store_bytes": 0}
    return msgspec.structs.replace(one, name=decode(name), grid=(min(wanted, SMS), 1, 1), counters=counters)


_FLASH_TILES = {
    32: (128, 128),
    64: (128, 128),
    96: (128, 64),
    128: (128, 64),
    160: (128, 64),
    192: (128, 64),
    224: (128, 64),
    256: (128, 64),
}


def _attend_by_flash(one: Sighting, model: Model) -> Sighting:
    padded = ceil(model.d_head / 8) * 8
    width = next(size for size in _FLASH_TILES if padded <= size)
    queries, keys = _FLASH_TILES[width]
    even = model.context % queries == 0 and model.context % keys == 0
    flags = ", ".join(str(flag).lower() for flag in (False, True, False, False, even, padded == width, False, False))
    sizes = f"{width}, {queries}, {keys}, 4"
    common = f"Flash_kernel_traits<{sizes}, cutlass::bfloat16_t>"
    traits = f"Flash_fwd_kernel_traits<{sizes}, false, false, cutlass::bfloat16_t, {common} >"
    name = f"void pytorch_flash::flash_fwd_kernel<{traits}, {flags}>(pytorch_flash::Flash_fwd_params)"
    tiles = ceil(model.context / queries)
    across = ceil(model.context / keys)
    pairs = sum(min(across, ceil((tile + 1) * queries / keys)) for tile in range(tiles))
    sequences = model.batch * model.num_heads
    counters = {
        "tensor_ops": 4 * queries * keys * width * pairs * sequences,
        "store_bytes": sequences * model.context * (2 * padded + 4),
    }
    grid = (tiles, model.batch, model.num_heads)
    return msgspec.structs.replace(one, name=decode(name), grid=grid, block=(128, 1, 1), counters=counters)


def _move(one: Sighting, count: int, bytes_each: int, model: Model) -> Sighting:
    name, stored = one.name.name, count * bytes_each
    if "vectorized_gather" in name:
        width = model.d_model * _BYTES[model.dtype] // 16
        block = (min(256, ceil(width / 32) * 32), 1, 1)
        return _again(one, (count // model.d_model, ceil(width / 256), 1), block, stored)
    if "CatArrayBatchedCopy" in name:
        return _again(one, one.grid, one.block, stored)
    if "reduce_kernel" in name:
        return _again(one, (ceil(count / one.block[1]), 1, 1), one.block, stored)
    per_block = _per_block(name, one.block[0])
    return _again(one, (ceil(count / per_block), 1, 1), one.block, stored)


def _per_block(name: str, threads: int) -> int:
    if found := _STRIDED.search(name):
        return threads * int(found[1])
    if "elementwise_kernel_with_index" in name:
        return threads
    if "unrolled_elementwise_kernel" in name:
        return threads * 4
    return threads * 8


def _again(one: Sighting, grid: Triple, block: Triple, stored: int) -> Sighting:
    counters = {"store_bytes": stored, "tensor_ops": 0}
    return msgspec.structs.replace(one, grid=grid, block=block, counters=counters)
