"""Data movement: NCCL and RCCL, kernels that read the memory of other GPUs directly, copies and fills (which are not
kernels), and AMD's kernels for them."""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.vocabulary import KernelName, NamePart, build, compile_rows, first_match, join, part

_NCCL = re.compile(r"(?:nccl|rccl|msccl)(?:Dev)?(?:Symk?Dev)?Kernel(?:Debug)?_(\w+)", re.IGNORECASE)
_COLLECTIVES = {
    "AllReduce": ("all-reduce", "every rank ends up with the sum (or other reduction) over all ranks"),
    "AllGather": ("all-gather", "every rank ends up with the pieces of all ranks"),
    "ReduceScatter": ("reduce-scatter", "every rank ends up with its piece of the reduction over all ranks"),
    "Broadcast": ("broadcast", "one rank's data goes to all others"),
    "Reduce": ("reduce", "one rank ends up with the reduction over all ranks"),
    "SendRecv": ("send and receive", "point-to-point messages: pipeline stages, all-to-all"),
    "AllToAll": ("all-to-all", "every rank sends a different piece to every other"),
    "AlltoAll": ("all-to-all", "every rank sends a different piece to every other"),
    "Generic": ("unnamed collective", "one kernel serves all collectives; the name does not say which ran"),
}
_ALGORITHMS = {
    "RING": "data travels around a ring of all ranks",
    "TREE": "data travels up and down a tree: fewer hops for small messages on many ranks",
    "NVLS": "the NVLink switch adds up the data",
    "COLLNET": "the network adds up the data",
    "PAT": "parallel trees: fewer steps than a ring on many ranks",
}
_PROTOCOLS = {
    "LL": "low-latency protocol: flags next to the data, at half the bandwidth",
    "LL128": "low-latency protocol over NVLink with most of the bandwidth",
    "SIMPLE": "the protocol for large messages: full bandwidth, more latency",
}
_REDUCTIONS = ("Sum", "Prod", "Min", "Max", "MinMax", "PreMulSum", "SumPostDiv")
_TYPES = {
    "f32": "fp32",
    "float": "fp32",
    "f16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f64": "fp64",
    "double": "fp64",
    "u8": "uint8",
    "i8": "int8",
    "int8": "int8",
    "u32": "uint32",
    "u64": "uint64",
    "i32": "int32",
    "i64": "int64",
    "f8e4m3": "fp8",
    "f8e5m2": "fp8",
}
_EXPERT_PARALLEL = r"\b(?:deep_ep|dpsk::ep|hybrid_ep|internode_ll)::(?!CUB)"
# Outside NCCL: by a distinctive part of the name.
_OTHERS: tuple[tuple[re.Pattern[str], str, str], ...] = compile_rows(
    # `dpsk::ep` is the namespace in DeepSeek's published traces; `hybrid_ep` is NVIDIA's variant.
    (rf"{_EXPERT_PARALLEL}.*\bdispatch(?:_ll|_kernel)?\b", "DeepEP", "send tokens to their experts"),
    (rf"{_EXPERT_PARALLEL}.*\bcombine(?:_ll|_kernel)?\b", "DeepEP", "return tokens from their experts"),
    (_EXPERT_PARALLEL, "DeepEP", "prepare the exchange of tokens"),
    (r"(?i)nvshmem|\b(?:barrier|sync)_on_stream_kernel\w*", "NVSHMEM", "one-sided communication"),
    (r"\bmscclpp::", "MSCCL++", "collective"),
    (r"cross_device_reduce_\w+", "vLLM", "all-reduce"),
    (r"multimem_(?:one_shot_|two_shot_)?all_reduce\w*", "ATen", "all-reduce through the NVLink switch"),
    (r"multimem_all_gather\w*", "ATen", "all-gather through the NVLink switch"),
    (r"multimem_(?:one_shot_)?reduce\w*", "ATen", "reduction through the NVLink switch"),
    (r"(?:one|two)_?[sS]hot_?[aA]ll_?[rR]educe\w*", "ATen", "all-reduce over peer memory"),
    (r"(?:allreduce|all_reduce|allReduce)_?(?:fusion|lamport|rmsnorm)\w*|lamport\w*", "FlashInfer", "all-reduce"),
    (r"userbuffers_\w+|kuserbuffers_\w+", "Transformer Engine", "overlapped collective"),
    (r"symm_?mem|symmetric_memory|symm_mem::", "ATen", "communication over symmetric memory"),
    (r"\b(?:put|wait|stream_write|stream_wait|barrier)_signal_kernel\w*", "ATen", "signal to a peer"),
)
_WORDS = compile_rows(
    (r"(?i)all_?reduce", "all-reduce"),
    (r"(?i)all_?gather", "all-gather"),
    (r"(?i)reduce_?scatter", "reduce-scatter"),
    (r"(?i)all_?to_?all", "all-to-all"),
)


def recognise(anatomy: Anatomy) -> KernelName | None:
    if match := _NCCL.match(anatomy.base):
        return _decode_nccl(anatomy, match[1])
    text = anatomy.body[:1000]
    if other := first_match(_OTHERS, text):
        match, library, operation = other
        short = f"{operation} ({library})"
        return build(anatomy, library, "communication", operation, short, parts=(part(match[0], operation),))
    if "gemm" in text.lower():  # a GEMM that overlaps with its collective is decoded as the GEMM
        return None
    if found := first_match(_WORDS, anatomy.base):
        return build(anatomy, "unknown", "communication", found[1], parts=(part(found[0][0], found[1]),))
    return None


def _decode_nccl(anatomy: Anatomy, rest: str) -> KernelName:
    words = [word for word in rest.split("_") if word]
    library = "RCCL" if words[:1] == ["Generic"] or anatomy.base.lower().startswith(("rccl", "msccl")) else "NCCL"
    operation, meaning = _COLLECTIVES.get(words[0] if words else "", ("collective", "communication between GPUs"))
    parts = [part(words[0] if words else anatomy.base, meaning)]
    dtype = algorithm = protocol = None
    for word in words[1:12]:
        if word in _TYPES:
            dtype = _TYPES[word]
            parts.append(part(word, f"{dtype} elements"))
        elif word in _ALGORITHMS:
            algorithm = algorithm or word
            parts.append(part(word, _ALGORITHMS[word]))
        elif word in _PROTOCOLS:
            protocol = word
            parts.append(part(word, _PROTOCOLS[word]))
        elif word in _REDUCTIONS:
            parts.append(
                part(
                    word,
                    "the reduction; kernels that only copy bytes are also named `Sum`"
                    if word == "Sum"
                    else "the reduction",
                )
            )
    parts.extend(_warn_of_old_names(anatomy.base))
    summary = join(operation, dtype, (algorithm or "").lower() or None, protocol, f"({library})")
    return build(anatomy, library, "communication", operation, summary, dtype=dtype, parts=tuple(parts))


def _warn_of_old_names(base: str) -> list[NamePart]:
    if not base.startswith("ncclKernel_"):
        return []
    meaning = "name from an older NCCL, whose kernels could also run other algorithms and protocols"
    return [part("ncclKernel", meaning)]


# --- Copies and fills of memory ---------------------------------------------------------------------------------------


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
_NSIGHT_WAYS = {
    **dict.fromkeys(("host-to-device", "htod"), "host to device"),
    **dict.fromkeys(("device-to-host", "dtoh"), "device to host"),
    **dict.fromkeys(("device-to-device", "dtod"), "within the device"),
    **dict.fromkeys(("peer-to-peer", "ptop"), "between devices"),
}
_MEMORIES = {
    "Pageable": "pageable CPU memory: the driver copies through a pinned buffer, and the CPU waits",
    "Pinned": "pinned CPU memory: the copy can overlap with kernels",
}


def recognise_transfer(anatomy: Anatomy) -> KernelName | None:
    text = anatomy.text
    if match := _KINETO.match(text):
        way = _WAYS.get(match["way"], match["way"])
        return _copy(anatomy, way, [part(match["way"], way), *_explain_memories(match["memories"] or "")])
    if match := _NSIGHT.match(text):
        way = _NSIGHT_WAYS.get(match["way"].lower(), match["way"].lower())
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
