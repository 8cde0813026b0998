"""Kernels that choose the experts of each token and group the tokens by expert, and the grouped GEMMs behind them.

From PyTorch's source; none of these launches was measured. A top-k runs one block per token, with a thread for every
expert, rounded up to whole warps. The kernel that prepares a grouped GEMM has one block with a thread for each group. A
histogram in shared memory has one number for each bin, and eight bytes more. Grouped GEMMs of CUTLASS are persistent:
their grid shows the GPU, but their work is that of whole tiles of every group.
"""

from stepscope.recover.facts import Groups, Product, Rows, Sighting, Window, at_least, at_most, exactly
from stepscope.recover.families.grids import WARP, is_flat, take_apart, type_bytes
from stepscope.recover.families.products import GROUPED, Tiling

_PREPARING = ("prepare_grouped_gemm_data", "populate_cublas_grouped_args_kernel")
_TOP_K = "gatherTopK"
_HISTOGRAM = "kernelHistogram1D"
_GUARD_BYTES = 8
_MOST_GROUPS = 1024
_MOST_THREADS = 1024  # of a top-k's block: wider rows take several steps
_MOST_BLOCKS = 65_535  # in the first dimension of a grid
_WIDEST_CLUSTER = 2


def read_routing(sighting: Sighting) -> Rows | Groups | None:
    anatomy, arguments = take_apart(sighting.name.name)
    if not is_flat(sighting):
        return None
    threads = sighting.block[0]
    if anatomy.base in _PREPARING and sighting.grid[0] == 1 and threads <= _MOST_GROUPS:
        return Groups(count=exactly(threads))
    if anatomy.base == _TOP_K and threads < _MOST_THREADS and sighting.grid[0] < _MOST_BLOCKS:
        return Rows(rows=exactly(sighting.grid[0]), width=Window(threads - WARP + 1, threads))
    if anatomy.base == _HISTOGRAM and sighting.shared_bytes:
        size = type_bytes(arguments[0]) if arguments else None
        bins, rest = divmod(sighting.shared_bytes - _GUARD_BYTES, size or 1)
        return Groups(count=exactly(bins)) if size and bins > 0 and not rest else None
    return None


def read_grouped(sighting: Sighting, groups: int) -> Product | None:
    """Return what a grouped GEMM allows: `rows` are those of all groups together, and each group is rounded up to whole
    tiles."""
    operations, tile = sighting.counters.get("tensor_ops"), sighting.name.tile
    if sighting.name.operation != GROUPED or not operations or tile is None or len(tile) < 3:
        return None
    tiling = Tiling(rows=tile[0] * _WIDEST_CLUSTER, columns=tile[1] * _WIDEST_CLUSTER, inner=tile[2])

    def padded(rows: int, columns: int, inner: int, _batch: int) -> int:
        return 2 * tiling.area(rows + groups * tiling.rows, columns) * tiling.pad_inner(inner)

    return Product(
        (
            at_most(lambda rows, columns, inner, _batch: 2 * rows * columns * inner, operations),
            at_least(padded, operations),
        )
    )
