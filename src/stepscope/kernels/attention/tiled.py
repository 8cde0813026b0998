"""FlashAttention-2 in plain PyTorch: the version to learn from, and a reference that runs anywhere.

Unfused attention computes the scores of every query with every key, L · K numbers per head, and saves them for
backward. Here they exist one tile at a time. Forward visits the keys of a query tile once and keeps three running
values per query: the largest score so far `m`, the sum of exp(score - m) `l`, and the sum of values under those weights
`acc`. When a larger score appears, the previous sums are scaled down by exp(m_old - m_new). At the end the output is
acc / l, and one number per query is saved for backward, the logarithm of the sum of its exponentials:

    lse = m + log(l),    so that    P = exp(score - lse)    recomputes any tile of weights, without another pass.

Backward recomputes each tile of P. With S = scale · Q Kᵀ, O = P V, and dO given:

    dV = Pᵀ dO        dP = dO Vᵀ        dS = P · (dP - delta)        dQ = scale · dS K        dK = scale · dSᵀ Q

where delta = Σ_d dO · O of a query is what the gradient of the softmax subtracts; computing it from O needs no row of
P. The outer loop is over keys, so that dK and dV are finished tile by tile, and dQ is accumulated in a buffer.

Tiles are widened to fp32 and multiplied there (float64 stays float64), as kernels accumulate. The query heads of a
group are stacked along the length, so that one matmul serves them all and no key is copied.

A query that sees no key has l = 0: its output is zero and its lse is +inf, with which exp(score - lse) is 0 and every
gradient vanishes. Until its first visible key m is -inf, and 0 is subtracted instead: -inf - -inf is NaN.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.
# M queries of a tile, N keys of a tile, S = H/G * M the queries of a tile and a group, one head after another.

import math
from collections.abc import Iterator

import torch
from torch import Tensor

QUERY_TILE = 256
KEY_TILE = 256


def forward(
    q_BHLD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, *, causal: bool, scale: float, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sum-exp of every query."""
    del tf32  # PyTorch's matmuls follow its own switch, which is where the argument comes from
    num_groups, num_keys = k_BGKD.shape[1:3]
    wide = _wide_dtype(q_BHLD)
    offset = num_keys - q_BHLD.shape[2]
    o_BHLD, lse_BHL = torch.empty_like(q_BHLD), q_BHLD.new_empty(q_BHLD.shape[:3], dtype=wide)
    with torch.no_grad(), torch.autocast(q_BHLD.device.type, enabled=False):
        for rows in _tiles(q_BHLD.shape[2], QUERY_TILE):
            q_BGSD = _stack(q_BHLD[:, :, rows], num_groups).to(wide) * scale
            acc_BGSD = torch.zeros_like(q_BGSD)
            l_BGS1 = q_BGSD.new_zeros(*q_BGSD.shape[:3], 1)
            m_BGS1 = torch.full_like(l_BGS1, -math.inf)
            for columns in _tiles(_num_visible(rows, num_keys, offset, causal=causal), KEY_TILE):
                s_BGSN = _scores(q_BGSD, k_BGKD[:, :, columns], rows, columns, offset, causal=causal)
                higher_BGS1 = torch.maximum(m_BGS1, s_BGSN.amax(dim=-1, keepdim=True))
                shift_BGS1 = higher_BGS1.masked_fill(higher_BGS1 == -math.inf, 0)
                p_BGSN = s_BGSN.sub_(shift_BGS1).exp_()
                shrink_BGS1 = (m_BGS1 - shift_BGS1).exp_()
                l_BGS1 = l_BGS1 * shrink_BGS1 + p_BGSN.sum(dim=-1, keepdim=True)
                acc_BGSD = acc_BGSD * shrink_BGS1 + p_BGSN @ v_BGKD[:, :, columns].to(wide)
                m_BGS1 = higher_BGS1
            blind_BGS1 = l_BGS1 == 0
            o_BHLD[:, :, rows] = _unstack(acc_BGSD / l_BGS1.masked_fill(blind_BGS1, 1), q_BHLD.shape[1])
            lse_BGS1 = (m_BGS1 + l_BGS1.log()).masked_fill(blind_BGS1, math.inf)
            lse_BHL[:, :, rows] = _unstack(lse_BGS1, q_BHLD.shape[1]).squeeze(-1)
    return o_BHLD, lse_BHL


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    del tf32  # as in `forward`
    num_heads, num_queries = q_BHLD.shape[1:3]
    num_groups, num_keys = k_BGKD.shape[1:3]
    wide = _wide_dtype(q_BHLD)
    offset = num_keys - num_queries
    dk_BGKD, dv_BGKD = torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)
    with torch.no_grad(), torch.autocast(q_BHLD.device.type, enabled=False):
        dq_BHLD = torch.zeros_like(q_BHLD, dtype=wide)
        delta_BHL1 = (do_BHLD.to(wide) * o_BHLD.to(wide)).sum(dim=-1, keepdim=True)
        for columns in _tiles(num_keys, KEY_TILE):
            k_BGND, v_BGND = k_BGKD[:, :, columns].to(wide), v_BGKD[:, :, columns].to(wide)
            dk_BGND, dv_BGND = torch.zeros_like(k_BGND), torch.zeros_like(v_BGND)
            for rows in _tiles(num_queries, QUERY_TILE, start=_first_seeing(columns, offset, causal=causal)):
                q_BGSD = _stack(q_BHLD[:, :, rows], num_groups).to(wide) * scale
                do_BGSD = _stack(do_BHLD[:, :, rows], num_groups).to(wide)
                lse_BGS1 = _stack(lse_BHL[:, :, rows, None], num_groups)
                delta_BGS1 = _stack(delta_BHL1[:, :, rows], num_groups)
                p_BGSN = _scores(q_BGSD, k_BGND, rows, columns, offset, causal=causal).sub_(lse_BGS1).exp_()
                dv_BGND += p_BGSN.mT @ do_BGSD
                ds_BGSN = (do_BGSD @ v_BGND.mT).sub_(delta_BGS1).mul_(p_BGSN)
                dk_BGND += ds_BGSN.mT @ q_BGSD  # the scale is already in q
                dq_BHLD[:, :, rows] += _unstack(ds_BGSN @ k_BGND, num_heads)
            dk_BGKD[:, :, columns], dv_BGKD[:, :, columns] = dk_BGND, dv_BGND
        return dq_BHLD.mul_(scale).to(q_BHLD.dtype), dk_BGKD, dv_BGKD


# --- Which keys a query sees: query i sees key j if j <= i + offset; the last query is aligned with the last key. ---


def _num_visible(rows: slice, num_keys: int, offset: int, *, causal: bool) -> int:
    """Keys that the last of these queries sees: tiles beyond are skipped."""
    return min(num_keys, max(0, rows.stop + offset)) if causal else num_keys


def _first_seeing(columns: slice, offset: int, *, causal: bool) -> int:
    """The first query that sees the first of these keys, rounded to the query tiles: those before are skipped."""
    first = max(0, columns.start - offset) if causal else 0
    return first - first % QUERY_TILE


def _scores(q_BGSD: Tensor, k_BGND: Tensor, rows: slice, columns: slice, offset: int, *, causal: bool) -> Tensor:
    """A tile of scores, with -inf for future keys; only tiles on the diagonal have such keys."""
    s_BGSN = q_BGSD @ k_BGND.to(q_BGSD.dtype).mT
    if causal and columns.stop - 1 > rows.start + offset:
        query_M1 = torch.arange(rows.start, rows.stop, device=q_BGSD.device)[:, None]
        key_N = torch.arange(columns.start, columns.stop, device=q_BGSD.device)
        hidden_SN = (key_N > query_M1 + offset).repeat(q_BGSD.shape[2] // len(query_M1), 1)
        s_BGSN.masked_fill_(hidden_SN, -math.inf)
    return s_BGSN


# --- Tiles ---


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(length: int, size: int, *, start: int = 0) -> Iterator[slice]:
    """[start, length) in blocks of `size`, the last one shorter if it does not divide."""
    for first in range(start, length, size):
        yield slice(first, min(first + size, length))


def _stack(x_BHMD: Tensor, num_groups: int) -> Tensor:
    """(B, G, S, D): the heads of a group one after another."""
    batch, num_heads, num_rows, width = x_BHMD.shape
    return x_BHMD.reshape(batch, num_groups, num_heads // num_groups * num_rows, width)


def _unstack(x_BGSD: Tensor, num_heads: int) -> Tensor:
    """The inverse: (B, H, M, D)."""
    batch, num_groups, num_rows, width = x_BGSD.shape
    return x_BGSD.reshape(batch, num_heads, num_rows * num_groups // num_heads, width)
