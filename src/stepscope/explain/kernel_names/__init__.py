"""GPU kernel names in plain words: which library, what it computes, on which tile, in which data type."""

from stepscope.explain.kernel_names.decode import decode
from stepscope.explain.kernel_names.describe import describe
from stepscope.explain.kernel_names.types import CLASSES, KernelClass, KernelName, NamePart

__all__ = ["CLASSES", "KernelClass", "KernelName", "NamePart", "decode", "describe"]
