"""How products are cut into tiles and tiles handed to thread blocks, library by library.

Found on products of known sizes. cuBLAS reckons in columns where PyTorch has rows, and its names differ in which side
of a tile stands first:

- `nvjet_sm90_tst_96x64_64x10_1x2_…`: 96 columns by 64 rows, in clusters of 1 × 2 such tiles. Persistent: the grid is
  one cluster wide and has as many clusters as there is work for, or as fit on the GPU.
- `sm80_xmma_gemm_…_tilesize64x128x8_…`: 64 rows by 128 columns; the grid is tiles down, tiles across, batch × parts of
  the summed dimension.
- `sm90_xmma_gemm_…_tilesize128x64x32_…`: persistent like nvjet, with clusters that the name does not tell.
- `cutlass::Kernel2<cutlass_80_…_128x32_8x5_…>`: 128 columns by 32 rows, blocks in CUTLASS's order: strips of up to
  eight tiles across, so that neighbours share what they read.
- `splitKreduce_kernel<32, 16, …>`: 32 columns by 16 rows, and a thread may take several rows.
"""

import re

import msgspec

from stepscope.recover.facts import Measure, SizeBound, Triple, at_least, equals

# The SMs of an H100 SXM, an H200 and a GH200.
PROCESSORS = 132
# In place of their number where nobody knows it: any grid may then have filled the GPU, and tells only the least.
UNKNOWN = 1
# Clusters of more than two blocks do not fit evenly into the groups of SMs, so that a full GPU may hold fewer blocks
# than it has SMs: 120 on 132 were seen. No grid below this share was cut short.
_FULLEST = 0.8
_CLUSTER = re.compile(r"_(\d+)x(\d+)_[hv](?:_|$)")


class Tiling(msgspec.Struct, frozen=True, kw_only=True):
    """A tile of the result, the step along the summed dimension, and tiles that are always computed together."""

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
        """Elements of the tiles that hold some of the result."""
        return self.count_rows(rows) * self.rows * self.count_columns(columns) * self.columns

    def count_clustered(self, rows: int, columns: int) -> int:
        """Tiles, with those that fill up a cluster."""
        down = -(-self.count_rows(rows) // self.cluster_rows) * self.cluster_rows
        return down * (-(-self.count_columns(columns) // self.cluster_columns) * self.cluster_columns)

    def clustered_area(self, rows: int, columns: int) -> int:
        return self.count_clustered(rows, columns) * self.rows * self.columns


def find_cluster(name: str) -> tuple[int, int]:
    """Tiles down and across of a cluster, from nvjet's name: the pair before the direction of the walk."""
    found = _CLUSTER.search(name)
    return (int(found[2]), int(found[1])) if found else (1, 1)


def plain_grid(tiling: Tiling, grid: Triple) -> tuple[SizeBound, ...]:
    return (
        equals(lambda rows, _columns, _inner, _batch: tiling.count_rows(rows), grid[0]),
        equals(lambda _rows, columns, _inner, _batch: tiling.count_columns(columns), grid[1]),
    )


def striped_grid(tiling: Tiling, grid: Triple) -> tuple[SizeBound, ...]:
    """CUTLASS's order of blocks. The grid's height falls where strips get wider; its area never does."""

    def width(rows: int, columns: int, _inner: int, _batch: int) -> int:
        return tiling.count_rows(rows) * _strip(tiling.count_columns(columns))

    def area(rows: int, columns: int, inner: int, batch: int) -> int:
        across = tiling.count_columns(columns)
        return width(rows, columns, inner, batch) * -(-across // _strip(across))

    return equals(width, grid[0]), equals(area, grid[0] * grid[1])


def _strip(tiles_across: int) -> int:
    return 8 if tiles_across >= 6 else 4 if tiles_across >= 3 else 2 if tiles_across == 2 else 1


def asked_blocks(tiling: Tiling) -> Measure:
    """The blocks that a persistent kernel has work for."""
    return lambda rows, columns, _inner, batch: tiling.count_clustered(rows, columns) * batch


def persistent_grid(tiling: Tiling, grid: Triple, processors: int, *, clusters_known: bool) -> SizeBound:
    asked, blocks = asked_blocks(tiling), grid[0] * grid[1] * grid[2]
    full = is_full(tiling, grid, processors, clusters_known=clusters_known)
    return at_least(asked, blocks) if full else equals(asked, blocks)


def is_full(tiling: Tiling, grid: Triple, processors: int, *, clusters_known: bool) -> bool:
    """Whether the GPU may have had no room for more blocks."""
    # Two SMs always sit together: with single blocks and pairs a full GPU is all of it.
    pairs = clusters_known and tiling.cluster_rows * tiling.cluster_columns <= 2
    fullest = processors - processors % 2 if pairs else int(_FULLEST * processors)
    return grid[0] * grid[1] * grid[2] >= fullest
