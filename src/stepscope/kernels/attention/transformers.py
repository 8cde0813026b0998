"""Our attention in a model of `transformers`, through its attention interface:

    stepscope.kernels.attention.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="stepscope")

Sliding windows (Mistral), softcapped scores (Gemma 2), sinks (gpt-oss) and packed sequences run as arguments of
`flash_attention`. Packed sequences are recognized as the library does it: by `position_ids` that restart, or by the
`cu_seq_lens_q` of its `DataCollatorWithFlattening(return_flash_attn_kwargs=True)`. Everything else raises rather than
being ignored: padding, caches of fixed size, chunks and any other mask, dropout, biases.

The library drops every mask of an implementation that registers no mask function. Ours returns no tensor but what the
mask comes down to (`Visible`), after comparing it with the mask that the model asked for. Every layer receives it in
place of a mask: some models tell their window to the mask only.

This requires `transformers` 5, and is the only kernel file that imports it.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from stepscope.kernels.attention.backends import check_backend
from stepscope.kernels.attention.extras import Window, document_bounds
from stepscope.kernels.attention.function import flash_attention

# From batch, head, query and key indices to whether that query sees that key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Arguments that some models pass to their attention and we do not support, by their name there.
_LACKING = {
    "position_bias": "a bias on scores",
    "head_mask": "a head mask",
    "block_table": "a paged cache",
    "cache": "a paged cache",
}
_HINT = "use `attn_implementation='sdpa'` or `'eager'` for this model"
_PACKED = (
    "stepscope's attention cannot recognize packed sequences by their `position_ids` under `torch.compile`; pass "
    "`cu_seq_lens_q` and `cu_seq_lens_k`, as `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` does"
)
_CUSTOM = (
    "stepscope's attention supports causal masks, sliding windows and packed sequences, but the model uses another "
    f"mask; {_HINT}"
)
_PADDED = f"stepscope's attention does not support padding, but `attention_mask` has some; {_HINT}"


class Visible(NamedTuple):
    """Which keys a query sees, other than by a causal mask. `is_one_document` is for compiled code, which cannot decide
    by its value: it is checked when the code runs.
    """

    window: Window = None
    documents: Tensor | None = None
    is_one_document: Tensor | None = None


def register(backend: str = "auto") -> str:
    """Register our attention, and return the name to pass as `attn_implementation`: `stepscope`, or with a fixed
    backend, `stepscope-triton` or similar.
    """
    check_backend(backend)
    name = "stepscope" if backend == "auto" else f"stepscope-{backend}"
    AttentionInterface.register(name, partial(_attend, backend=backend))
    AttentionMaskInterface.register(name, _reduce_mask)
    return name


# --- A layer ---


def _attend(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    attention_mask: Visible | Tensor | None,
    *,
    backend: str,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature that `transformers` calls: heads first in, heads last out, and no weights returned."""
    visible = Visible() if attention_mask is None else attention_mask
    if not isinstance(visible, Visible):
        raise ValueError(f"stepscope's attention does not support `attention_mask` with four dimensions; {_HINT}")
    if dropout:
        raise ValueError(
            f"stepscope's attention does not support dropout, but the model requires {dropout}; set "
            "`attention_dropout=0`"
        )
    if visible.window is None and sliding_window is not None and sliding_window < k_BGKD.shape[2]:
        raise ValueError(
            f"a layer of the model has a `sliding_window` of {sliding_window}, but the mask of the model has none; "
            f"{_HINT}"
        )
    for argument, what in _LACKING.items():
        if others.get(argument) is not None:
            raise ValueError(
                f"stepscope's attention does not support `{argument}` ({what}), but the model requires it; {_HINT}"
            )
    documents = visible.documents
    if cu_seq_lens_q is not None:
        documents = _read_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k, q_BHLD.shape[2])
    elif visible.is_one_document is not None:
        torch._assert_async(visible.is_one_document, _PACKED)
    out_BHLD = flash_attention(
        q_BHLD,
        k_BGKD,
        v_BGKD,
        causal=bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal,
        scale=scaling,
        window=visible.window,
        softcap=softcap or None,
        sinks=s_aux,
        documents=documents,
        backend=backend,
    )
    return out_BHLD.transpose(1, 2).contiguous(), None


_DIFFERENT = (
    f"stepscope's attention requires `cu_seq_lens_k` to be the same as `cu_seq_lens_q`; {_HINT} if keys are packed in "
    "another way"
)

# The same tensor comes with every layer, so its table is computed once. With its version, because it may be a buffer
# that is filled again.
_tables: MutableMapping[Tensor, tuple[tuple[int, int], Tensor]] = WeakIdKeyDictionary()


def _read_cu_seq_lens(cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None, length: int) -> Tensor:
    if cu_seq_lens_k is None or cu_seq_lens_k.shape != cu_seq_lens_q.shape:
        raise ValueError(_DIFFERENT)
    # A CUDA graph must contain the table's computation: it is replayed with other documents.
    is_captured = cu_seq_lens_q.is_cuda and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or cu_seq_lens_q.is_inference() or is_captured:
        return document_bounds(cu_seq_lens_q, length)
    key = cu_seq_lens_q._version, length
    known = _tables.get(cu_seq_lens_q)
    if known is None or known[0] != key:
        if cu_seq_lens_k is not cu_seq_lens_q:
            torch._assert_async((cu_seq_lens_k == cu_seq_lens_q).all(), _DIFFERENT)
        known = key, document_bounds(cu_seq_lens_q, length)
        _tables[cu_seq_lens_q] = known
    return known[1]


# --- The mask of a model ---


def _reduce_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Visible | None:
    """Return what the mask comes down to, None if it hides nothing but future keys.

    The library allows skipping a mask where it knows of no pattern other than a window or chunks of `local_size`. It
    forbids it for packed sequences, which exist only without a cache, and under `torch.compile` for every batch.
    `use_vmap` means that the model has a mask function of its own.
    """
    _require(attention_mask is None or attention_mask.all(), _PADDED)
    if use_vmap:
        raise ValueError(_CUSTOM)
    is_local = local_size is not None and kv_length > local_size
    if allow_is_bidirectional_skip:
        return Visible((local_size, local_size)) if is_local else None
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(f"stepscope's attention requires a cache without unused positions; {_HINT}")
    if allow_is_causal_skip and not is_local:
        return None
    window = local_size if is_local else None
    sees = _Probe(mask_function, batch_size, q_length, int(q_offset), kv_offset, device)
    if allow_is_causal_skip:
        sees.require_intervals(window, None)
        return Visible(window)
    if q_length != kv_length:
        raise ValueError(_CUSTOM)
    documents = sees.find_documents()
    sees.require_intervals(window, documents)
    if torch.compiler.is_compiling():
        return Visible(window, is_one_document=(documents[0] == 0).all())
    return Visible(window, documents)


def _require(holds: bool | Tensor, message: str) -> None:
    """Raise now, or in compiled code when it runs."""
    if isinstance(holds, Tensor) and torch.compiler.is_compiling():
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


class _Probe:
    """Questions to the mask function of a model, a few per query: the whole mask has one element per pair."""

    def __init__(
        self, function: MaskFunction, batch_size: int, length: int, q_offset: int, kv_offset: int, device: Any
    ) -> None:
        self.function = function
        self.batch_B1 = torch.arange(batch_size, device=device)[:, None]
        self.place_L = torch.arange(q_offset, q_offset + length, device=device)
        self.first_key, self.last_key = kv_offset, q_offset + length - 1

    def sees(self, key: Tensor) -> Tensor:
        """Whether each query sees this key of its own: (B, L). No key outside the sequence is visible."""
        exists = (key >= self.first_key) & (key <= self.last_key)
        inside = key.clamp(self.first_key, self.last_key)
        return exists & self.function(self.batch_B1, torch.zeros_like(self.place_L), self.place_L, inside)

    def find_documents(self) -> Tensor:
        """The table for `flash_attention`: a document starts at every query that does not see the key before it."""
        starts_BL = ~self.sees(self.place_L - 1)
        length = self.place_L.shape[0]
        first_BL = torch.where(starts_BL, self.place_L, 0).cummax(dim=1).values
        next_BL = torch.where(starts_BL, self.place_L, length).roll(-1, dims=1)
        next_BL[:, -1:] = length
        after_BL = next_BL.flip(1).cummin(dim=1).values.flip(1)
        return torch.stack((first_BL, after_BL)).to(torch.int32)

    def require_intervals(self, window: int | None, documents: Tensor | None) -> None:
        """Raise unless every query sees itself and the keys back to the start of the window and of its document, and
        none before or after. The ends of this interval are compared: all masks of the library that get here show each
        query one interval. Chunks start elsewhere, and blocks of images end elsewhere.
        """
        first = torch.full_like(self.place_L, self.first_key)
        if window is not None:
            first = torch.maximum(first, self.place_L - window + 1)
        if documents is not None:
            first = torch.maximum(first, documents[0])
        inside = self.sees(first) & self.sees(self.place_L)
        outside = self.sees(first - 1) | self.sees(self.place_L + 1)
        _require((inside & ~outside).all(), _CUSTOM)
