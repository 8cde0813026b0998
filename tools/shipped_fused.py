"""The fused kernels of norms, gated activations and rotary embeddings, described for the ahead-of-time compiler as in
`shipped.py`: in the dtypes of a bf16 model with an fp32 residual stream, all in bf16, and norms all in fp32.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from shipped import ARCHITECTURES, USUALLY_SPILLED, Shipped
from stepscope.kernels import gated_kernels, norms_kernels, rotary_kernels

STREAMS = {
    "mixed": ("*fp32", "*bf16"),
    "bf16": ("*bf16", "*bf16"),
    "fp32": ("*fp32", "*fp32"),
}  # residual stream, branch
WIDTHS = (128, 768, 1024, 2560, 4096, 8192)
HEAD_DIMS = (64, 80, 128)
WIDTH_OF_ACTIVATIONS = 11008  # not a multiple of the block


def fused() -> Iterator[Shipped]:
    for arch in ARCHITECTURES:
        for kind, stream, width in itertools.product(("rms", "layer"), STREAMS, WIDTHS):
            yield from _norm(kind, stream, width, arch)
        yield _sum_of_parts(arch)
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield from _gated(activation, arch)
        for interleaved, head_dim, packed in itertools.product((False, True), HEAD_DIMS, (False, True)):
            yield _rotary(head_dim, arch, interleaved=interleaved, packed=packed)


def _entry(
    name: str,
    kernel: Any,
    types: dict[str, Any],
    constants: dict[Any, Any],
    arch: int,
    *,
    product: str = "STG.E.128",
    **options: int,
) -> Shipped:
    """Strides are multiples of 16, and those of a last dimension are one."""
    signature: dict[str, Any] = {}
    aligned: list[Any] = []
    constants = dict(constants)
    for index, argument in enumerate(kernel.arg_names):
        kind = "constexpr" if argument in constants else types.get(argument, "i32")
        if argument.endswith("_strides") and kind != "constexpr":
            count = 3 if argument == "table_strides" else 4
            kind = (*["i32"] * (count - 1), "constexpr")
            constants[index, count - 1] = 1
            aligned += [(index, member) for member in range(count - 1)]
        elif kind.startswith("*") or argument.endswith("_stride"):
            aligned += [] if kind == "constexpr" else [(index,)]
        signature[argument] = kind
    return Shipped(
        name=f"{name} sm_{arch}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options=options,
        arch=arch,
        product=product,
        most_spilled=USUALLY_SPILLED if "layer norm" in name else 0,
        aligned=tuple(aligned),
    )


def _norm(kind: str, stream: str, width: int, arch: int) -> Iterator[Shipped]:
    """With the addition in front of it."""
    (wide, narrow), has_bias = STREAMS[stream], kind == "layer"
    common: dict[Any, Any] = {"WIDTH": width, "VECTOR": 4 if wide == "*fp32" else 8, "CENTERED": kind == "layer"}
    name = f"{kind} norm {stream} {width}"
    tile = norms_kernels.forward_tile(width)
    types = {"x": wide, "branch": narrow, "weight": "*fp32", "bias": "*fp32", "total": wide, "y": narrow}
    constants = common | {"BLOCK": tile.block, "ROWS": tile.rows}
    constants |= {} if has_bias else {"bias": None}
    types |= {"statistics": "*fp32", "eps": "fp32"}
    yield _entry(f"{name} forward", norms_kernels.norm_forward, types, constants, arch, num_warps=tile.num_warps)
    tile = norms_kernels.backward_tile(width)
    types = {"dy": narrow, "d_total": wide, "x": wide, "weight": "*fp32", "dx": wide, "d_branch": narrow}
    types |= dict.fromkeys(("statistics", "dweight_parts", "dbias_parts"), "*fp32")
    constants = common | {"BLOCK": tile.block, "ROWS": tile.rows, "STAGES": tile.stages}
    constants |= {} if has_bias else {"dbias_parts": None}
    constants |= {} if stream == "mixed" else {"d_branch": None}
    kernel, num_warps = norms_kernels.norm_backward, tile.num_warps
    yield _entry(f"{name} backward", kernel, types, constants, arch, num_warps=num_warps, maxnreg=tile.registers)


def _sum_of_parts(arch: int) -> Shipped:
    types = dict.fromkeys(("dweight_parts", "dbias_parts", "dweight", "dbias"), "*fp32")
    constants = {"WIDTH": 1600, "COLUMNS": norms_kernels.SUM_COLUMNS, "PARTS": norms_kernels.SUM_PARTS}
    kernel, num_warps = norms_kernels.norm_sum_partials, norms_kernels.SUM_WARPS
    return _entry("sum of norm parts", kernel, types, constants, arch, product="LDG.E.128", num_warps=num_warps)


def _gated(activation: str, arch: int) -> Iterator[Shipped]:
    tile = gated_kernels.TILE
    constants = {"WIDTH": WIDTH_OF_ACTIVATIONS, "BLOCK": tile.block, "VECTOR": 8, "ACTIVATION": activation}
    types = dict.fromkeys(("dy", "gate", "up", "y", "dgate", "dup"), "*bf16")
    for stage, kernel in (("forward", gated_kernels.gated_forward), ("backward", gated_kernels.gated_backward)):
        yield _entry(f"gated {activation} {stage}", kernel, types, constants, arch, num_warps=tile.num_warps)


def _rotary(head_dim: int, arch: int, *, interleaved: bool, packed: bool) -> Shipped:
    tile = rotary_kernels.choose_tile(head_dim)
    constants: dict[Any, Any] = {"HEADS": 16, "GROUPS": 8, "HEAD_DIM": head_dim, "BLOCK": tile.block, "ROWS": tile.rows}
    constants |= {"INTERLEAVED": interleaved, "INVERSE": False}
    types = dict.fromkeys(("q", "k", "v", "q_out", "k_out", "v_out"), "*bf16") | {"cos": "*fp32", "sin": "*fp32"}
    if not packed:
        constants |= dict.fromkeys(("v", "v_out", "v_strides", "v_out_strides"))
    name = f"rotary {'interleaved' if interleaved else 'half'}{' packed' if packed else ''} {head_dim}"
    return _entry(name, rotary_kernels.rotate_heads, types, constants, arch, num_warps=tile.num_warps)
