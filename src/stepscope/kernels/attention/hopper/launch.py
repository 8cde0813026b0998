"""Launches the Hopper kernels. `problem.is_tma_able` says which tensors the bulk copy engine (TMA) can read.

Short sequences are CPU-bound, so everything that only depends on shapes, strides, dtypes, device and settings is in a
plan, which is made once: the grid, the constants, the descriptors of the tensors but for their addresses, and the
compiled kernels. A call allocates its results and launches.
"""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim, N = B * H.

import math
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from stepscope.kernels.attention.hopper.backward_kernel import (
    KEYS_OF_PROGRAM,
    ROWS_OF_TILE,
    attention_hopper_backward,
    attention_hopper_bound,
    attention_hopper_finish,
    attention_hopper_prepare,
    backward_settings,
)
from stepscope.kernels.attention.hopper.compiled_launch import Launch, Tiles
from stepscope.kernels.attention.hopper.forward_kernel import (
    KEYS_OF_TILE,
    LONG,
    ROWS_OF_CONSUMER,
    attention_hopper_forward,
    forward_settings,
    padded_head,
)
from stepscope.kernels.attention.problem import NO_EXTRAS, TMA_ALIGNMENT, Extras, make_readable, tma_strides

# Under a causal mask, heads are done in groups: few, so that K and V of those in flight stay in L2 (groups of 32 cost
# up to 18%), but enough to balance the programs.
FEWEST_HEADS = {2: 8, 3: 16}  # by consumers: larger tiles are fewer, and harder to balance
ROUNDS_OF_GROUP = 2
PREPARED_ROWS = 128  # a multiple of the rows of every tile
FINISHED_ROWS = 64
MOST_PLANS = 256
_NO_LIMIT = 1 << 30  # keys: wider than any window
_GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}
_ROWS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def forward(
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row (natural logarithm, fp32). Only fp16 and bf16, so tf32 does not
    apply.
    """
    del tf32
    return plan_forward(q_BHLD, k_BGKD, v_BGKD, causal, scale, extras)(q_BHLD, k_BGKD, v_BGKD, extras.documents)


def backward(
    do_BHLD: Tensor,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    o_BHLD: Tensor,
    lse_BHL: Tensor,
    *,
    causal: bool,
    scale: float,
    tf32: bool,
    extras: Extras = NO_EXTRAS,
    wants_dbias: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Return the gradients of q, k and v. dq is summed in no fixed order, so its last bits differ between runs, unless
    `deterministic`: then the sums are integers.
    """
    del tf32, wants_dbias  # a bias is not supported
    q_BHLD, k_BGKD, v_BGKD = (make_readable(x) for x in (q_BHLD, k_BGKD, v_BGKD))
    plan = plan_forward(q_BHLD, k_BGKD, v_BGKD, causal, scale, extras)
    tensors = do_BHLD, q_BHLD, k_BGKD, v_BGKD, o_BHLD, lse_BHL
    return *plan.backward(*tensors, extras.documents, deterministic=deterministic), None


# --- Plans ---

_plans: "dict[tuple[Any, ...], ForwardPlan]" = {}


def plan_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, extras: Extras) -> "ForwardPlan":
    """The plan of such a call, for tensors that are as aligned as `is_tma_able` requires."""
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, q.device, causal, scale,
        extras.left, extras.right, extras.documents is None,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= MOST_PLANS:  # every call has a new length: plans are cheap to make again
            _plans.clear()
        plan = _plans[key] = ForwardPlan(q, k, v, causal=causal, scale=scale, extras=extras)
    return plan


class ForwardPlan:
    """Forward for tensors of fixed shapes and strides. Called with them, it returns o and the log-sum-exp."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, extras: Extras) -> None:
        batch, num_heads, num_queries, head_dim = q.shape
        num_groups, num_keys = k.shape[1:3]
        self.causal, self.scale, self.extras = causal, scale, extras._replace(documents=None)
        self.has_documents = extras.documents is not None
        self._device, self._lse_shape = q.device, (batch, num_heads, num_queries)
        self._backward: dict[tuple[Any, ...], BackwardPlan] = {}
        self._is_empty = q.numel() == 0 or num_keys == 0
        if self._is_empty:
            return
        width = padded_head(head_dim)
        settings = forward_settings(
            width,
            causal=causal,
            whole_keys=num_keys % KEYS_OF_TILE == 0,
            long=num_queries >= LONG,
            has_window=_has_window(extras),
            has_documents=self.has_documents,
        )
        num_tiles = -(-num_queries // (settings["CONSUMERS"] * ROWS_OF_CONSUMER))
        heads, processors = batch * num_heads, _count_multiprocessors(q.device)
        # Under a causal mask, two tiles for each program, if there are so many: a long one and a short one.
        num_programs = min(heads * (-(-num_tiles // 2) if causal else num_tiles), processors)
        groups = -(-heads // max(FEWEST_HEADS[settings["CONSUMERS"]], ROUNDS_OF_GROUP * num_programs // num_tiles))
        group = -(-heads // groups)
        self._launch = Launch(
            attention_hopper_forward,
            num_programs,
            q.device,
            tiles=(
                _tiles(q, ROWS_OF_CONSUMER, width),
                _tiles(k, KEYS_OF_TILE, width),
                _tiles(v, KEYS_OF_TILE, width),
                _tiles(torch.empty_like(q, device="meta"), ROWS_OF_CONSUMER, width),
            ),
            numbers=(scale, num_heads, num_groups, num_queries, num_keys, num_tiles, heads, group, *_window(extras)),
            constants=settings,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(q)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=self._device)
        if self._is_empty:
            return o.zero_(), lse.fill_(math.inf)
        self._launch((q, k, v, o), (lse, *_borders(documents)))
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        documents: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        plan = self._backward.get((do.stride(), o.stride(), deterministic))
        if plan is None or (do.data_ptr() | o.data_ptr() | lse.data_ptr()) % TMA_ALIGNMENT:
            do = make_readable(do)
            o, lse = (x.clone() if x.data_ptr() % TMA_ALIGNMENT else x for x in (o, lse))
            key = (do.stride(), o.stride(), deterministic)
            plan = self._backward.get(key)
            if plan is None:
                plan = self._backward[key] = BackwardPlan(do, q, k, v, o, self, deterministic=deterministic)
        return plan(do, q, k, v, o, lse, documents)


class BackwardPlan:
    """Backward for tensors of fixed shapes and strides. Called with them, it returns dq, dk and dv."""

    def __init__(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, forward: ForwardPlan, *, deterministic: bool
    ) -> None:
        batch, num_heads, num_queries, head_dim = q.shape
        num_groups, num_keys = k.shape[1:3]
        self._device, self._sums_shape = q.device, q.shape
        self._sums_dtype = torch.int32 if deterministic else torch.float32
        self._is_empty = q.numel() == 0 or k.numel() == 0
        if self._is_empty:
            return
        width = padded_head(head_dim)
        rows, heads = ROWS_OF_TILE[width], batch * num_heads
        padded = -(-num_queries // PREPARED_ROWS) * PREPARED_ROWS
        dq, dk, dv = (torch.empty_like(x, device="meta") for x in (q, k, v))
        sums = torch.empty(q.shape, dtype=self._sums_dtype, device="meta")
        self._statistics_shape = ((3 if deterministic else 2) * heads, padded)
        key_tiles, groups = -(-num_keys // KEYS_OF_PROGRAM), batch * num_groups
        self._bounds_shape = (2, groups * key_tiles)
        self._bound = (
            Launch(
                attention_hopper_bound,
                groups * key_tiles,
                q.device,
                numbers=(num_groups, num_keys, head_dim, *k.stride()[:3], *v.stride()[:3]),
                constants={"BLOCK_D": width, "num_warps": 8},
            )
            if deterministic
            else None
        )
        self._prepare = Launch(
            attention_hopper_prepare,
            padded // PREPARED_ROWS * heads,
            q.device,
            numbers=(
                num_heads,
                num_groups,
                num_queries,
                padded,
                heads,
                head_dim,
                *o.stride()[:3],
                *do.stride(),
                groups,
                num_keys,
                *_window(forward.extras),
            ),
            constants={
                "ROWS": PREPARED_ROWS,
                "BLOCK_D": width,
                "MOST_KEY_TILES": triton.next_power_of_2(key_tiles) if deterministic else 1,
                "CAUSAL": deterministic and forward.causal,
                "WINDOW": deterministic and _has_window(forward.extras),
                "DOCUMENTS": deterministic and forward.has_documents,
                "EXACT_SUMS": deterministic,
                "num_warps": 8,
            },
        )
        group = max(FEWEST_HEADS[2], _count_multiprocessors(q.device) // key_tiles)
        self._main = Launch(
            attention_hopper_backward,
            groups * key_tiles,
            q.device,
            tiles=(
                _tiles(q, rows, width),
                _tiles(k, KEYS_OF_PROGRAM, width),
                _tiles(v, KEYS_OF_PROGRAM // 2, width),
                _tiles(do, rows, width),
                Tiles(list(self._statistics_shape), [padded, 1], [1, rows], _ROWS_LAYOUT),
                _tiles(sums, 64, 64),
                _tiles(dk, KEYS_OF_PROGRAM // 2, width),
                _tiles(dv, KEYS_OF_PROGRAM // 2, width),
            ),
            numbers=(
                forward.scale,
                num_heads,
                num_groups,
                heads,
                num_queries,
                num_keys,
                group,
                *_window(forward.extras),
            ),
            constants=backward_settings(
                width,
                causal=forward.causal,
                whole_keys=num_keys % KEYS_OF_PROGRAM == 0,
                has_window=_has_window(forward.extras),
                has_documents=forward.has_documents,
                deterministic=deterministic,
            ),
        )
        self._finish = Launch(
            attention_hopper_finish,
            -(-num_queries // FINISHED_ROWS) * heads,
            q.device,
            numbers=(forward.scale, num_heads, num_queries, padded, heads, head_dim, *dq.stride()[:3]),
            constants={"ROWS": FINISHED_ROWS, "BLOCK_D": width, "EXACT_SUMS": deterministic, "num_warps": 4},
        )

    def __call__(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if self._is_empty:
            return dq.zero_(), dk.zero_(), dv.zero_()
        statistics = torch.empty(self._statistics_shape, dtype=torch.float32, device=self._device)
        sums = torch.empty(self._sums_shape, dtype=self._sums_dtype, device=self._device)
        bounds = None
        if self._bound is not None:
            bounds = torch.empty(self._bounds_shape, dtype=torch.float32, device=self._device)
            self._bound((), (k, v, bounds))
        borders = _borders(documents)
        self._prepare((), (o, do, lse, statistics, sums, bounds, *(borders if bounds is not None else (None, None))))
        self._main((q, k, v, do, statistics, sums, dk, dv), borders)
        self._finish((), (sums, statistics, dq))
        return dq, dk, dv


def _has_window(extras: Extras) -> bool:
    return extras.left >= 0 or extras.right >= 0


def _window(extras: Extras) -> tuple[int, int]:
    left, right = (_NO_LIMIT if one < 0 else min(one, _NO_LIMIT) for one in (extras.left, extras.right))
    return left, right


def _borders(documents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The first position and the end of each position's document. Kernels are compiled for an aligned table."""
    if documents is None:
        return None, None
    starts, ends = documents.clone() if documents.data_ptr() % TMA_ALIGNMENT else documents
    return starts, ends


def _tiles(x_BHLD: Tensor, rows: int, columns: int) -> Tiles:
    """x in tiles of rows × columns of one head. Elements outside read as zero and are not written."""
    layout = _tile_layout(rows, columns, x_BHLD.dtype)
    return Tiles(list(x_BHLD.shape), tma_strides(x_BHLD), [1, 1, rows, columns], layout)


@cache
def _tile_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _GLUON_TYPES[dtype])


@cache
def _count_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
