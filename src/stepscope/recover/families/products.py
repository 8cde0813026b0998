"""GEMMs: the sizes that a kernel's name, grid and counters allow.

Grids consist of tiles. Nsight Compute also counts the work: operations on the tensor cores, or fused multiply-adds in
kernels without them, and stored bytes. Work is that of whole tiles, so it determines a size only to within a tile.
Stored bytes are those of the result and determine it exactly, but kernels that store through Hopper's TMA (nvjet,
sm90_xmma) do not count them.

Rows and columns are those of a row-major result. A kernel cannot distinguish a GEMM from that of the transposed factors
in the other order: a caller that does not know which one ran must try both.
"""

import re
from collections.abc import Iterator

import msgspec

from stepscope.recording.readers.counter_metrics import CounterKey
from stepscope.recover.facts import Measure, Product, Sighting, SizeBound, Triple, at_least, at_most, equals

# --- How each library divides a GEMM into tiles, and tiles into thread blocks
#
# Measured with GEMMs of known sizes. cuBLAS is column-major and PyTorch row-major, and the names differ in which side
# of a tile comes first:
#
# - `nvjet_sm90_tst_96x64_64x10_1x2_…`: 96 columns by 64 rows, in clusters of 1 × 2 such tiles. Persistent: the grid is
#   one cluster wide and has as many clusters as there is work for, or as fit on the GPU.
# - `sm80_xmma_gemm_…_tilesize64x128x8_…`: 64 rows by 128 columns; the grid is (tiles down, tiles across, batch × K
#   splits).
# - `sm90_xmma_gemm_…_tilesize128x64x32_…`: persistent like nvjet; the clusters are not in the name.
# - `cutlass::Kernel2<cutlass_80_…_128x32_8x5_…>`: 128 columns by 32 rows, blocks in CUTLASS's order: strips of up to
#   eight tiles across, so that neighbors share what they read.
# - `splitKreduce_kernel<32, 16, …>`: 32 columns by 16 rows, and a thread may process several rows.

# Clusters of more than two blocks do not divide the GPCs evenly, so a full GPU may have fewer blocks than SMs: 120 of
# 132 in one measurement. A grid below this share was never limited by the GPU.
_FULLEST = 0.8
_CLUSTER = re.compile(r"_([1-9]\d?)x([1-9]\d?)_[hv](?:_|$)")


class Tiling(msgspec.Struct, frozen=True, kw_only=True):
    """A tile of the result, the step along K, and the cluster of tiles that are always computed together."""

    rows: int
    columns: int
    inner: int = 1
    cluster_rows: int = 1
    cluster_columns: int = 1

    def count_rows(self, rows: int) -> int:
        return -(-rows // self.rows)

    def count_columns(self, columns: int) -> int:
        return -(-columns // self.columns)

    def pad_inner(self, inner: int) -> int:
        return -(-inner // self.inner) * self.inner

    def area(self, rows: int, columns: int) -> int:
        """Return the elements of all tiles that contain part of the result."""
        return self.count_rows(rows) * self.rows * self.count_columns(columns) * self.columns

    def count_clustered(self, rows: int, columns: int) -> int:
        """Return the number of tiles, including those that fill up a cluster."""
        down = -(-self.count_rows(rows) // self.cluster_rows) * self.cluster_rows
        return down * (-(-self.count_columns(columns) // self.cluster_columns) * self.cluster_columns)

    def clustered_area(self, rows: int, columns: int) -> int:
        return self.count_clustered(rows, columns) * self.rows * self.columns


def find_cluster(name: str) -> tuple[int, int]:
    """Return the rows and columns of tiles in a cluster, from nvjet's name: the pair before the traversal direction."""
    found = _CLUSTER.search(name)
    return (int(found[2]), int(found[1])) if found else (1, 1)


def plain_grid(tiling: Tiling, grid: Triple) -> tuple[SizeBound, ...]:
    return (
        equals(lambda rows, _columns, _inner, _batch: tiling.count_rows(rows), grid[0]),
        equals(lambda _rows, columns, _inner, _batch: tiling.count_columns(columns), grid[1]),
    )


def striped_grid(tiling: Tiling, grid: Triple) -> tuple[SizeBound, ...]:
    """CUTLASS's block order. The grid's height decreases where strips get wider; its area never does."""

    def width(rows: int, columns: int, _inner: int, _batch: int) -> int:
        return tiling.count_rows(rows) * _strip(tiling.count_columns(columns))

    def area(rows: int, columns: int, inner: int, batch: int) -> int:
        across = tiling.count_columns(columns)
        return width(rows, columns, inner, batch) * -(-across // _strip(across))

    return equals(width, grid[0]), equals(area, grid[0] * grid[1])


def _strip(tiles_across: int) -> int:
    return 8 if tiles_across >= 6 else 4 if tiles_across >= 3 else 2 if tiles_across == 2 else 1


def asked_blocks(tiling: Tiling) -> Measure:
    """Return the number of blocks that a persistent kernel has work for."""
    return lambda rows, columns, _inner, batch: tiling.count_clustered(rows, columns) * batch


def persistent_grid(tiling: Tiling, grid: Triple, processors: int, *, clusters_known: bool) -> SizeBound:
    asked, blocks = asked_blocks(tiling), grid[0] * grid[1] * grid[2]
    full = is_full(tiling, grid, processors, clusters_known=clusters_known)
    return at_least(asked, blocks) if full else equals(asked, blocks)


def is_full(tiling: Tiling, grid: Triple, processors: int, *, clusters_known: bool) -> bool:
    """Whether the grid may have been limited by the size of the GPU."""
    # SMs come in pairs: with clusters of one or two blocks, a full GPU uses all of them.
    pairs = clusters_known and tiling.cluster_rows * tiling.cluster_columns <= 2
    fullest = processors - processors % 2 if pairs else int(_FULLEST * processors)
    return grid[0] * grid[1] * grid[2] >= fullest


# --- Which sizes a kernel allows

# Before CUDA 13, the names have no architecture. On an H100 these have the same grids.
_NVJET = re.compile(r"nvjet_(?:sm90_)?[a-z]{3,6}_(?:tf32_|mma_)?\d+x\d+_(?!\w*2cta)\w+")
_NVJET_BIAS = re.compile(r"_bias_[NT]{3}$")
_XMMA = re.compile(r"sm(\d{2,3})_xmma_gemm_(\w+)")
_FP32_XMMA = "_f32f32_f32f32_f32_"
_CUTLASS = re.compile(r"cutlass_(\d+)_(simt|tensorop|wmma_tensorop)_(\w+)")
_HALF_RESULT = re.compile(r"(?:b?f16_[shi]|h)\d*gemm_")
_HAND_NAMED = re.compile(r"(?:maxwell|volta|turing|ampere)_\w*gemm_")
_SUM_OF_PARTS = re.compile(r"splitKreduce_kernel<(?:\(int\))?([1-9]\d{0,3}), (?:\(int\))?([1-9]\d{0,3}),")
_DEPTHS = (8, 64)  # the smallest and largest K step, if the name does not show it
# The maximum number of tiles per cluster in each direction.
_WIDEST_CLUSTER = 4
# The longest tile in any direction: an upper bound for the padding of a kernel with unknown tiles.
_LONGEST_TILE = 512
GROUPED = "grouped GEMM"
_TMA_BYTES = 16  # TMA requires rows in multiples of this
_DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def read_product(sighting: Sighting, processors: int, *, portable: bool = False) -> Product | None:
    """Return what a GEMM kernel allows. `processors` is the number of SMs. `portable`: whatever the GPU."""
    text = sighting.name.name
    if sighting.name.kernel_class != "GEMM" or sighting.name.operation == GROUPED:
        return None
    if sighting.name.operation == "matrix times vector":
        return Product((at_most(lambda rows, columns, _inner, _batch: min(rows, columns), 1),))
    if portable:
        return None
    if found := _SUM_OF_PARTS.search(text):
        return _read_sum_of_parts(sighting, Tiling(rows=int(found[2]), columns=int(found[1])))
    tile = sighting.name.tile
    if tile is not None and len(tile) >= 2:
        if len(tile) > 2 and (found := _NVJET.search(text)):
            return _read_nvjet(sighting, found[0], tile, processors)
        if len(tile) > 2 and (found := _XMMA.search(text)):
            is_hopper = int(found[1]) == 90
            return _read_xmma_hopper(sighting, tile, processors) if is_hopper else _read_xmma(sighting, tile)
        if found := _CUTLASS.search(text):
            return _read_cutlass(sighting, found[0], tile)
        if _HAND_NAMED.match(text):
            return _read_one_tile_a_block(sighting, Tiling(rows=tile[0], columns=tile[1]))
    return _read_unknown(sighting)


def _read_nvjet(sighting: Sighting, name: str, tile: tuple[int, ...], processors: int) -> Product:
    down, across = find_cluster(name)
    tiling = Tiling(rows=tile[1], columns=tile[0], inner=tile[2], cluster_rows=down, cluster_columns=across)
    bounds: list[SizeBound] = []
    divisors: list[tuple[Measure, int]] = []
    asked, blocks = asked_blocks(tiling), sighting.grid[0] * sighting.grid[1] * sighting.grid[2]
    if not sighting.name.split_k:
        bounds.append(persistent_grid(tiling, sighting.grid, processors, clusters_known=True))
    elif not is_full(tiling, sighting.grid, processors, clusters_known=True):
        bounds.append(at_most(asked, blocks))
        divisors.append((asked, blocks))
    bounds.extend(_nvjet_work(sighting, tiling, blocks))
    # The epilogue skips tiles that only fill up clusters.
    if _NVJET_BIAS.search(name) and not sighting.name.split_k and (additions := _counter(sighting, "fadd")):
        bounds.append(equals(lambda rows, columns, _inner, batch: tiling.area(rows, columns) * batch, additions))
    return Product(tuple(bounds), tuple(divisors), _multiples(sighting))


def _nvjet_work(sighting: Sighting, tiling: Tiling, blocks: int) -> Iterator[SizeBound]:
    operations = _counter(sighting, "tensor_ops")
    if not operations:
        return

    def work(rows: int, columns: int, inner: int, batch: int) -> int:
        return 2 * tiling.clustered_area(rows, columns) * tiling.pad_inner(inner) * batch

    if not sighting.name.split_k:
        yield equals(work, operations)
        return
    # Every split is rounded up to whole steps, and there are at most as many splits as blocks.
    rounding = 2 * tiling.rows * tiling.columns * tiling.inner * blocks
    yield at_most(work, operations)
    yield at_least(lambda rows, columns, inner, batch: work(rows, columns, inner, batch) + rounding, operations)


def _multiples(sighting: Sighting) -> tuple[int, int, int]:
    """nvjet copies tiles by descriptor, which requires rows in multiples of 16 bytes: of the result, and of both
    factors along the side that the layout makes contiguous."""
    step = _TMA_BYTES // _DTYPE_BYTES.get(sighting.name.dtype or "", _TMA_BYTES)
    layout = sighting.name.layout or "nt"
    return step if layout[1] == "t" else 1, step, step if layout in ("tn", "nn", "tt") else 1


def _read_xmma(sighting: Sighting, tile: tuple[int, ...]) -> Product:
    tiling = Tiling(rows=tile[0], columns=tile[1], inner=tile[2] if len(tile) > 2 else 1)
    launched = sighting.grid[2]
    if _FP32_XMMA not in sighting.name.name:
        return _read_one_tile_a_block(sighting, tiling)
    bounds = list(plain_grid(tiling, sighting.grid))
    stored = _counter(sighting, "store_bytes")
    if "split_k_kernel" in sighting.name.name:
        if stored:
            bounds.append(equals(lambda rows, columns, _inner, batch: 4 * rows * columns * batch, stored))
        return Product(tuple(bounds))
    bounds.extend(_xmma_work(sighting, tiling))
    bounds.extend(_xmma_stores(stored, tiling, launched) if stored else ())
    return Product((*bounds, _batch_of(launched)), ((_batch_alone, launched),))


def _read_one_tile_a_block(sighting: Sighting, tiling: Tiling) -> Product:
    """For kernels with an unknown block order and tile orientation: each tile has at least one block."""
    turned = Tiling(rows=tiling.columns, columns=tiling.rows, inner=tiling.inner)
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]

    def tiles(rows: int, columns: int, _inner: int, batch: int) -> int:
        return batch * min(tiling.count_clustered(rows, columns), turned.count_clustered(rows, columns))

    known = _read_unknown(sighting)
    return Product((at_most(tiles, blocks), *(known.bounds if known else ())))


def _xmma_work(sighting: Sighting, tiling: Tiling) -> Iterator[SizeBound]:
    """Every element of every tile takes an fma for each step along K, rounded up to whole steps in every split, and one
    for the epilogue, unless a separate kernel adds the splits."""
    fused, launched = _counter(sighting, "ffma"), sighting.grid[2]
    if not fused:
        return

    def least(rows: int, columns: int, inner: int, batch: int) -> int:
        each = tiling.pad_inner(inner) + (1 if batch == launched else 0)
        return tiling.area(rows, columns) * each * batch

    def most(rows: int, columns: int, inner: int, batch: int) -> int:
        rounding = 0 if batch == launched else launched * tiling.inner
        return tiling.area(rows, columns) * ((tiling.pad_inner(inner) + 1) * batch + rounding)

    yield at_most(least, fused)
    yield at_least(most, fused)


def _xmma_stores(stored: int, tiling: Tiling, launched: int) -> Iterator[SizeBound]:
    """Splits are stored as whole tiles for a kernel that adds them; without one, the last split stores the result."""

    def least(rows: int, columns: int, _inner: int, batch: int) -> int:
        return 4 * (tiling.area(rows, columns) * (launched - batch) + rows * columns * batch)

    def most(rows: int, columns: int, _inner: int, batch: int) -> int:
        return 4 * (rows * columns if batch == launched else tiling.area(rows, columns)) * launched

    yield at_most(least, stored)
    yield at_least(most, stored)


def _read_xmma_hopper(sighting: Sighting, tile: tuple[int, ...], processors: int) -> Product:
    tiling = Tiling(rows=tile[0], columns=tile[1], inner=tile[2] if len(tile) > 2 else 1)
    widest = msgspec.structs.replace(tiling, cluster_rows=_WIDEST_CLUSTER, cluster_columns=_WIDEST_CLUSTER)
    blocks = sighting.grid[0] * sighting.grid[1] * sighting.grid[2]
    bounds = [at_least(asked_blocks(widest), blocks)]
    if not is_full(tiling, sighting.grid, processors, clusters_known=False):
        bounds.append(at_most(asked_blocks(tiling), blocks))
    bounds.extend(_tensor_work(sighting, widest, rounding=blocks if sighting.name.split_k else 0))
    return Product(tuple(bounds))


def _tensor_work(sighting: Sighting, tiling: Tiling, *, rounding: int) -> Iterator[SizeBound]:
    """For clusters or K steps of which only limits are known. `rounding` is the maximum number of K splits, each
    rounded up."""
    operations = _counter(sighting, "tensor_ops")
    if not operations:
        return
    finest, coarsest = (tiling.inner, tiling.inner) if tiling.inner > 1 else _DEPTHS
    padding = 2 * tiling.rows * tiling.columns * coarsest * rounding * _WIDEST_CLUSTER**2

    def least(rows: int, columns: int, inner: int, batch: int) -> int:
        return 2 * tiling.area(rows, columns) * (-(-inner // finest) * finest) * batch

    def most(rows: int, columns: int, inner: int, batch: int) -> int:
        padded = 2 * tiling.clustered_area(rows, columns) * (-(-inner // coarsest) * coarsest) * batch
        return padded + (padding * tiling.count_clustered(rows, columns) if rounding else 0)

    yield at_most(least, operations)
    yield at_least(most, operations)


def _read_cutlass(sighting: Sighting, name: str, tile: tuple[int, ...]) -> Product:
    tiling = Tiling(rows=tile[1], columns=tile[0], inner=tile[2] if len(tile) > 2 else 1)
    launched = sighting.grid[2]
    bounds = list(striped_grid(tiling, sighting.grid))
    if "_simt_sgemm_" in name:
        bounds.extend(_cutlass_work(sighting, tiling, launched))
    else:
        bounds.extend(_tensor_work(sighting, tiling, rounding=launched if launched > 1 else 0))
    # The epilogue scales every element of every split.
    if scaled := _counter(sighting, "fmul"):
        bounds.append(equals(lambda rows, columns, _inner, _batch: tiling.area(rows, columns) * launched, scaled))
    if stored := _counter(sighting, "store_bytes"):
        bounds.extend(_cutlass_stores(stored, tiling, launched, 2 if _HALF_RESULT.search(name) else 4))
    return Product((*bounds, _batch_of(launched)), ((_batch_alone, launched),))


def _cutlass_work(sighting: Sighting, tiling: Tiling, launched: int) -> Iterator[SizeBound]:
    """All splits but the last have whole steps. A split adds to the existing result if it has to."""
    fused = _counter(sighting, "ffma")
    if not fused:
        return

    def least(rows: int, columns: int, inner: int, batch: int) -> int:
        return tiling.area(rows, columns) * tiling.pad_inner(inner) * batch

    def most(rows: int, columns: int, inner: int, batch: int) -> int:
        return tiling.area(rows, columns) * (tiling.pad_inner(inner) * batch + launched)

    yield at_most(least, fused)
    yield at_least(most, fused)


def _cutlass_stores(stored: int, tiling: Tiling, launched: int, element_bytes: int) -> Iterator[SizeBound]:
    """Every split stores its result. If splits take turns, each tile also has a 4-byte semaphore."""

    def least(rows: int, columns: int, _inner: int, _batch: int) -> int:
        return element_bytes * rows * columns * launched

    def most(rows: int, columns: int, inner: int, batch: int) -> int:
        turns = tiling.count_clustered(rows, columns) * launched if batch < launched else 0
        return least(rows, columns, inner, batch) + 4 * turns

    yield at_most(least, stored)
    yield at_least(most, stored)


def _read_sum_of_parts(sighting: Sighting, tiling: Tiling) -> Product:
    """The sum of the splits of a GEMM. A thread may process several rows."""
    bounds = [
        equals(lambda _rows, columns, _inner, _batch: tiling.count_columns(columns), sighting.grid[0]),
        at_least(lambda rows, _columns, _inner, _batch: tiling.count_rows(rows), sighting.grid[1]),
    ]
    if stored := _counter(sighting, "store_bytes"):
        narrowest = 2 if re.search(r"half|bfloat16", sighting.name.name) else 4
        bounds.append(at_most(lambda rows, columns, _inner, batch: narrowest * rows * columns * batch, stored))
        bounds.append(at_least(lambda rows, columns, _inner, batch: 4 * rows * columns * batch, stored))
    return Product(tuple(bounds))


def _read_unknown(sighting: Sighting) -> Product | None:
    """A kernel with unknown tiles: its work is that of the sizes, padded by less than a tile."""
    work = _count_multiplications(sighting)
    if not work:
        return None

    def padded(rows: int, columns: int, inner: int, batch: int) -> int:
        return (rows + _LONGEST_TILE) * (columns + _LONGEST_TILE) * (inner + _LONGEST_TILE) * batch

    exact = at_most(lambda rows, columns, inner, batch: rows * columns * inner * batch, work)
    return Product((exact, at_least(padded, work)))


def _count_multiplications(sighting: Sighting) -> int:
    """Return the multiplications: half of the tensor core operations; in fp32 without tensor cores an fma, or a
    multiplication at the start of a sum."""
    if operations := _counter(sighting, "tensor_ops"):
        return 0 if sighting.name.dtype == "fp32" else operations // 2
    if sighting.name.tensor_cores is not False or sighting.name.dtype != "fp32":
        return 0
    fused = _counter(sighting, "ffma")
    return fused + (_counter(sighting, "fmul") or 0) if fused else 0


def _counter(sighting: Sighting, key: CounterKey) -> int | None:
    """Return None also for 0: the operations of another data type may not have been measured."""
    return sighting.counters.get(key) or None


def _batch_alone(_rows: int, _columns: int, _inner: int, batch: int) -> int:
    return batch


def _batch_of(launched: int) -> SizeBound:
    return at_most(_batch_alone, launched)
