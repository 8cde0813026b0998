"""A decoded name as a table: its parts, the fields that follow from them, and notes on how to change it."""

import re

from stepscope.explain.kernel_names.anatomy import LOOKED_AT
from stepscope.explain.kernel_names.vocabulary import LONGEST_PART, KernelName
from stepscope.findings import Cell, Column, Table

_COLUMNS = (
    Column(key="part", label="part of the name"),
    Column(key="meaning", label="meaning"),
    # For programs: `part`, or the name of the field.
    Column(key="field", label="field", detail=True),
)


def describe(decoded: KernelName) -> Table:
    """Return the parts in the order of the name, then the fields for programs."""
    rows: list[tuple[Cell, ...]] = [(piece.text, piece.meaning, "part") for piece in decoded.parts]
    rows.extend(_summarise(decoded))
    return Table(title=_title(decoded), columns=_COLUMNS, rows=tuple(rows), notes=_notes(decoded))


def _title(decoded: KernelName) -> str:
    """Return the recorded name in printable form: it comes from a file and may contain anything."""
    front = decoded.name[:LONGEST_PART]
    shown = "".join(letter if letter.isprintable() else " " for letter in front).strip()
    return (shown or "unnamed kernel") + ("…" if len(decoded.name) > LONGEST_PART else "")


def _summarise(decoded: KernelName) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = [
        ("= short", decoded.short, "short"),
        (
            "= class",
            "other: not recognized" if decoded.kernel_class == "other" else decoded.kernel_class,
            "kernel_class",
        ),
        ("= operation", decoded.operation, "operation"),
        ("= library", decoded.library, "library"),
    ]
    optional = {
        "direction": decoded.direction,
        "dtype": decoded.dtype,
        "architecture": decoded.architecture,
        "tile": "×".join(map(str, decoded.tile)) if decoded.tile else None,
        "stages": str(decoded.stages) if decoded.stages else None,
        "layout": decoded.layout,
        "tensor_cores": None if decoded.tensor_cores is None else "yes" if decoded.tensor_cores else "no",
        "split_k": "yes" if decoded.split_k else None,
        "is_cast": "yes" if decoded.is_cast else None,
        "fused": ", ".join(decoded.fused) or None,
    }
    labels = {"tensor_cores": "tensor cores", "split_k": "split-K", "is_cast": "cast"}
    rows.extend((f"= {labels.get(key, key)}", value, key) for key, value in optional.items() if value is not None)
    return rows


def _notes(decoded: KernelName) -> tuple[str, ...]:
    """Return notes on how to change the kernel, if the name is sufficient to tell."""
    notes = [*_advise(decoded)]
    if decoded.kernel_class == "other":
        notes.append("not recognized: class other. The operator that launched it may say more than its name")
    if len(decoded.name) > LOOKED_AT:
        notes.append(f"only the first {LOOKED_AT:,} characters of the name were read")
    return tuple(notes)


def _advise(decoded: KernelName) -> list[str]:
    products = decoded.kernel_class in ("GEMM", "convolution")
    if products and decoded.tensor_cores is False and decoded.dtype == "fp32" and "vector" not in decoded.operation:
        return [
            "to make it faster: TF32 (torch.set_float32_matmul_precision('high')) or bf16 autocast uses tensor cores; "
            "this fp32 kernel does not"
        ]
    if products and decoded.tensor_cores and re.search(r"_align1(?!\d)", decoded.name[:LOOKED_AT]):
        return [
            "to make it faster: use multiples of 8 for vocabulary, context and head dimension; align1 means sizes or "
            "strides that do not allow wide loads"
        ]
    # A compiler cannot fuse what another library has compiled.
    if decoded.is_cast and (decoded.library == "ATen" or decoded.fused):
        return [
            "to make it faster: torch.compile fuses a cast into neighboring kernels; storing the target dtype avoids it"
        ]
    match decoded.kernel_class:
        case "softmax":
            return ["to make it faster: a fused attention kernel includes the softmax"]
        case "memcpy" if "Pageable" in decoded.name:
            return ["to make it faster: use pinned memory (DataLoader(pin_memory=True)) and non_blocking=True"]
        case "elementwise" | "copy" if decoded.library == "ATen":
            return ["to make it faster: it is memory-bound; torch.compile fuses it with neighboring kernels"]
        case "optimizer" if "foreach" in decoded.operation or "many tensors" in decoded.operation:
            return ["to make it faster: an optimizer with fused=True runs the whole update in one kernel"]
        case _:
            return []
