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

What a call adds (`problem.Extras`) changes a tile of scores and nothing else, with two exceptions. A sink is a score
without a value, so the running values start with it: m = sink, l = 1, acc = 0. And a softcap c makes S = c · tanh(T/c)
of T = scale · Q Kᵀ, so backward multiplies dS by dS/dT = 1 - (S/c)² to get dQ and dK. The gradient of a bias is dS
without that factor.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim (v and o have their own).
# M queries of a tile, N keys of a tile, S = H/G * M the queries of a tile and a group, one head after another.

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stepscope.kernels.attention.extras import hidden_keys
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, Problem, empty_output, output_shape

QUERY_TILE = 256
KEY_TILE = 256


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
    """Return the output, and the log-sum-exp of every query."""
    del tf32  # PyTorch's matmuls follow its own switch, which is where the argument comes from
    problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
    num_groups = k_BGKD.shape[1]
    wide = _wide_dtype(q_BHLD)
    o_BHLD, lse_BHL = empty_output(q_BHLD, v_BGKD), q_BHLD.new_empty(q_BHLD.shape[:3], dtype=wide)
    with torch.no_grad(), torch.autocast(q_BHLD.device.type, enabled=False):
        for rows in _tiles(0, q_BHLD.shape[2], QUERY_TILE):
            q_BGSD = _stack(q_BHLD[:, :, rows], num_groups).to(wide) * scale
            acc_BGSD = q_BGSD.new_zeros(output_shape(q_BGSD, v_BGKD))
            m_BGS1 = _sinks(q_BHLD[:, :, rows, :1], extras.sinks, num_groups)
            l_BGS1 = (m_BGS1 > -math.inf).to(wide)
            for columns in _tiles(*_keys_of(rows, problem), KEY_TILE):
                s_BGSN, _ = _scores(q_BGSD, k_BGKD[:, :, columns], rows, columns, problem)
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
    extras: Extras = NO_EXTRAS,
    wants_dbias: bool = False,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk and dv, and the gradient of the bias if it is wanted."""
    del tf32, deterministic  # it always is
    problem = Problem(q_BHLD, k_BGKD, v_BGKD, causal, extras)
    num_heads, num_groups, num_keys = q_BHLD.shape[1], k_BGKD.shape[1], k_BGKD.shape[2]
    wide = _wide_dtype(q_BHLD)
    dk_BGKD, dv_BGKD = torch.empty_like(k_BGKD), torch.empty_like(v_BGKD)
    with torch.no_grad(), torch.autocast(q_BHLD.device.type, enabled=False):
        dq_BHLD = torch.zeros_like(q_BHLD, dtype=wide)
        dbias = torch.zeros_like(extras.bias, dtype=wide) if wants_dbias and extras.bias is not None else None
        delta_BHL1 = (do_BHLD.to(wide) * o_BHLD.to(wide)).sum(dim=-1, keepdim=True)
        for columns in _tiles(0, num_keys, KEY_TILE):
            k_BGND, v_BGND = k_BGKD[:, :, columns].to(wide), v_BGKD[:, :, columns].to(wide)
            dk_BGND, dv_BGND = torch.zeros_like(k_BGND), torch.zeros_like(v_BGND)
            for rows in _tiles(*_queries_of(columns, problem), QUERY_TILE):
                q_BGSD = _stack(q_BHLD[:, :, rows], num_groups).to(wide) * scale
                do_BGSD = _stack(do_BHLD[:, :, rows], num_groups).to(wide)
                lse_BGS1 = _stack(lse_BHL[:, :, rows, None], num_groups)
                delta_BGS1 = _stack(delta_BHL1[:, :, rows], num_groups)
                s_BGSN, slope_BGSN = _scores(q_BGSD, k_BGND, rows, columns, problem)
                p_BGSN = s_BGSN.sub_(lse_BGS1).exp_()
                dv_BGND += p_BGSN.mT @ do_BGSD
                ds_BGSN = (do_BGSD @ v_BGND.mT).sub_(delta_BGS1).mul_(p_BGSN)
                if dbias is not None:
                    part = _take(_take(dbias, 2, rows), 3, columns)
                    part += _unstack(ds_BGSN, num_heads).sum_to_size(part.shape)
                if slope_BGSN is not None:
                    ds_BGSN *= slope_BGSN
                dk_BGND += ds_BGSN.mT @ q_BGSD  # the scale is already in q
                dq_BHLD[:, :, rows] += _unstack(ds_BGSN @ k_BGND, num_heads)
            dk_BGKD[:, :, columns], dv_BGKD[:, :, columns] = dk_BGND, dv_BGND
        if dbias is not None and extras.bias is not None:
            dbias = dbias.to(extras.bias.dtype)
        return dq_BHLD.mul_(scale).to(q_BHLD.dtype), dk_BGKD, dv_BGKD, dbias


# --- Which keys a query sees: query i is at position i + K - L, so the last query is aligned with the last key. ---


def _keys_of(rows: slice, problem: Problem) -> tuple[int, int]:
    """Where the keys that some of these queries see begin, rounded to the key tiles, and end. Tiles outside are
    skipped.
    """
    left, right = _limits(problem)
    offset = problem.num_keys - problem.num_queries
    first = max(0, rows.start + offset - left) if left >= 0 else 0
    stop = min(problem.num_keys, max(0, rows.stop + offset + right)) if right >= 0 else problem.num_keys
    return first - first % KEY_TILE, stop


def _queries_of(columns: slice, problem: Problem) -> tuple[int, int]:
    """The same for the queries that see some of these keys."""
    left, right = _limits(problem)
    offset = problem.num_keys - problem.num_queries
    first = max(0, columns.start - offset - right) if right >= 0 else 0
    stop = min(problem.num_queries, max(0, columns.stop - offset + left)) if left >= 0 else problem.num_queries
    return first - first % QUERY_TILE, stop


def _limits(problem: Problem) -> tuple[int, int]:
    return problem.extras.left, 0 if problem.causal else problem.extras.right


def _hides(rows: slice, columns: slice, problem: Problem) -> bool:
    """Whether some key of this tile is hidden from some query. Most tiles of a causal mask are not on the diagonal."""
    left, right = _limits(problem)
    offset = problem.num_keys - problem.num_queries
    after = right >= 0 and columns.stop - 1 > rows.start + offset + right
    before = left >= 0 and columns.start < rows.stop - 1 + offset - left
    return after or before or problem.extras.documents is not None


# --- Scores ---


def _sinks(like_BHM1: Tensor, sinks_H: Tensor | None, num_groups: int) -> Tensor:
    """The first value of the running maximum, (B, G, S, 1): the sink of every query's head, or -inf."""
    wide = _wide_dtype(like_BHM1)
    if sinks_H is None:
        return _stack(torch.full_like(like_BHM1, -math.inf, dtype=wide), num_groups)
    return _stack(sinks_H.to(wide)[:, None, None].expand(like_BHM1.shape), num_groups)


def _scores(
    q_BGSD: Tensor, k_BGND: Tensor, rows: slice, columns: slice, problem: Problem
) -> tuple[Tensor, Tensor | None]:
    """A tile of scores, with -inf for hidden keys, and with a softcap its derivative."""
    extras, num_groups = problem.extras, q_BGSD.shape[1]
    s_BGSN = q_BGSD @ k_BGND.to(q_BGSD.dtype).mT
    slope_BGSN = None
    if extras.softcap:
        share_BGSN = s_BGSN.div_(extras.softcap).tanh_()
        slope_BGSN = 1 - share_BGSN.square()
        s_BGSN = share_BGSN.mul_(extras.softcap)
    query_M = torch.arange(rows.start, rows.stop, device=q_BGSD.device)
    key_N = torch.arange(columns.start, columns.stop, device=q_BGSD.device)
    if extras.bias is not None:
        bias_BHMN = _take(_take(extras.bias, 2, rows), 3, columns).to(q_BGSD.dtype)
        s_BGSN += _stack(bias_BHMN.expand(-1, problem.q_BHLD.shape[1], len(query_M), -1), num_groups)
    if extras.slopes is not None:
        distance_MN = key_N - (query_M[:, None] + problem.num_keys - problem.num_queries)
        s_BGSN += _stack(extras.slopes.to(q_BGSD.dtype)[:, :, None, None] * distance_MN, num_groups)
    if _hides(rows, columns, problem):
        hidden_BMN = hidden_keys(query_M, key_N, problem)
        assert hidden_BMN is not None
        heads_of_group = q_BGSD.shape[2] // len(query_M)
        s_BGSN.masked_fill_(hidden_BMN.repeat(1, heads_of_group, 1)[:, None], -math.inf)
    return s_BGSN, slope_BGSN


# --- Tiles ---


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _tiles(start: int, stop: int, size: int) -> Iterator[slice]:
    """[start, stop) in blocks of `size`, the last one shorter if it does not divide."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _stack(x_BHMD: Tensor, num_groups: int) -> Tensor:
    """(B, G, S, D): the heads of a group one after another."""
    batch, num_heads, num_rows, width = x_BHMD.shape
    return x_BHMD.reshape(batch, num_groups, num_heads // num_groups * num_rows, width)


def _unstack(x_BGSD: Tensor, num_heads: int) -> Tensor:
    """The inverse: (B, H, M, D)."""
    batch, num_groups, num_rows, width = x_BGSD.shape
    return x_BGSD.reshape(batch, num_heads, num_rows * num_groups // num_heads, width)


def _take(x: Tensor, dim: int, part: slice) -> Tensor:
    """This part of a dimension, or all of it where it is broadcast."""
    return x if x.shape[dim] == 1 else x.narrow(dim, part.start, part.stop - part.start)
