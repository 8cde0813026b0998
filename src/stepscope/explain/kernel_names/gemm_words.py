"""The vocabulary of hand-tuned GEMM names: `ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn`.

cuBLAS, CUTLASS and cuDNN build names from the same words, joined with underscores in different orders. The words are
read one by one, in any order, into one `GemmReading`; the families add the library.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from stepscope.explain.kernel_names.vocabulary import (
    ARCHITECTURES,
    BLAS_LETTERS,
    CODES,
    NamePart,
    explain_architecture,
    explain_layout,
    explain_slab,
    explain_tile,
    name_architecture,
    part,
)

_OPERATION = re.compile(
    r"(g?)([shdczi])(\d{3,8}|\d+x\d+x\d+)?(?:tf32|bf16|f16|i8)?(gemm|fprop|dgrad|wgrad|syrk|trmm|symm|herk)(?:3d|2d)?$"
)
_TILE = re.compile(r"(\d{1,4})x(\d{1,4})(?:x(\d{1,4}))?$")
_PREFIXED = re.compile(
    r"(?P<word>tilesize|stage|warpsize|warpgroupsize|tensor|aligna|alignb|alignc|align|sliced|ldg|cga|g|sm)"
    r"(?P<value>\d+(?:x\d+){0,2})$"
)
_TYPE_PAIR = re.compile(
    r"(tf32|bf16|f16|f32|f64|e4m3|e5m2|i8|i32|u8|s8)(tf32|bf16|f16|f32|f64|e4m3|e5m2|i8|i32|u8|s8)$"
)
_LAYOUT = re.compile(r"[nt]{2}$|[nthc]{3}$")
_NOTES = {
    "ffma": "plain fused multiply-adds on the CUDA cores: no tensor cores",
    "simt": "runs on the CUDA cores: no tensor cores",
    "tensorop": "runs on tensor cores",
    "wmma": "uses tensor cores through the older WMMA instructions",
    "warpspecialized": "some warps only load, others only compute",
    "pingpong": "two groups of warps alternate between computing and storing",
    "cooperative": "two groups of warps share one tile",
    "relu": "the epilogue can apply ReLU",
    "bias": "the epilogue adds a bias",
    "gelu": "the epilogue applies GELU",
    "splitk": "K is split among thread blocks, and their partial results are added up",
    "nhwc": "channels-last tensors (batch, height, width, channel)",
    "nchw": "channels-first tensors (batch, channel, height, width)",
    "nhwckrsc": "channels-last input (NHWC) and filter (KRSC)",
    "indexed": "input positions are looked up in a table",
    "implicit": "implicit GEMM: a convolution computed as a GEMM whose first operand is never written to memory",
    "optimized": "index arithmetic is precomputed",
    "analytic": "index arithmetic is done on the fly",
    "winograd": "Winograd's algorithm: fewer multiplications for small filters",
    "fprop": "forward convolution",
    "dgrad": "gradient of the convolution's input",
    "wgrad": "gradient of the convolution's filter",
    "gemm": "general matrix multiplication",
    "cublas": "compiled into cuBLAS",
    "cudnn": "compiled into cuDNN",
    "xmma": "a family of matrix kernels that NVIDIA's libraries share",
}
# Words without a meaning of their own.
_FILLERS = frozenset(("execute", "kernel", "stages", "cutlass", "cutlass3x", "infer", "train", "split", "k", "void"))


@dataclass
class GemmReading:
    """The meaning of the words read so far."""

    architecture: str | None = None
    dtype: str | None = None
    tile: tuple[int, ...] | None = None
    stages: int | None = None
    layout: str | None = None
    tensor_cores: bool | None = None
    split_k: bool = False
    operation: str = ""  # `gemm`, `fprop`, `dgrad` or `wgrad`
    letter: str = ""  # of BLAS: s, d, h
    parts: list[NamePart] = field(default_factory=list)
    factors: bool = False  # whether the dtype of the operands was named
    unknown: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Return the fields for a `KernelName`."""
        names = ("architecture", "dtype", "tile", "stages", "layout", "tensor_cores", "split_k")
        return {name: getattr(self, name) for name in names} | {"parts": tuple(self.parts)}

    def note(self, text: str, meaning: str) -> None:
        self.parts.append(part(text, meaning))


def read(name: str) -> GemmReading:
    """Return the words of a name, split at underscores; at most as many as real names have."""
    reading = GemmReading()
    words = name.split("_")[:48]
    for index, word in enumerate(words):
        _read_word(reading, word, words, index)
    reading.split_k = reading.split_k or split_along_k(name)
    if reading.unknown:
        reading.note(", ".join(dict.fromkeys(reading.unknown)), "undocumented")
    return reading


def _read_word(reading: GemmReading, word: str, words: list[str], index: int) -> None:
    before = words[index - 1] if index else ""
    lower = word.lower()
    if word in ARCHITECTURES:
        reading.architecture, generation = ARCHITECTURES[word]
        reading.parts.append(explain_architecture(word, reading.architecture, generation))
    elif before in ("cutlass", "cutlass3x") and word.isdigit():
        _read_architecture(reading, word, word)
    elif match := _OPERATION.match(word):
        _read_operation(reading, word, match)
    elif match := _PREFIXED.match(word):
        _read_prefixed(reading, word, match["word"], match["value"])
    elif match := _TILE.match(word):
        _read_tile(reading, word, before, match)
    elif word in CODES:
        _read_type(reading, word)
    elif match := _TYPE_PAIR.match(word):
        _read_types(reading, word, match)
    elif _LAYOUT.match(word) and reading.operation:
        _read_layout(reading, word)
    elif lower in _NOTES:
        _read_note(reading, word, lower)
    elif (
        word
        and lower not in _FILLERS
        and not lower.endswith("cudnn")
        and not (_LAYOUT.match(word) or word in ("n", "t"))
    ):
        reading.unknown.append(word)


def _read_architecture(reading: GemmReading, text: str, number: str) -> None:
    reading.architecture, generation = name_architecture(number)
    reading.parts.append(explain_architecture(text, reading.architecture, generation))


def _read_operation(reading: GemmReading, word: str, match: re.Match[str]) -> None:
    letter, instruction, operation = match[2], match[3], match[4]
    reading.operation, reading.letter = operation, letter
    what = {"gemm": "GEMM"}.get(operation, _NOTES.get(operation, operation))
    accumulator = BLAS_LETTERS[letter]
    if instruction:
        reading.tensor_cores = True
        # `s1688` multiplies in the dtype that neighboring words name; without one, fp32 data is rounded to tf32.
        if reading.dtype is None:
            reading.dtype = {"s": "tf32", "i": "int8"}.get(letter, accumulator)
        shape = _spell_instruction(instruction)
        reading.note(word, f"{what} on tensor cores, {shape} per instruction, accumulates in {accumulator}")
    else:
        reading.dtype = reading.dtype or accumulator
        if letter in "sd" and reading.tensor_cores is None:
            reading.tensor_cores = False
            reading.note(word, f"{what} in {accumulator} on the CUDA cores: no tensor cores")
        else:
            reading.note(word, f"{what}, accumulates in {accumulator}")


def _spell_instruction(digits: str) -> str:
    """`16816` is 16×8×16, `884` 8×8×4, `64x128x16` is explicit."""
    shapes = {"884": "8×8×4", "1684": "16×8×4", "1688": "16×8×8", "16816": "16×8×16", "16832": "16×8×32"}
    shapes |= {"161616": "16×16×16", "8816": "8×8×16", "8832": "8×8×32", "16864": "16×8×64", "32816": "32×8×16"}
    return shapes.get(digits, digits.replace("x", "×"))


def _read_prefixed(reading: GemmReading, text: str, word: str, value: str) -> None:
    numbers = tuple(int(number[:6]) for number in value.split("x"))
    match word:
        case "sm":
            _read_architecture(reading, text, value)
        case "tilesize":
            reading.tile = numbers
            reading.parts.append(explain_tile(text, numbers) if len(numbers) > 1 else part(text, "tile"))
        case "stage":
            reading.stages = numbers[0]
            reading.note(text, f"{numbers[0]} slabs of K in flight")
        case "warpsize":
            reading.note(text, f"the block's warps are laid out {value.replace('x', '×')} over its tile")
        case "warpgroupsize":
            reading.tensor_cores = reading.dtype not in ("fp32", "fp64")
            reading.note(text, f"groups of four warps, laid out {value.replace('x', '×')} over the tile")
        case "tensor":
            reading.tensor_cores = True
            reading.note(text, f"tensor cores, {value.replace('x', '×')} per instruction")
        case "sliced":
            slices = numbers[-1]
            reading.note(text, f"the warps of a block share one tile and split K into {slices}")
        case "ldg":
            reading.note(text, f"reads {value} elements at a time from global memory")
        case "cga":
            reading.note(text, f"thread blocks in clusters of {value.replace('x', '×')}")
        case "g":
            reading.unknown.append(text)
        case _:
            matrix = {"aligna": "the first matrix", "alignb": "the second matrix", "alignc": "the result"}.get(word)
            rule = f"aligned to {value} elements" if value != "1" else "with any alignment"
            reading.note(text, f"accepts {matrix or 'matrices'} {rule}")


def _read_tile(reading: GemmReading, text: str, before: str, match: re.Match[str]) -> None:
    numbers = tuple(int(number) for number in match.groups() if number)
    if before == "stages" or (reading.tile and len(numbers) == 2):
        depth, stages = numbers[0], numbers[-1]
        reading.stages = stages
        if reading.tile and len(reading.tile) == 2:
            reading.tile = (*reading.tile, depth)
        reading.parts.append(explain_slab(f"stages_{text}" if before == "stages" else text, depth, stages))
    elif reading.tile is None:
        reading.tile = numbers
        reading.parts.append(explain_tile(text, numbers))
    else:
        reading.note(text, f"thread blocks in clusters of {text.replace('x', '×')}")


def _read_type(reading: GemmReading, word: str) -> None:
    """A dtype before the operation is the result's; after it, the operands', in which the arithmetic is done."""
    if reading.dtype is None or (reading.letter and not reading.factors):
        reading.dtype = CODES[word]
    factors = bool(reading.letter) and not reading.factors
    reading.factors = reading.factors or factors
    where = (
        "operands in"
        if factors
        else "another dtype:"
        if reading.letter
        else "result in"
        if reading.operation == ""
        else "another dtype:"
    )
    reading.note(word, f"{where} {CODES[word]}")


def _read_types(reading: GemmReading, text: str, match: re.Match[str]) -> None:
    first, second = CODES[match[1]], CODES[match[2]]
    reading.dtype = "tf32" if "tf32" in (reading.dtype, first) else reading.dtype or first
    reading.note(text, f"two of the operand, result and accumulator dtypes: {first} and {second}")


def _read_layout(reading: GemmReading, word: str) -> None:
    if reading.layout is None and word[:2] in ("nn", "nt", "tn", "tt"):
        reading.layout = word[:2]
        reading.parts.append(explain_layout(word))


def _read_note(reading: GemmReading, word: str, lower: str) -> None:
    if lower in ("fprop", "dgrad", "wgrad", "gemm"):
        reading.operation = reading.operation if reading.operation in ("fprop", "dgrad", "wgrad") else lower
    elif lower in ("simt", "ffma"):
        reading.tensor_cores = False
    elif lower in ("tensorop", "wmma"):
        reading.tensor_cores = True
    elif lower == "splitk":
        reading.split_k = True
    reading.note(word, _NOTES[lower])


def split_along_k(name: str) -> bool:
    return bool(re.search(r"split_?k", name, re.IGNORECASE))
