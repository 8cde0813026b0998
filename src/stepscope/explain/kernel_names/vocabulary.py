"""The decoded name, and the words that several families share: dtypes, architectures, tiles and layouts."""

import re
from typing import Any, Literal, TypeVarTuple, get_args

import msgspec

from stepscope.explain.kernel_names.anatomy import Anatomy

KernelClass = Literal[
    "GEMM",
    "attention",
    "softmax",
    "norm",
    "elementwise",
    "reduction",
    "copy",
    "index",
    "embedding",
    "loss",
    "optimizer",
    "random",
    "sort",
    "convolution",
    "communication",
    "memcpy",
    "memset",
    "other",
]
CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)
Direction = Literal["forward", "backward"]


class NamePart(msgspec.Struct, frozen=True):
    """A piece of the name, and its meaning."""

    text: str
    meaning: str


class KernelName(msgspec.Struct, frozen=True, kw_only=True):
    """What a name says; fields that it does not determine are None."""

    name: str  # as recorded
    short: str  # for tables and charts: one line, printable, bounded
    library: str
    kernel_class: KernelClass
    operation: str  # in plain words
    direction: Direction | None = None
    architecture: str | None = None  # `sm_80`, `gfx942`: the architecture it was compiled for, not the one it ran on
    dtype: str | None = None  # of the arithmetic: fp64 fp32 tf32 bf16 fp16 fp8 int8 ...
    tile: tuple[int, ...] | None = None  # (M, N) or (M, N, K)
    stages: int | None = None
    layout: str | None = None  # of the two operands, in BLAS's column-major terms: nn, nt, tn, tt
    tensor_cores: bool | None = None
    split_k: bool = False
    is_cast: bool = False  # a copy that changes the dtype, if the name says so
    fused: tuple[str, ...] = ()  # the operations that Inductor fused into one kernel
    parts: tuple[NamePart, ...] = ()


# --- Words ------------------------------------------------------------------------------------------------------------

Ts = TypeVarTuple("Ts")
LONGEST_SHORT = 48
LONGEST_PART = 120
MOST_PARTS = 40
_LARGEST_TILE = 1 << 16

# Spelling in C++ and the libraries. `ushort` is left out: only CK uses it for bf16.
_TYPES = {
    "double": "fp64",
    "float": "fp32",
    "float2": "fp32",
    "float4": "fp32",
    "tfloat32_t": "tf32",
    "BFloat16": "bf16",
    "__nv_bfloat16": "bf16",
    "__nv_bfloat162": "bf16",
    "nv_bfloat16": "bf16",
    "__hip_bfloat16": "bf16",
    "hip_bfloat16": "bf16",
    "bfloat16_t": "bf16",
    "__bf16": "bf16",
    "Half": "fp16",
    "__half": "fp16",
    "__half2": "fp16",
    "half": "fp16",
    "half_t": "fp16",
    "_Float16": "fp16",
    "Float8_e4m3fn": "fp8",
    "Float8_e4m3fnuz": "fp8",
    "Float8_e5m2": "fp8",
    "__nv_fp8_e4m3": "fp8",
    "__nv_fp8_e5m2": "fp8",
    "float_e4m3_t": "fp8",
    "float_e5m2_t": "fp8",
    "signed char": "int8",
    "int8_t": "int8",
}
_WHOLE_TYPES = {
    "long": "int64",
    "int64_t": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}
_FLOAT_TYPE = re.compile(
    r"(?<![\w])(?:"
    + "|".join(sorted(map(re.escape, _TYPES), key=len, reverse=True))
    + r")(?!\w)|(?<!\w)complex<(?:float|double)>",
    re.ASCII,
)
_WHOLE_ARGUMENT = re.compile(
    r"(?:lambda\(|[A-Za-z]unctor\w*<|_add<|ReduceOp<|, )(?:bool, )?"
    r"(long|int64_t|int|short|signed char|unsigned char|bool)\b"
)

# Spelling in the names of GEMM kernels.
CODES = {
    "f64": "fp64",
    "f32": "fp32",
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "f16": "fp16",
    "fp16": "fp16",
    "e4m3": "fp8",
    "e5m2": "fp8",
    "fp8": "fp8",
    "s8": "int8",
    "i8": "int8",
    "u8": "uint8",
    "int8": "int8",
    "i32": "int32",
    "s32": "int32",
    "s4": "int4",
    "e2m1": "fp4",
    "ue8m0": "fp8",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
BLAS_LETTERS = {"s": "fp32", "d": "fp64", "h": "fp16", "c": "complex64", "z": "complex128", "i": "int32"}

ARCHITECTURES = {
    "kepler": ("sm_35", "Kepler"),
    "maxwell": ("sm_50", "Maxwell"),
    "pascal": ("sm_60", "Pascal"),
    "volta": ("sm_70", "Volta"),
    "turing": ("sm_75", "Turing"),
    "ampere": ("sm_80", "Ampere"),
    "ada": ("sm_89", "Ada"),
    "hopper": ("sm_90", "Hopper"),
    "blackwell": ("sm_100", "Blackwell"),
}
_GENERATIONS = {"5": "Maxwell", "6": "Pascal", "70": "Volta", "72": "Volta", "75": "Turing", "89": "Ada", "8": "Ampere"}

LAYOUTS = {
    "tn": (
        "the first matrix is transposed, the second is not (BLAS's column-major terms): x @ W.T, usually the"
        " forward pass of nn.Linear"
    ),
    "nn": (
        "neither matrix is transposed (BLAS's column-major terms): dy @ W, the input gradient of"
        " nn.Linear, or any row-major a @ b"
    ),
    "nt": (
        "the second matrix is transposed, the first is not (BLAS's column-major terms): dy.T @ x, the weight gradient"
        " of nn.Linear"
    ),
    "tt": "both matrices are transposed (BLAS's column-major terms)",
}


def compile_rows(*rows: tuple[str, *Ts]) -> tuple[tuple[re.Pattern[str], *Ts], ...]:
    """Compile a table whose rows start with a pattern; the first that matches a name identifies the kernel."""
    return tuple((re.compile(row[0]), *row[1:]) for row in rows)


def first_match(rows: tuple[tuple[re.Pattern[str], *Ts], ...], text: str) -> tuple[re.Match[str], *Ts] | None:
    """Return the match and the rest of the first row whose pattern matches a text."""
    for row in rows:
        if match := row[0].search(text):
            return match, *row[1:]
    return None


def build(
    anatomy: Anatomy, library: str, kernel_class: KernelClass, operation: str, short: str = "", **fields: Any
) -> KernelName:
    """Return a decoded name. Without a short name, the operation is used."""
    return KernelName(
        name=anatomy.name,
        library=library,
        kernel_class=kernel_class,
        operation=operation,
        short=short or operation,
        **fields,
    )


def part(text: str, meaning: str) -> NamePart:
    return NamePart(text if len(text) <= LONGEST_PART else text[: LONGEST_PART - 1] + "…", meaning)


def find_dtype(text: str) -> str | None:
    """Return the first floating-point type in C++ text: integers are mostly sizes and indices."""
    if match := _FLOAT_TYPE.search(text):
        spelled = match[0]
        if spelled.startswith("complex"):
            return "complex64" if "float" in spelled else "complex128"
        return _TYPES[spelled]
    return None


def find_element_type(text: str) -> str | None:
    """Return the first type in a functor's text, where integers are data too."""
    if dtype := find_dtype(text):
        return dtype
    match = _WHOLE_ARGUMENT.search(text)
    return _WHOLE_TYPES[match[1]] if match else None


def all_dtypes(text: str) -> list[str]:
    return [_TYPES.get(match[0], "complex") for match in _FLOAT_TYPE.finditer(text)]


def name_architecture(number: str) -> tuple[str, str]:
    """`80` to (`sm_80`, `Ampere`)."""
    if number in _GENERATIONS:
        return f"sm_{number}", _GENERATIONS[number]
    if number.startswith("90"):
        return f"sm_{number}", "Hopper"
    if len(number) >= 3 and number.startswith(("10", "11", "12")):
        return f"sm_{number}", "Blackwell"
    return f"sm_{number}", _GENERATIONS.get(number[:1], "an NVIDIA GPU")


def explain_architecture(text: str, architecture: str, generation: str) -> NamePart:
    return part(text, f"written for {generation} ({architecture}); newer GPUs can run it too")


def explain_tile(text: str, tile: tuple[int, ...]) -> NamePart:
    meaning = f"each thread block computes a {tile[0]}×{tile[1]} tile of the result"
    if len(tile) > 2:
        meaning += f", in steps of {tile[2]} along K"
    return part(text, meaning)


def explain_layout(text: str) -> NamePart:
    return part(text, LAYOUTS.get(text.lower()[:2], "layouts of the matrices"))


def explain_slab(text: str, depth: int, stages: int) -> NamePart:
    return part(
        text,
        f"K is processed in slabs of {depth} elements, {stages} of them in flight"
        if stages > 1
        else f"K is processed in slabs of {depth} elements, one in flight",
    )


def spell_tile(tile: tuple[int, ...] | None) -> str:
    return "×".join(map(str, tile[:2])) if tile else ""


def spell_direction(direction: Direction | None) -> str | None:
    return {"forward": "fwd", "backward": "bwd"}.get(direction or "")


def join(*pieces: str | None) -> str:
    return " ".join(piece for piece in pieces if piece)


def finish(decoded: KernelName) -> KernelName:
    """Return a name of bounded length. It is already printable: `dissect` removes everything else."""
    if decoded.tile and not (len(decoded.tile) in (2, 3) and all(0 < size <= _LARGEST_TILE for size in decoded.tile)):
        decoded = msgspec.structs.replace(decoded, tile=None)
    short = decoded.short.strip() or "unnamed kernel"
    if len(short) > LONGEST_SHORT:
        short = short[: LONGEST_SHORT - 1].rstrip() + "…"
    if short == decoded.short and len(decoded.parts) <= MOST_PARTS:
        return decoded
    return msgspec.structs.replace(decoded, short=short, parts=decoded.parts[:MOST_PARTS])
