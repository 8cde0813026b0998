"""Runs on GPUs other than the one on which kernels were measured.

PyTorch and FlashAttention choose their grids in source code, whatever the GPU. What the GEMM kernels of cuBLAS and the
attention kernels of cuDNN do was measured on an H200. On another GPU, other kernels run, persistent grids have another
size, and nobody has checked that a name means the same. What was measured still makes one size more likely than
another, but a size is certain, and a claim refuted, only if that follows without it.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.families import is_measured
from stepscope.recover.solve.recovery import Field, Recovery, recover

_WORK = 25_000_000  # units of effort for the second search: it only has to agree
_UNKNOWN = "an unknown GPU"


def foreign_devices(evidence: Sequence[KernelEvidence]) -> tuple[str, ...]:
    """Return the names of the GPUs on which nothing was measured."""
    devices = dict.fromkeys(one.device for one in evidence if one.sightings)
    return tuple(name or _UNKNOWN for name in devices if not is_measured(name))


def make_portable(evidence: Sequence[KernelEvidence]) -> list[KernelEvidence]:
    """Return the evidence, to be read without what was measured on one kind of GPU."""
    return [replace(one, is_portable=True) for one in evidence]


def recover_anywhere(evidence: Sequence[KernelEvidence]) -> Recovery:
    """Recover a plain decoder from a run on any GPU. Raises NoTransformerError like `recover`."""
    found = recover(evidence)
    foreign = foreign_devices(evidence)
    if not foreign:
        return found
    proven = recover(make_portable(evidence), work=_WORK).fields
    fields = {name: _keep_proven(field, proven[name]) for name, field in found.fields.items()}
    notes = (*map(say_foreign, foreign), *found.notes)
    return msgspec.structs.replace(found, fields=fields, notes=notes)


def say_foreign(device: str) -> str:
    return f"{device}: kernels of cuBLAS and cuDNN are read as on an H200; what depends on them is not certain"


def _keep_proven(field: Field, proven: Field) -> Field:
    """Keep the value, but only as certain if the second search is certain of it too."""
    is_proven = proven.certain and proven.value == field.value
    return msgspec.structs.replace(field, certain=field.certain and is_proven)
