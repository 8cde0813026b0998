"""GPU kernel names in plain words: which library, what it computes, on which tile, in which data type.

`decode` tries the families one after the other: the first that knows the name answers.
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

# The most frequent come first, and the order matters where names nest: attention kernels are CUTLASS kernels by their
# wrapper, cuDNN's convolutions too. What is left to the words of the name comes last.
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
    """What a kernel's name says. Never raises; a name that nobody knows has the class `other`.

    Only the front of a very long name is looked at, and such a name is not kept: the cache must not hold what a hostile
    trace put there.
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
    return finish(decoded or build(anatomy, "unknown", "other", "not recognised", anatomy.base.strip()))
