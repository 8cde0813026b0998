"""The Hopper kernels as they are shipped, for `shipped.py`. The type of a descriptor carries the layout of its tile."""

import itertools
from collections.abc import Iterator
from typing import Any

from triton.experimental.gluon import language as gl

from stepscope.kernels.attention.hopper_backward_kernel import attention_hopper_backward
from stepscope.kernels.attention.hopper_forward_kernel import attention_hopper_forward
from stepscope.kernels.attention.hopper_tiles import (
    BACKWARD_KEYS,
    BACKWARD_ROWS,
    FORWARD_KEYS,
    FORWARD_ROWS,
    backward_settings,
    forward_settings,
)

TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
OPTIONS = ("num_warps", "maxnreg")
# Bytes, by kernel, width and mask: what the code has under both supported compilers, rounded up. None of it is in an
# inner loop but that of backward at 64, where tiles of 128 queries do not fit and are the fastest all the same.
MOST_SPILLED = {
    ("forward", 128, False, True): 0,
    ("forward", 128, False, False): 0,
    ("forward", 128, True, False): 16,
    ("forward", 64, False, True): 0,
    ("forward", 64, False, False): 48,
    ("forward", 64, True, False): 0,
    ("backward", 128, False, True): 0,
    ("backward", 128, False, False): 0,
    ("backward", 128, True, False): 64,
    ("backward", 64, False, True): 128,
    ("backward", 64, False, False): 160,
    ("backward", 64, True, False): 256,
}


def hopper() -> Iterator[dict[str, Any]]:
    """The arguments of `Shipped`. Under a causal mask it makes no difference whether the keys fill their tiles."""
    masks = ((False, True), (False, False), (True, False))
    for dtype, width, (causal, whole_keys) in itertools.product(("bf16", "fp16"), (64, 128), masks):
        for stage, kernel in (("forward", attention_hopper_forward), ("backward", attention_hopper_backward)):
            settings = dict(
                (forward_settings if stage == "forward" else backward_settings)(
                    width, causal=causal, whole_keys=whole_keys
                )
            )
            options = {name: settings.pop(name) for name in OPTIONS}
            types = _forward_types(dtype, width) if stage == "forward" else _backward_types(dtype, width)
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            yield {
                "name": f"hopper {stage} {dtype} {width} {'causal' if causal else 'whole' if whole_keys else 'ragged'}",
                "kernel": kernel,
                "signature": signature | dict.fromkeys(settings, "constexpr"),
                "constants": settings,
                "options": options,
                "arch": 90,
                "product": "HGMMA",
                "most_spilled": MOST_SPILLED[stage, width, causal, whole_keys],
                "aligned": ("lse_ptr",) if stage == "forward" else (),
                "gluon": True,
                "sample": dtype == "bf16" and (causal or (whole_keys and stage == "forward")),
            }


def _forward_types(dtype: str, width: int) -> dict[str, str]:
    rows, keys = _tile(dtype, FORWARD_ROWS, width), _tile(dtype, FORWARD_KEYS, width)
    return {"q_desc": rows, "k_desc": keys, "v_desc": keys, "o_desc": rows, "lse_ptr": "*fp32", "scale": "fp32"}


def _backward_types(dtype: str, width: int) -> dict[str, str]:
    rows, keys = _tile(dtype, BACKWARD_ROWS[width], width), _tile(dtype, BACKWARD_KEYS // 2, width)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    statistics = f"tensordesc<fp32[1, {BACKWARD_ROWS[width]}],{layout!r}>"
    return {
        **dict.fromkeys(("q_desc", "do_desc"), rows),
        **dict.fromkeys(("v_desc", "dk_desc", "dv_desc"), keys),
        **dict.fromkeys(("lse_desc", "delta_desc"), statistics),
        "k_desc": _tile(dtype, BACKWARD_KEYS, width),
        "dq_desc": _tile("fp32", 64, 64),
        "scale": "fp32",
    }


def _tile(dtype: str, rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], TYPES[dtype])
    return f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{layout!r}>"
