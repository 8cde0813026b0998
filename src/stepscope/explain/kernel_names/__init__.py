"""Decode GPU kernel names: library, operation, tile and dtype.

`decode` tries the families in order; the first that recognizes the name wins.
"""

from collections.abc import Callable
from functools import lru_cache

from stepscope.explain.kernel_names import (
    amd,
    aten,
    attention_kernels,
    communication,
    cublas,
    cudnn,
    cutlass,
    inductor,
    libraries,
)
from stepscope.explain.kernel_names.anatomy import LOOKED_AT, Anatomy, dissect
from stepscope.explain.kernel_names.describe import describe
from stepscope.explain.kernel_names.vocabulary import CLASSES, KernelClass, KernelName, NamePart, build, finish

__all__ = ["CLASSES", "KernelClass", "KernelName", "NamePart", "decode", "describe"]

# The most frequent families come first. The order matters for nested names: attention kernels and cuDNN's convolutions
# have CUTLASS wrappers. The fallback by words comes last.
_FAMILIES: tuple[Callable[[Anatomy], KernelName | None], ...] = (
    communication.recognise_transfer,
    inductor.recognise,
    aten.recognise,
    communication.recognise,
    attention_kernels.recognise,
    amd.recognise_tensile,
    cudnn.recognise,
    cutlass.recognise,
    cublas.recognise,
    amd.recognise,
    libraries.recognise,
    libraries.recognise_words,
)


def decode(name: str) -> KernelName:
    """Decode a kernel's name. Never raises; an unknown name gets the class `other`. Only the beginning of a very long
    name is read, and it is not cached, so that a hostile trace cannot fill the cache.
    """
    return _decode_kept(name) if len(name) <= LOOKED_AT else _decode(name)


@lru_cache(maxsize=8192)
def _decode_kept(name: str) -> KernelName:
    return _decode(name)


def _decode(name: str) -> KernelName:
    anatomy = dissect(name)
    decoded = None
    for recognise in _FAMILIES:
        found = recognise(anatomy)
        if found is not None and found.kernel_class != "other":
            return finish(found)
        decoded = decoded or found
    return finish(decoded or build(anatomy, "unknown", "other", "not recognized", anatomy.base.strip()))
