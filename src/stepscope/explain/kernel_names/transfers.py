"""Copies and fills that are no kernels, and AMD's kernels that stand in for them."""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.types import KernelName, NamePart
from stepscope.explain.kernel_names.vocabulary import build, part

_KINETO = re.compile(
    r"Memcpy (?P<way>HtoD|DtoH|DtoD|PtoP|HtoH|HtoA|AtoH|AtoA|AtoD|DtoA)(?: \((?P<memories>[^)]{1,60})\))?"
)
_NSIGHT = re.compile(r"\[CUDA memcpy (?P<way>[A-Za-z -]{1,40})\]", re.IGNORECASE)
_ROCM = re.compile(r"Copy(Host|Device)To(Host|Device)|__amd_rocclr_copyBuffer\w*|hipMemcpy\w*")
_FILL = re.compile(r"Memset\b|\[CUDA memset\]|FillBuffer|__amd_rocclr_fillBuffer\w*|hipMemset\w*", re.IGNORECASE)
_WAYS = {
    "HtoD": "host to device",
    "DtoH": "device to host",
    "DtoD": "within the device",
    "PtoP": "between devices",
    "HtoH": "within the host",
}
_MEMORIES = {
    "Pageable": "ordinary host memory: the driver copies through a pinned buffer, and the host waits for it",
    "Pinned": "pinned host memory: the copy can overlap with kernels",
}


def recognise(anatomy: Anatomy) -> KernelName | None:
    text = anatomy.text
    if match := _KINETO.match(text):
        way = _WAYS.get(match["way"], match["way"])
        return _copy(anatomy, way, [part(match["way"], way), *_explain_memories(match["memories"] or "")])
    if match := _NSIGHT.match(text):
        way = _spell_way(match["way"])
        return _copy(anatomy, way, [part(match["way"], way)])
    if match := _ROCM.match(text):
        way = f"{match[1]} to {match[2]}".lower() if match[1] else "direction not named"
        meaning = "AMD's runtime copies with a kernel" if match[0].startswith("__amd") else way
        return _copy(anatomy, way, [part(match[0], meaning)], "HIP")
    if match := _FILL.match(text):
        library = "HIP" if match[0].startswith(("__amd", "hip", "Fill")) else "CUDA"
        return build(
            anatomy, library, "memset", "fill memory", "memset", parts=(part(match[0], "fills memory with one value"),)
        )
    return None


def _copy(anatomy: Anatomy, way: str, parts: list[NamePart], library: str = "CUDA") -> KernelName:
    return build(anatomy, library, "memcpy", f"copy, {way}", f"memcpy, {way}", parts=tuple(parts))


def _explain_memories(memories: str) -> list[NamePart]:
    return [part(word, meaning) for word, meaning in _MEMORIES.items() if word in memories]


def _spell_way(way: str) -> str:
    lower = way.lower()
    if lower in ("host-to-device", "htod"):
        return "host to device"
    if lower in ("device-to-host", "dtoh"):
        return "device to host"
    if lower in ("device-to-device", "dtod"):
        return "within the device"
    if lower in ("peer-to-peer", "ptop"):
        return "between devices"
    return lower
