"""Fused attention: FlashAttention, the memory-efficient kernels, cuDNN's, and those of the serving engines.

`PagedAttention` and similar kernels count too. Writing keys and values into a cache does not: that is a copy.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.vocabulary import (
    CODES,
    Direction,
    KernelName,
    NamePart,
    build,
    compile_rows,
    find_dtype,
    first_match,
    join,
    name_architecture,
    part,
    spell_tile,
)

_FMHA = re.compile(
    r"fmha_cutlass(?P<way>[FB])_(?P<type>f32|f16|bf16)_(?P<aligned>aligned|notaligned)_(?P<tile>\d+x\d+)"
    r"(?:_(?P<rest>\w*?))?_sm(?P<architecture>\d+)"
)
_FMHA_WORDS = {
    "rf": "the result stays in registers",
    "gmem": "the result is accumulated in global memory: the head dimension is too large for registers",
    "dropout": "supports dropout of attention weights",
}
_CUDNN = re.compile(r"cudnn_generated_fort_native_(?:sdpa|mha)_sm(?P<architecture>\d+)_(?P<rest>\w+)")
_TRAITS = re.compile(r"Flash_(?:fwd|bwd)_kernel_traits(?:<|, )(\d+), (\d+), (\d+)")
_BOOLEAN = re.compile(r"\b(true|false)\b")
_FLASH_STEPS: tuple[tuple[str, str, Direction, str], ...] = (
    ("flash_fwd_splitkv_combine", "combine the parts of a split attention", "forward", "flash attention combine"),
    ("flash_fwd_splitkv", "attention forward, keys split among blocks", "forward", "flash attention fwd split-KV"),
    ("flash_fwd", "attention forward", "forward", "flash attention fwd"),
    ("flash_bwd_dot_do_o", "row sums for the attention backward", "backward", "flash attention bwd dO·O"),
    ("flash_bwd_convert_dq", "convert the attention's dQ", "backward", "flash attention bwd convert dQ"),
    ("flash_bwd_convert_dkv", "convert the attention's dK and dV", "backward", "flash attention bwd convert dKV"),
    ("flash_bwd_clear_dkv", "clear the attention's dK and dV", "backward", "flash attention bwd clear dKV"),
    ("flash_bwd", "attention backward", "backward", "flash attention bwd"),
    (
        "prepare_varlen_num_blocks",
        "schedule an attention over sequences of different lengths",
        "forward",
        "flash attention schedule",
    ),
    ("FlashAttnFwdCombine", "combine the parts of a split attention", "forward", "flash attention 3 combine"),
    ("FlashAttnFwd", "attention forward", "forward", "flash attention 3 fwd"),
    ("FlashAttnBwdPreprocess", "row sums for the attention backward", "backward", "flash attention 3 bwd dO·O"),
    ("FlashAttnBwdPostprocess", "convert the attention's dQ", "backward", "flash attention 3 bwd convert dQ"),
    ("FlashAttnBwd", "attention backward", "backward", "flash attention 3 bwd"),
    ("FlashAttentionForward", "attention forward", "forward", "flash attention 4 fwd"),
    ("FlashAttentionBackward", "attention backward", "backward", "flash attention 4 bwd"),
)
# Linear attention in chunks or as a recurrence: delta rule, gated linear attention, RWKV (flash-linear-attention).
_LINEAR = (
    r"(?:(?:chunk|fused_chunk|fused_recurrent|parallel|naive)_(?:gated_)?(?:delta_rule|gla|kda|gsa|hgrn|rwkv\d?|nsa|dplr"
    r"|iplr|retention|simple_gla|based|linear_attn)"
    r"|chunk_(?:fwd|bwd)_kernel_(?:o|h|d\w+)\b|chunk_scaled_dot_kkt|recompute_w_u|prepare_wy_repr"
    r"|solve_tril_\d+|merge_\d+x\d+_to_\d+x\d+_inverse)\w*"
)
# By a distinctive part of the name: library, operation, direction.
_OTHERS: tuple[tuple[re.Pattern[str], str, str, Direction | None], ...] = compile_rows(
    (r"attention_kernel_backward_batched|AttentionBackwardKernel", "CUTLASS", "attention backward", "backward"),
    (
        r"attention_kernel_batched|PyTorchMemEffAttention::AttentionKernel",
        "CUTLASS",
        "attention forward",
        "forward",
    ),
    (r"cudnn::fusion::compute_dot_do_o\w*", "cuDNN", "row sums for the attention backward", "backward"),
    (r"cudnn::fusion::convert_dq\w*", "cuDNN", "convert the attention's dQ", "backward"),
    (r"Fmha(?:Fwd|Prefill|BatchPrefill)\w*Kernel|fmha_fwd\w*", "CK", "attention forward", "forward"),
    (r"Fmha(?:Bwd)\w*Kernel|fmha_bwd\w*", "CK", "attention backward", "backward"),
    (r"fmhaSm\d+\w*|fmha_v2_\w*|fmha_\w*kernel", "TensorRT-LLM", "attention forward", "forward"),
    (r"paged_attention_\w*reduce\w*", "vLLM", "combine the parts of a split attention", "forward"),
    (
        r"paged_attention\w*|kernel_unified_attention\w*|kernel_paged_attention\w*",
        "vLLM",
        "paged attention",
        "forward",
    ),
    (
        r"(?:Batch|Single)(?:Prefill|Decode)With\w*K[vV]\w*Kernel\w*",
        "FlashInfer",
        "attention with a cache",
        "forward",
    ),
    (
        r"(?:PersistentVariableLengthMergeStates|VariableLengthMergeStates|MergeStates?)Kernel",
        "FlashInfer",
        "combine the parts of a split attention",
        "forward",
    ),
    (r"\bpa_(?:bf16|fp16)_\w*", "AITER", "paged attention", "forward"),
    (r"\bmerge_attn_states\w*", "vLLM", "combine the parts of a split attention", "forward"),
    (r"flash_?(?:mla|fwd_mla)\w*|\bmla_(?:decode|fwd|a8w8|pfl)\w*", "FlashMLA", "latent attention", "forward"),
    (r"\b_?sage_fwd\w*|\bqk_int\d*_sv_f\d+_\w*attn\w*", "SageAttention", "attention forward", "forward"),
    (r"\b(?=\w*fwd)" + _LINEAR, "Triton", "linear attention forward", "forward"),
    (r"\b(?=\w*bwd)" + _LINEAR, "Triton", "linear attention backward", "backward"),
    (r"\b" + _LINEAR, "Triton", "linear attention", None),
    (r"\b_bwd_preprocess_do_o_dot\b", "Triton", "row sums for the attention backward", "backward"),
    (r"\battention_hopper_bound\b", "stepscope", "bounds for the attention backward", "backward"),
    (r"\battention_hopper_prepare\b", "stepscope", "row sums for the attention backward", "backward"),
    (r"\battention_hopper_finish\b", "stepscope", "convert the attention's dQ", "backward"),
    (r"\battention_(?:hopper_)?(?:local_)?forward\b", "stepscope", "attention forward", "forward"),
    (r"\battention_backward_queries\b", "stepscope", "attention backward, dQ", "backward"),
    (r"\battention_backward_keys\b", "stepscope", "attention backward, dK and dV", "backward"),
    (r"\battention_hopper_backward\b", "stepscope", "attention backward", "backward"),
    (r"\b_?attn_fwd\w*|\b_?attention_fwd\w*|\b_?fwd_attn\w*", "Triton", "attention forward", "forward"),
    (
        r"\b_?attn_bwd\w*|\b_?attention_bwd\w*|\b_?bwd_kernel_d[kqv]\w*|\b_?bwd_(?:kernel_)?(?:dkdv|dk_dv|dq)\w*",
        "Triton",
        "attention backward",
        "backward",
    ),
    (
        r"\b_?fwd_grouped_kernel_stage\w*|\b_?fwd_kernel_stage\w*|\b_decode_att\w*",
        "Triton",
        "attention with a cache",
        "forward",
    ),
    (r"scaled_dot_product\w*", "unknown", "attention", None),
)


def recognise(anatomy: Anatomy) -> KernelName | None:
    if "_and_cache" in anatomy.base:
        return None
    if match := _FMHA.match(anatomy.base):
        return _decode_memory_efficient(anatomy, match)
    if match := _CUDNN.match(anatomy.base):
        return _decode_cudnn(anatomy, match)
    text = anatomy.body[:3000]
    if "flash" in text.lower() and (found := _decode_flash(anatomy, text)):
        return found
    if other := first_match(_OTHERS, text):
        match, library, operation, direction = other
        fields = {"direction": direction, "dtype": find_dtype(anatomy.template)}
        library = "AITER" if anatomy.scope == "aiter" else library
        short = f"{operation} ({library})" if library != "unknown" else operation
        return build(anatomy, library, "attention", operation, short, parts=(part(match[0], operation),), **fields)
    return None


def _decode_memory_efficient(anatomy: Anatomy, match: re.Match[str]) -> KernelName:
    """`fmha_cutlassF_f32_aligned_64x64_rf_sm80`"""
    forward = match["way"] == "F"
    dtype = CODES[match["type"]]
    rows, columns = (int(number[:6]) for number in match["tile"].split("x"))
    architecture, generation = name_architecture(match["architecture"])
    parts = [
        part(f"fmha_cutlass{match['way']}", f"memory-efficient attention, {'forward' if forward else 'backward'}"),
        part(match["type"], f"{dtype} data"),
        part(
            match["aligned"],
            "for tensors whose rows are aligned" if match["aligned"] == "aligned" else "for any alignment",
        ),
        part(match["tile"], f"a block processes {rows} queries and {columns} keys at a time"),
    ]
    for word in (match["rest"] or "").split("_"):
        if word in _FMHA_WORDS:
            parts.append(part(word, _FMHA_WORDS[word]))
        elif re.fullmatch(r"k\d{1,6}", word):
            parts.append(part(word, f"for head dimensions up to {word[1:]}"))
    parts.append(
        part(f"sm{match['architecture']}", f"written for {generation} ({architecture}); newer GPUs can run it too")
    )
    return build(
        anatomy,
        "CUTLASS",
        "attention",
        f"attention {'forward' if forward else 'backward'}",
        f"mem-efficient attention {'fwd' if forward else 'bwd'} {rows}×{columns}",
        direction="forward" if forward else "backward",
        architecture=architecture,
        dtype=dtype,
        tile=(rows, columns),
        # fp32 uses one or several tf32 instructions, depending on the build of PyTorch.
        tensor_cores=None if dtype == "fp32" else int(match["architecture"][:4]) >= 70,
        parts=tuple(parts),
    )


def _decode_cudnn(anatomy: Anatomy, match: re.Match[str]) -> KernelName:
    """`cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0`"""
    rest = match["rest"]
    backward = "bprop" in rest
    architecture, generation = name_architecture(match["architecture"])
    type_ = re.search(r"_(f16|bf16|f32|e4m3|e5m2)_", rest)
    tile_ = re.search(r"_(\d{1,4})x(\d{1,4})x(\d{1,4})_", rest)
    tile = (int(tile_[1]), int(tile_[2]), int(tile_[3])) if tile_ else None
    # cuDNN writes f16 for bf16 too: both use the same kernel.
    dtype = CODES[type_[1]] if type_ and type_[1] != "f16" else None
    parts = [
        part("sdpa", "scaled dot-product attention, generated by cuDNN"),
        part(f"sm{match['architecture']}", f"written for {generation} ({architecture})"),
        part("bprop" if backward else "fprop", "backward" if backward else "forward"),
    ]
    if "wgmma" in rest:
        parts.append(part("wgmma", "Hopper's tensor-core instructions"))
    if type_ and type_[1] == "f16":
        parts.append(part("f16", "16-bit data: fp16 or bf16 (the name does not say)"))
    if knob := re.search(r"knob_\d+", rest):
        parts.append(part(knob[0], "a tuning choice, not documented"))
    if tile_:
        parts.append(part(tile_[0].strip("_"), "tile sizes; their order is not documented"))
    return build(
        anatomy,
        "cuDNN",
        "attention",
        f"attention {'backward' if backward else 'forward'}",
        join("cuDNN attention", "bwd" if backward else "fwd", spell_tile(tile)),
        direction="backward" if backward else "forward",
        architecture=architecture,
        dtype=dtype,
        tile=tile,
        tensor_cores=True if "mma" in rest else None,
        parts=tuple(parts),
    )


def _decode_flash(anatomy: Anatomy, text: str) -> KernelName | None:
    for piece, operation, direction, short in _FLASH_STEPS:
        if piece not in text:
            continue
        parts: list[NamePart] = [part(piece, operation)]
        tile = head = None
        if traits := _TRAITS.search(text):
            head, *tile_sizes = (int(number[:6]) for number in traits.groups())
            tile = (tile_sizes[0], tile_sizes[1])
            parts.append(part(traits[1], f"head dimension {head}"))
            parts.append(
                part(f"{traits[2]}, {traits[3]}", f"a block processes {tile[0]} queries and {tile[1]} keys at a time")
            )
        parts.extend(_explain_flags(piece, text))
        main = piece in ("flash_fwd", "flash_fwd_splitkv", "flash_bwd", "FlashAttnFwd", "FlashAttnBwd")
        return build(
            anatomy,
            "FlashAttention",
            "attention",
            operation,
            join(short, f"hd{head}" if head else None),
            direction=direction,
            architecture=f"sm_{found[1]}" if (found := re.search(r"(?:Fwd|Bwd)Sm(\d{2,3})", text)) else None,
            dtype=find_dtype(anatomy.template),
            tile=tile,
            tensor_cores=True if main else None,
            parts=tuple(parts),
        )
    return None


def _explain_flags(piece: str, text: str) -> list[NamePart]:
    """FlashAttention 2's template booleans start with dropout and causal in all versions; the others vary."""
    end = text.rfind("_kernel_traits")
    flags = _BOOLEAN.findall(text[end:].partition(">")[2]) if end >= 0 and ">" in text[end:] else []
    if not flags and end >= 0:  # a mangled name has no closing brackets
        flags = _BOOLEAN.findall(text[end:])
    if piece not in ("flash_fwd", "flash_bwd") or len(flags) < 2:
        return []
    return [
        part(flags[0], f"dropout of attention weights: {'yes' if flags[0] == 'true' else 'no'}"),
        part(flags[1], f"causal: {'yes, the upper half is skipped' if flags[1] == 'true' else 'no'}"),
    ]
