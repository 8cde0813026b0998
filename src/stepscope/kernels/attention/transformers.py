"""Our attention in a model of `transformers`, through its attention interface:

    stepscope.kernels.attention.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="stepscope")

Everything other than plain causal or full attention raises rather than being ignored: padding, packed sequences,
sliding windows and any other mask, dropout, score caps, sinks, biases. The library drops every mask of an
implementation that registers no mask function, so one is registered here, which only checks that nothing needs masking.

This requires `transformers` 5, and is the only kernel file that imports it.
"""

# B batch, H query heads, G key/value heads (G divides H), L queries, K keys, D head dim.

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from stepscope.kernels.attention.backends import check_backend
from stepscope.kernels.attention.function import flash_attention

# From batch, head, query and key indices to whether that query sees that key.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Arguments that some models pass to their attention and we do not support, by their name there.
_LACKING = {
    "softcap": "softcapping of scores",
    "s_aux": "attention sinks",
    "position_bias": "a bias on scores",
    "head_mask": "a head mask",
}
_HINT = "use `attn_implementation='sdpa'` or `'eager'` for this model"


def register(backend: str = "auto") -> str:
    """Register our attention, and return the name to pass as `attn_implementation`: `stepscope`, or with a fixed
    backend, `stepscope-triton` or similar.
    """
    check_backend(backend)
    name = "stepscope" if backend == "auto" else f"stepscope-{backend}"
    AttentionInterface.register(name, partial(_attend, backend=backend))
    AttentionMaskInterface.register(name, _require_plain)
    return name


def _attend(
    module: nn.Module,
    q_BHLD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    attention_mask: Tensor | None,
    *,
    backend: str,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature that `transformers` calls: heads first in, heads last out, and no weights returned."""
    if attention_mask is not None:
        raise ValueError(f"stepscope's attention does not support `attention_mask`; {_HINT}")
    if dropout:
        raise ValueError(
            f"stepscope's attention does not support dropout, but the model requires {dropout}; set "
            "`attention_dropout=0`"
        )
    if sliding_window is not None and sliding_window < k_BGKD.shape[2]:
        raise ValueError(
            f"stepscope's attention does not support `sliding_window`, but the model requires {sliding_window}; {_HINT}"
        )
    for argument, what in _LACKING.items():
        if others.get(argument) is not None:
            raise ValueError(
                f"stepscope's attention does not support `{argument}` ({what}), but the model requires it; {_HINT}"
            )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    out_BHLD = flash_attention(q_BHLD, k_BGKD, v_BGKD, causal=causal, scale=scaling, backend=backend)
    return out_BHLD.transpose(1, 2).contiguous(), None


def _require_plain(
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
) -> None:
    """Return no mask, where none is needed: every query sees all keys up to its own position, or all keys.

    The library allows skipping a mask where it knows of no other pattern. SDPA adds conditions on the lengths, which we
    do not need: our mask is aligned with the last key.
    """
    if local_size is not None and kv_length >= local_size:
        raise ValueError(
            "stepscope's attention does not support sliding windows or chunks, but the model uses "
            f"{local_size}; {_HINT}"
        )
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        if torch.compiler.is_compiling() and attention_mask is None and not use_vmap and q_length == kv_length:
            return _assert_causal(mask_function, batch_size, q_length, device)
        raise ValueError(
            "stepscope's attention does not support masks, but the model creates one for packed sequences "
            f"(`position_ids` that restart), a cache of fixed size, or a custom pattern; {_HINT}"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(f"stepscope's attention does not support padding, but `attention_mask` has some; {_HINT}")
    if allow_is_causal_skip and int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(f"stepscope's attention requires a cache without unused positions; {_HINT}")
    return None


def _assert_causal(mask_function: MaskFunction, batch_size: int, length: int, device: torch.device | str) -> None:
    """For `torch.compile`, under which the library cannot inspect positions and treats every batch as packed. So they
    are checked when the compiled code runs: every query sees the first key, and none sees the one after itself.
    """
    batch_B1 = torch.arange(batch_size, device=device)[:, None]
    place_L = torch.arange(length, device=device)
    zero_L = torch.zeros_like(place_L)
    sees_first_BL = mask_function(batch_B1, zero_L, place_L, zero_L)
    sees_next_BL = mask_function(batch_B1, zero_L[1:], place_L[:-1], place_L[1:])
    plain = sees_first_BL.all() & ~sees_next_BL.any()
    torch._assert_async(plain, f"stepscope's attention does not support packed sequences; {_HINT}")
