"""The kernels that stepscope ships, described for the ahead-of-time compiler: with their default tiles, and for lengths
that no tile divides, which is the harder case. `aot.py` compiles and checks them.

A launcher lets Triton infer an argument's type and alignment at the first call; here they are written down. Strides are
multiples of 16 elements, the last is one, and lengths are arbitrary, as for a model's tensors.
"""

import itertools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"
PACKAGES = ("stepscope.kernels", "stepscope.kernels.attention")


def _import_without_torch() -> None:
    """Make the kernel modules importable without torch, which their packages' `__init__` imports."""
    sys.path.insert(0, str(SOURCE))
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(SOURCE.joinpath(*name.split(".")))]
        sys.modules[name] = package


_import_without_torch()

import triton.language as tl  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from stepscope.kernels import adamw_kernels, cross_entropy_kernels  # noqa: E402
from stepscope.kernels.attention import tiles  # noqa: E402
from stepscope.kernels.attention.hopper.backward_kernel import (  # noqa: E402
    KEYS_OF_PROGRAM,
    ROWS_OF_TILE,
    attention_hopper_backward,
    backward_settings,
)
from stepscope.kernels.attention.hopper.forward_kernel import (  # noqa: E402
    KEYS_OF_TILE,
    ROWS_OF_CONSUMER,
    attention_hopper_forward,
    forward_settings,
)
from stepscope.kernels.attention.tiles import Arithmetic, Pass, Tile, TileKey  # noqa: E402
from stepscope.kernels.attention.triton_kernels import (  # noqa: E402
    KernelExtras,
    attention_backward_keys,
    attention_backward_queries,
    attention_forward,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One shipped kernel. A signature names each argument's type, "constexpr" for those in `constants`.

    `aligned` and the keys of `constants` are argument names, or positions: (argument,) or (argument, member of a
    tuple).
    """

    name: str
    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    options: dict[str, Any]
    arch: int
    product: str  # the instruction that must be present: of the tensor cores, or a load of 16 bytes
    most_spilled: int  # bytes
    aligned: tuple[Any, ...] = ()
    may_serialize: bool = False  # whether its asynchronous matmuls may wait for one another
    gluon: bool = False
    sample: bool = False  # one of the dozen that `make test` compiles


def shipped() -> list[Shipped]:
    """Return all of them."""
    from shipped_fused import fused

    return [*_triton(), *_hopper(), *_lists(), *fused(), *_losses()]


KERNELS = {
    "forward": attention_forward,
    "backward_queries": attention_backward_queries,
    "backward_keys": attention_backward_keys,
}
# What a launcher passes by descriptor if there is a copy engine.
DESCRIBED: dict[Pass, tuple[str, ...]] = {
    "forward": ("q", "q_tail", "k", "k_tail", "v", "v_tail"),
    "backward_queries": ("k", "k_tail", "v", "v_tail"),
    "backward_keys": ("q", "q_tail", "do", "do_tail", "rows"),
}
# What a call can add to plain attention, by what its tensors and numbers are.
_BIAS = {"bias": "*bf16", "bias_batch_stride": "i32", "bias_head_stride": "i32", "bias_query_stride": "i32"}
_BIAS["bias_keys"] = "i32"
_ALIBI = {"slopes": "*fp32", "slopes_batch_stride": "i32"}
_DOCUMENTS = {"document_starts": "*i32", "document_ends": "*i32"}
EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"left": "i32"},
    "softcap": {"softcap": "fp32"},
    "bias": _BIAS,
    "dbias": _BIAS,
    "alibi": _ALIBI,
    "sinks": {"sinks": "*fp32"},
    "documents": _DOCUMENTS,
    "everything": {"left": "i32", "softcap": "fp32", "sinks": "*fp32", **_BIAS, **_ALIBI, **_DOCUMENTS},
}
WITH_DBIAS = ("dbias", "everything")
_STAGES_OF: dict[str, tuple[Pass, ...]] = {"dbias": ("backward_queries",), "sinks": ("forward",)}
WIDTHS_WITH_EXTRAS = ((64, 0), (128, 0), (192, 128))
# Those of q and of v, zero if they are the same; DeepSeek's differ.
HEAD_WIDTHS = (*((width, 0) for width in tiles.WIDTHS), (192, 128))
ARCHITECTURES: dict[int, tiles.Architecture] = {80: "ampere", 90: "hopper"}


def _triton() -> Iterator[Shipped]:
    for arch, architecture in ARCHITECTURES.items():
        for stage in tiles.PASSES:
            for arithmetic in tiles.ARITHMETICS:
                for width, v_width in HEAD_WIDTHS:
                    for causal in (False, True):
                        key = TileKey(
                            stage=stage,
                            arithmetic=arithmetic,
                            width=width,
                            v_width=v_width,
                            causal=causal,
                            architecture=architecture,
                        )
                        yield triton_entry(key, tiles.choose(key), arch)
                        if arithmetic == "half" and causal and (width, v_width) in WIDTHS_WITH_EXTRAS:
                            for extras in EXTRAS:
                                if stage in _STAGES_OF.get(extras, tiles.PASSES):
                                    yield triton_entry(key, _tile_for(key, extras), arch, extras)


def _tile_for(key: TileKey, extras: str) -> Tile:
    """As `triton_launch.tile_for`, which imports torch."""
    is_heavy = any(name in EXTRAS[extras] for name in ("softcap", "bias", "slopes", "document_starts"))
    return (tiles.choose_for_extras(key) if is_heavy else None) or tiles.choose(key)


def triton_entry(key: TileKey, tile: Tile, arch: int, extras: str = "") -> Shipped:
    """A Triton kernel with one tile, for lengths that no tile divides."""
    kernel = KERNELS[key.stage]
    element = "bf16" if key.arithmetic == "half" else "fp32"
    described = DESCRIBED[key.stage] if arch >= 90 else ()
    if key.stage == "forward" and key.arithmetic != "half":
        described = tuple(name for name in described if not name.startswith("q"))
    widths = {"q": key.width, "k": key.width, "v": key.v_width or key.width, "do": key.v_width or key.width}
    constants: dict[Any, Any] = {
        "HEAD_DIM": widths["q"],
        "V_HEAD_DIM": widths["v"],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "CAUSAL": key.causal,
        "WHOLE_QUERIES" if key.stage == "backward_keys" else "WHOLE_KEYS": False,
        "PRECISION": "tf32x3" if key.arithmetic == "tf32x3" else "tf32",
    }
    if key.stage == "backward_queries" and extras not in WITH_DBIAS:
        constants["dbias"] = None
    for name, width in widths.items():
        if f"{name}_tail" in kernel.arg_names and width == tiles.main_width(width):
            constants[f"{name}_tail"] = None
    signature: dict[str, Any] = {}
    aligned: list[Any] = []
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in described:
            signature[name] = _descriptor(name, element, tile, widths)
        elif name == "extras":
            signature[name] = KernelExtras(**dict.fromkeys(KernelExtras._fields, "constexpr") | EXTRAS.get(extras, {}))
            for place, (field, kind) in enumerate(signature[name]._asdict().items()):
                if kind == "constexpr":
                    constants[index, place] = 1 if field in ("bias_key_stride", "slopes_head_stride") else None
                elif kind.startswith("*") or field.startswith("bias"):
                    aligned.append((index, place))
        elif name.endswith("_strides"):
            signature[name] = ("i32", "i32", "i32", "constexpr")
            constants[index, 3] = 1
            aligned += [(index, member) for member in range(3)]
        else:
            signature[name] = _scalar_or_pointer(name, element)
            if signature[name].startswith("*") or name == "padded_queries":
                aligned.append((index,))
    mask = "causal" if key.causal else "full"
    title = f"{key.width}/{key.v_width}" if key.v_width else str(key.width)
    return Shipped(
        name=" ".join(filter(None, ("triton", key.stage, key.arithmetic, title, mask, extras, f"sm_{arch}"))),
        kernel=kernel,
        signature=signature,
        constants=constants,
        options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        arch=arch,
        aligned=tuple(aligned),
        product="HGMMA" if arch >= 90 and (element == "bf16" or _is_asynchronous(key.stage, tile)) else "HMMA",
        most_spilled=_MOST_SPILLED.get((key.stage, key.arithmetic, key.widest), USUALLY_SPILLED),
        # A bias moves through shared memory, in both directions if it has a gradient. Its bytes then set the speed.
        may_serialize="bias" in EXTRAS.get(extras, {}),
        # What a bf16 Transformer uses, on both architectures: a dozen, together with the Hopper kernels.
        sample=key.arithmetic == "half" and key.width == 128 and key.causal and not extras,
    )


def _descriptor(name: str, element: str, tile: Tile, widths: dict[str, int]) -> str:
    if name == "rows":
        return f"tensordesc<fp32[1, {tile.block_m}]>"
    tensor, _, tail = name.partition("_")
    rows = tile.block_n if tensor in ("k", "v") else tile.block_m
    width = tiles.main_width(widths[tensor])
    if tail:
        width = widths[tensor] - width
    return f"tensordesc<{element}[1, 1, {rows}, {width}]>"


def _scalar_or_pointer(name: str, element: str) -> str:
    if name in ("lse", "rows", "dbias"):
        return "*fp32"
    if name == "scale":
        return "fp32"
    return f"*{element}" if name.removesuffix("_tail") in ("q", "k", "v", "o", "do", "dq", "dk", "dv") else "i32"


def _is_asynchronous(stage: Pass, tile: Tile) -> bool:
    """wgmma takes 64 rows and four warps; with fewer, as is fastest for fp32, Triton uses Ampere's mma."""
    return tile.num_warps >= 4 and (tile.block_n if stage == "backward_keys" else tile.block_m) >= 64


# A few address registers that are spilled before a loop and read after it cost nothing.
USUALLY_SPILLED = 64
# Wide heads in fp32, where every operand is two and every sum has a second one: no tile was found that keeps everything
# in registers, and of those measured on an H200 these were the fastest anyway.
_MOST_SPILLED: dict[tuple[Pass, Arithmetic, int], int] = {
    ("forward", "tf32x3", 128): 320,
    ("forward", "tf32x3", 256): 1024,
    ("backward_queries", "tf32x3", 128): 768,
    ("backward_queries", "tf32x3", 192): 320,
    ("backward_queries", "tf32x3", 256): 1024,
    ("backward_keys", "tf32", 256): 192,
    ("backward_keys", "tf32x3", 32): 192,
    ("backward_keys", "tf32x3", 64): 320,
    ("backward_keys", "tf32x3", 128): 1024,
    ("backward_keys", "tf32x3", 192): 448,
    ("backward_keys", "tf32x3", 256): 1536,
}


# --- Hopper. The type of a descriptor carries the layout of its tile. ---

_GLUON_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "i32": gl.int32}
_OPTIONS = ("num_warps", "maxnreg")
# Bytes, by kernel, width and mask: what the code has under both supported compilers, rounded up. None of it is in an
# inner loop except in backward at 64, where tiles of 128 queries do not fit and are still the fastest.
_MOST_SPILLED_ON_HOPPER = {
    ("forward", 128, "whole"): 0,
    ("forward", 128, "ragged"): 0,
    ("forward", 128, "causal"): 16,
    ("forward", 128, "window"): 32,
    ("forward", 128, "documents"): 32,
    ("forward", 64, "whole"): 0,
    ("forward", 64, "ragged"): 48,
    ("forward", 64, "causal"): 0,
    ("forward", 64, "causal long"): 0,
    ("forward", 64, "window"): 0,
    ("forward", 64, "documents"): 0,
    ("backward", 128, "whole"): 0,
    ("backward", 128, "ragged"): 0,
    ("backward", 128, "causal"): 64,
    ("backward", 128, "window"): 64,
    ("backward", 128, "documents"): 96,
    ("backward", 64, "whole"): 128,
    ("backward", 64, "ragged"): 160,
    ("backward", 64, "causal"): 256,
    ("backward", 64, "window"): 256,
    ("backward", 64, "documents"): 256,
    ("backward", 128, "deterministic"): 80,
    ("backward", 64, "deterministic"): 256,
}
# Under a causal mask it makes no difference whether the keys fill their tiles.
_MASKS: dict[str, dict[str, bool]] = {
    "whole": {"causal": False, "whole_keys": True},
    "ragged": {"causal": False, "whole_keys": False},
    "causal": {"causal": True, "whole_keys": False},
    "causal long": {"causal": True, "whole_keys": False, "long": True},
    "window": {"causal": True, "whole_keys": False, "has_window": True},
    "documents": {"causal": True, "whole_keys": False, "has_documents": True},
    "deterministic": {"causal": True, "whole_keys": False, "deterministic": True},
}


def _hopper() -> Iterator[Shipped]:
    for dtype, width, mask in itertools.product(("bf16", "fp16"), (64, 128), _MASKS):
        for stage, kernel in (("forward", attention_hopper_forward), ("backward", attention_hopper_backward)):
            if (stage, width, mask) not in _MOST_SPILLED_ON_HOPPER:
                continue  # the same code as for shorter ones
            settings = dict((forward_settings if stage == "forward" else backward_settings)(width, **_MASKS[mask]))
            options = {name: settings.pop(name) for name in _OPTIONS}
            types = _forward_types(dtype, width) if stage == "forward" else _backward_types(dtype, width)
            if mask == "deterministic":
                types["dq_desc"] = _tile("i32", 64, 64)
            if mask == "documents":
                types |= {"starts": "*i32", "ends": "*i32"}
            else:
                settings |= {"starts": None, "ends": None}
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            yield Shipped(
                name=f"hopper {stage} {dtype} {width} {mask}",
                kernel=kernel,
                signature=signature | dict.fromkeys(settings, "constexpr"),
                constants=settings,
                options=options,
                arch=90,
                product="HGMMA",
                most_spilled=_MOST_SPILLED_ON_HOPPER[stage, width, mask],
                aligned=("lse_ptr",) if stage == "forward" else (),
                gluon=True,
                sample=dtype == "bf16" and (mask == "causal" or (mask == "whole" and stage == "forward")),
            )


def _forward_types(dtype: str, width: int) -> dict[str, str]:
    rows, keys = _tile(dtype, ROWS_OF_CONSUMER, width), _tile(dtype, KEYS_OF_TILE, width)
    return {"q_desc": rows, "k_desc": keys, "v_desc": keys, "o_desc": rows, "lse_ptr": "*fp32", "scale": "fp32"}


def _backward_types(dtype: str, width: int) -> dict[str, str]:
    rows, keys = _tile(dtype, ROWS_OF_TILE[width], width), _tile(dtype, KEYS_OF_PROGRAM // 2, width)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    statistics = f"tensordesc<fp32[1, {ROWS_OF_TILE[width]}],{layout!r}>"
    return {
        **dict.fromkeys(("q_desc", "do_desc"), rows),
        **dict.fromkeys(("v_desc", "dk_desc", "dv_desc"), keys),
        "rows_desc": statistics,
        "k_desc": _tile(dtype, KEYS_OF_PROGRAM, width),
        "dq_desc": _tile("fp32", 64, 64),
        "scale": "fp32",
    }


def _tile(dtype: str, rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], _GLUON_TYPES[dtype])
    return f"tensordesc<{dtype}[1, 1, {rows}, {columns}],{layout!r}>"


# --- Lists of tensors. Their kernels find the types of what is behind an address in their constants. ---

_TL_TYPES = {"bf16": tl.bfloat16, "fp32": tl.float32}
_LIST_CONSTANTS: dict[str, Any] = {"ALIGNED": True, "CHUNK": 4096}
# The states, the gradient, the working copy: a matrix of a bf16 model, a vector of it, and a parameter in fp32.
_UPDATED_TYPES = (("fp32", "bf16", "bf16"), ("fp32", "fp32", None), ("bf16", "bf16", None))


def _lists() -> Iterator[Shipped]:
    for arch in ARCHITECTURES:
        for state, gradient, working in _UPDATED_TYPES:
            constants = {"STATE_TYPE": _TL_TYPES[state], "GRADIENT_TYPE": _TL_TYPES[gradient], "BLOCK": 1024}
            constants["WORKING_TYPE"] = None if working is None else _TL_TYPES[working]
            name = f"adamw update {state} {gradient} {working}"
            # Four elements per thread are eight bytes in bf16.
            product = "LDG.E.128" if state == "fp32" else "LDG.E.64"
            yield plain_entry(name, adamw_kernels.adamw_update, constants | _LIST_CONSTANTS, arch, product)
        for gradient in ("bf16", "fp32"):
            constants = {"GRADIENT_TYPE": _TL_TYPES[gradient]} | _LIST_CONSTANTS
            yield plain_entry(f"adamw norm {gradient}", adamw_kernels.sum_squares, constants, arch, "LDG.E.128")
            for overwrite in (False, True):
                name = f"accumulate {gradient}{' overwrite' if overwrite else ''}"
                product = "STG.E.128"
                more = {"OVERWRITE": overwrite, "BLOCK": 1024}
                yield plain_entry(name, adamw_kernels.accumulate_chunks, constants | more, arch, product)
        constants = {"CLIP": True, "GROUPS": 2, "PARTIALS": 1024}
        yield plain_entry("adamw prepare", adamw_kernels.adamw_prepare, constants, arch, "LDG.E.64")


# --- Cross entropy. What a launcher leaves out is None. ---

_LOSS_PASSES: dict[str, tuple[str, ...]] = {
    "forward": ("gradients", "upstream", "scale", "bias"),
    "backward": ("losses", "bias"),
    "in place": ("log_sum_exps", "upstream", "scale", "bias"),
}
_LOSS_EXTRAS = ("softcap", "smoothing", "z_loss")
# Rows that start anywhere, as of 50,257 logits; padded rows of as many; rows that stay in registers, as of 10,000.
_LOSS_ROWS: dict[str, dict[str, Any]] = {
    "shifted": {"SHIFTED": True, "ONE_BLOCK": False, "BLOCK": 4096},
    "padded": {"SHIFTED": False, "ONE_BLOCK": False, "BLOCK": 4096},
    "short": {"SHIFTED": False, "ONE_BLOCK": True, "BLOCK": 16384},
}


def _losses() -> Iterator[Shipped]:
    rows = cross_entropy_kernels.cross_entropy_rows
    for arch, (element, precision), stage, layout, extras in itertools.product(
        ARCHITECTURES, (("bf16", "tf32"), ("fp32", "tf32x3")), _LOSS_PASSES, _LOSS_ROWS, (False, True)
    ):
        absent = _LOSS_PASSES[stage] + (() if extras else _LOSS_EXTRAS)
        constants = dict.fromkeys(absent) | {"ALIGNED": True, "PRECISION": precision} | _LOSS_ROWS[layout]
        divisible = {"shifted": (), "padded": ("row_stride",), "short": ("row_stride", "vocab")}[layout]
        name = " ".join(filter(None, ("cross_entropy", stage, element, layout, "extras" if extras else "")))
        yield plain_entry(
            name,
            rows,
            constants,
            arch,
            "LDG.E.128",
            warps=16 if layout == "short" else 8,
            types=dict.fromkeys(("logits", "gradients"), f"*{element}"),
            divisible=divisible,
            most_spilled=8 if extras and element == "fp32" else 0,  # one address, before the loops
        )
    for arch in ARCHITECTURES:
        constants = {"MEAN": True, "BLOCK": 4096}
        reduce = cross_entropy_kernels.cross_entropy_reduce
        yield plain_entry("cross_entropy reduce", reduce, constants, arch, "LDG.E.64")
        scale = cross_entropy_kernels.scale_gradient
        for element in ("bf16", "fp32"):
            types = {"gradient": f"*{element}", "output": "*bf16"}
            yield plain_entry(
                f"cross_entropy scale {element}", scale, {"BLOCK": 2048}, arch, "LDG.E.128", types=types,
                divisible=("count",),
            )  # fmt: skip


# What an argument of the kernels without tiles is; everything else is an i32.
_POINTERS = {
    "tensors": "*i64",
    "chunks": "*i32",
    "hypers": "*fp64",
    "powers": "*fp64",
    "targets": "*i64",
    **dict.fromkeys(("factors", "partials", "steps", "grad_norm"), "*fp32"),
    **dict.fromkeys(("losses", "log_sum_exps", "upstream", "scale", "loss"), "*fp32"),
}
_SCALARS = dict.fromkeys(("max_norm", *_LOSS_EXTRAS), "fp32")


def plain_entry(
    name: str,
    kernel: Any,
    constants: dict[str, Any],
    arch: int,
    product: str,
    *,
    warps: int = 8,
    types: dict[str, str] | None = None,
    divisible: tuple[str, ...] = (),
    most_spilled: int = 0,
) -> Shipped:
    """A kernel without tensor cores or descriptors, whose pointers are aligned."""
    known = _POINTERS | _SCALARS | (types or {}) | dict.fromkeys(constants, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in kernel.arg_names}
    return Shipped(
        name=f"{name} sm_{arch}",
        kernel=kernel,
        signature=signature,
        constants=constants,
        options={"num_warps": warps},
        arch=arch,
        product=product,
        most_spilled=most_spilled,
        aligned=(*divisible, *(argument for argument, kind in signature.items() if kind.startswith("*"))),
    )
