"""What a call adds to plain attention (`problem.Extras`): its arguments, checked and brought to the shapes that every
backend takes.

As in `problem.py`, an invalid argument raises one ValueError or TypeError that names it. Everything here is
differentiable: views and casts only.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, N documents.
# M some of the queries and N some of the keys, where a function takes indices.

import sys
from functools import reduce

import torch
from torch import Tensor

from stepscope.kernels.attention.problem import DTYPES, Extras, Problem, UnsupportedError, as_4d, check_number

Window = int | tuple[int | None, int | None] | None


def prepare_extras(
    problem: Problem,
    like_q: Tensor,
    *,
    window: Window = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    documents: Tensor | None = None,
) -> Problem:
    """Return the problem with the checked extras of a call. `like_q` is q before it got four dimensions. A window that
    hides nothing is left out, and one that ends at the query's own position becomes a causal mask.
    """
    if cu_seqlens is not None and documents is not None:
        raise ValueError("`cu_seqlens` and `documents` are mutually exclusive: the second is made from the first")
    left, right = _limits(window, causal=problem.causal)
    if right == 0:
        problem, right = problem._replace(causal=True), -1
    if cu_seqlens is not None:
        documents = _bounds_of_batch(problem, cu_seqlens)
    extras = Extras(
        # The last query is at K - 1, and the first at K - L.
        left=left if left < problem.num_keys - 1 else -1,
        right=right if right < problem.num_queries - 1 else -1,
        softcap=0.0 if softcap is None else _check_softcap(softcap),
        bias=None if bias is None else _prepare_bias(problem, like_q, bias),
        slopes=None if alibi_slopes is None else _prepare_slopes(problem, alibi_slopes),
        sinks=None if sinks is None else _prepare_sinks(problem, sinks),
        documents=None if documents is None else _check_documents(problem, documents),
    )
    return problem._replace(extras=extras)


def _limits(window: Window, *, causal: bool) -> tuple[int, int]:
    """Return how many keys a query sees to the left and to the right of its own position, -1 for all."""
    if window is None:
        return -1, -1
    if isinstance(window, int) and not isinstance(window, bool):
        if not causal:
            raise ValueError(f"a `window` of one number requires `causal=True`; pass ({window - 1}, right) otherwise")
        if window < 1:
            raise ValueError(f"`window` must be at least 1, because a query sees its own position, but got {window}")
        return window - 1, -1
    if not isinstance(window, tuple | list):
        raise TypeError(f"`window` must be a number of keys or a pair (left, right), but got {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"`window` must be a number of keys or a pair (left, right), but got {len(window)} numbers")
    for limit in window:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"`window` must consist of integers or None, but got {type(limit).__name__}")
        if limit is not None and limit < 0:
            raise ValueError(f"`window` must consist of non-negative numbers or None, but got {limit}")
    left, right = (-1 if limit is None else limit for limit in window)
    if causal and right > 0:
        raise ValueError(f"`window` allows {right} keys after a query's own, but `causal=True` hides them")
    return left, -1 if causal else right


def _check_softcap(softcap: float) -> float:
    check_number("softcap", softcap)
    if not 0 < softcap <= sys.float_info.max:  # not `isfinite`, as for the scale
        raise ValueError(f"`softcap` must be finite and positive, or None for no cap, but got {softcap}")
    return float(softcap)


def _check_tensor(name: str, x: Tensor, problem: Problem, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, but got {type(x).__name__}")
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"expected `{name}` to be {expected}, but got {x.dtype}")
    if x.device != problem.q_BHLD.device:
        raise ValueError(
            f"expected all tensors to be on the same device, but `q` is on {problem.q_BHLD.device} and `{name}` is on "
            f"{x.device}"
        )


def _prepare_bias(problem: Problem, like_q: Tensor, bias: Tensor) -> Tensor:
    """Return a view with four dimensions, each of full size or one. Only several batch dimensions may need a copy."""
    _check_tensor("bias", bias, problem, (problem.q_BHLD.dtype, torch.float32))
    full = (*like_q.shape[:-1], problem.num_keys)
    sizes = (1,) * (len(full) - bias.dim()) + tuple(bias.shape)
    if len(sizes) != len(full) or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
        raise ValueError(f"expected `bias` to have a shape that broadcasts to {full}, but got {tuple(bias.shape)}")
    if bias.dim() != len(sizes):
        bias = bias.view(sizes)
    if like_q.dim() > 4 and any(size != 1 for size in sizes[:-3]):
        bias = bias.expand(*full[:-3], *sizes[-3:])
    return as_4d(bias)


def _prepare_slopes(problem: Problem, slopes: Tensor) -> Tensor:
    batch, num_heads = problem.q_BHLD.shape[:2]
    _check_tensor("alibi_slopes", slopes, problem, DTYPES)
    if slopes.shape not in ((num_heads,), (batch, num_heads)):
        raise ValueError(
            f"expected `alibi_slopes` to have shape ({num_heads},) or ({batch}, {num_heads}), one per query head, but "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.requires_grad:
        raise UnsupportedError("`alibi_slopes` get no gradient, but they require one; pass a `bias` to learn it")
    return slopes.to(_wide_dtype(problem)).view(-1, num_heads)


def _prepare_sinks(problem: Problem, sinks: Tensor) -> Tensor:
    num_heads = problem.q_BHLD.shape[1]
    _check_tensor("sinks", sinks, problem, DTYPES)
    if sinks.shape != (num_heads,):
        raise ValueError(
            f"expected `sinks` to have shape ({num_heads},), one per query head, but got {tuple(sinks.shape)}"
        )
    return sinks.to(_wide_dtype(problem))


def _wide_dtype(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.q_BHLD.dtype, torch.float32)


def _check_documents(problem: Problem, documents: Tensor) -> Tensor:
    _check_tensor("documents", documents, problem, (torch.int32,))
    expected = (2, problem.q_BHLD.shape[0], problem.num_queries)
    if documents.shape != expected:
        raise ValueError(
            f"expected `documents` to have shape {expected}, as `document_bounds` returns it, but got "
            f"{tuple(documents.shape)}"
        )
    _check_equal_lengths("documents", problem)
    return documents.contiguous()


def _check_equal_lengths(name: str, problem: Problem) -> None:
    if problem.num_queries != problem.num_keys:
        raise ValueError(
            f"`{name}` requires as many queries as keys, but got {problem.num_queries} and {problem.num_keys}"
        )


def _bounds_of_batch(problem: Problem, cu_seqlens: Tensor) -> Tensor:
    _check_tensor("cu_seqlens", cu_seqlens, problem, (torch.int32, torch.int64))
    _check_equal_lengths("cu_seqlens", problem)
    if problem.q_BHLD.shape[0] != 1:
        raise ValueError(
            "`cu_seqlens` requires a batch of one, with its documents end to end along the length, but `q` has a batch "
            f"of {problem.q_BHLD.shape[0]}; pass `documents` for several"
        )
    return document_bounds(cu_seqlens, problem.num_queries)


def document_bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the `documents` of a batch of one: (2, 1, length) in int32, on the device of `cu_seqlens`.

    `cu_seqlens` (N+1,) are the positions at which N documents start, and the length: [0, 5, 9] is a document of 5
    tokens and one of 4. Compute the table once per batch and pass it to every layer. For batches of several rows,
    concatenate the tables along dim 1.

    On a GPU the values are checked when the kernels run, as an index out of range is.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        kind = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"`cu_seqlens` must be a tensor of int32 or int64, but got {kind}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"expected `cu_seqlens` to have shape (documents + 1,), but got {tuple(cu_seqlens.shape)}")
    rises = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == length) & (cu_seqlens.diff() >= 0).all()
    message = (
        "`cu_seqlens` must start at 0, never decrease, and end at the length"  # a number would fix it for a compiler
    )
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(rises):
            raise ValueError(f"{message} {length}, but got {cu_seqlens.tolist()}")
    else:
        torch._assert_async(rises, message)
    starts_N = cu_seqlens.to(torch.int32)
    place_L = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
    # Of empty documents, which share their start with the next one, the last is the one with tokens.
    after_L = torch.searchsorted(starts_N, place_L, right=True).clamp_(1, starts_N.shape[0] - 1)
    return torch.stack((starts_N[after_L - 1], starts_N[after_L])).unsqueeze(1)


def hidden_keys(query_M: Tensor, key_N: Tensor, problem: Problem) -> Tensor | None:
    """Return which of these keys are hidden from which of these queries, given their indices: (B or 1, M, N), or None
    if nothing hides keys.
    """
    left, right, documents_2BL = problem.extras.left, problem.extras.right, problem.extras.documents
    position_M1 = query_M[:, None] + (problem.num_keys - problem.num_queries)
    hidden = []
    if problem.causal or right >= 0:
        hidden.append((key_N > position_M1 + max(right, 0))[None])
    if left >= 0:
        hidden.append((key_N < position_M1 - left)[None])
    if documents_2BL is not None:
        first_BM1, after_BM1 = documents_2BL[:, :, query_M, None]
        hidden.append((key_N < first_BM1) | (key_N >= after_BM1))
    return reduce(torch.logical_or, hidden) if hidden else None
