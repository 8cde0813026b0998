"""Kernels of the serving and training libraries: vLLM, Transformer Engine, Apex, Megatron, Liger, bitsandbytes and
others.

Each line is a part of the name that only that kernel has. Other kernels are classified by the words of their name: only
whole words count (`format` does not contain the word `norm`), and only those of the function name, not of its template
arguments. A name without known words stays `other`: a wrong class is worse than none.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.vocabulary import (
    CODES,
    Direction,
    KernelClass,
    KernelName,
    build,
    compile_rows,
    explain_tile,
    find_dtype,
    first_match,
    join,
    part,
    spell_direction,
    spell_tile,
)

_MATMUL_TYPES = re.compile(r"_(\w{2,8}?)x(bf16|fp16|fp32|fp8\w*|mxfp\d|nvfp4)x(bf16|fp16|fp32|fp8\w*?|mxfp\d|nvfp4)_")
_OWNERS = compile_rows(
    (r"\bvllm::", "vLLM"),
    (r"transformer_engine::|\bnvte_", "Transformer Engine"),
    (r"\bflashinfer::", "FlashInfer"),
    (r"\bdeep_gemm::|\bdpsk::(?:gemm|grouped_gemm)::", "DeepGEMM"),
    (r"\bfbgemm_gpu::|\bsplit_embedding\w*codegen", "FBGEMM"),
    (r"\bmegablocks::", "MegaBlocks"),
    (r"tensorrt_llm::", "TensorRT-LLM"),
    (r"\baiter::", "AITER"),
    (r"\bmarlin|Marlin", "Marlin"),
    (r"\bliger_|_liger", "Liger"),
    (r"\bxformers", "xFormers"),
    (
        r"\bk(?:Quantize|Dequantize|Optimizer|Precondition|gemm_4bit|Int8|dequant|PercentileClipping)",
        "bitsandbytes",
    ),
    (r"\bcausal_conv1d|selective_scan", "Mamba"),
    (r"\bcu(?:Apply|Compute)[A-Z]\w+|\bapex::", "Apex"),
    (r"\bsgl_|\bsglang", "SGLang"),
)
# Patterns of the name: class, operation.
_KERNELS: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"swiglu_\w*cast\w*|cast_\w*_gated\w*", "elementwise", "activation and cast"),
    (
        r"_?(?:padded)?(?:float|half|bfloat16|FP8rowwise)_to_(?:padded)?(?:FP8rowwise|float|half|bfloat16)\w*"
        r"|_compute_FP8_quantize\w*",
        "copy",
        "cast",
    ),
    (
        r"rotary_embedding|fused_rope|\b_?triton_rope|rope_kernel|apply_rope|rotary_kernel"
        r"|_rope_(?:fwd|bwd|forward|backward)|BatchQKApplyRotary",
        "elementwise",
        "rotary embedding",
    ),
    (
        r"reshape_and_cache\w*|concat_and_cache\w*|cp_gather_cache|gather_cached_kv|AppendPagedKVCache"
        r"|set_mla_kv_buffer|copy_blocks|swap_blocks",
        "copy",
        "write keys and values into the cache",
    ),
    (
        r"topkGatingSoftmax|topk_softmax|topk_gating_softmax|moeSoftmax|grouped_topk|grouped_topk_fused|moe_fused_gate"
        r"|_topk_forward|moe::dev::routing",
        "sort",
        "select experts (top-k)",
    ),
    (
        r"moe_align_block_size|moe_?sorting|count_and_sort_expert|expandInputRows|computeExpertFirst"
        r"|moe_permute|_combined_routing\w*|_routing_\w+|_expt_data\w*|_row_id_map_pass_\w*|_sort_chunks_by_\w*"
        r"|_make_chunk_sort_map\w*|fusedBuildExpertMaps\w*|_fwd_kernel_ep_\w*|moe::dev::permute",
        "index",
        "group tokens by expert",
    ),
    (r"_sum_bitmatrix_rows\w*", "reduction", "count tokens by expert"),
    (
        r"_finalize_matmul\w*|_reduce_grouped|finalizeMoeRouting|moe_sum|moe_unpermute|^_unpermute_kernel"
        r"|_reduce_scatter_grouped|moe::dev::finalize",
        "reduction",
        "sum the experts' results",
    ),
    (
        r"fused_moe_kernel\w*|_?p?_?matmul_ogs|fused_marlin_moe|moe_mmk|bmm_\w*E\dm\d"
        r"|bmm_(?:Bfloat16|E\dm\d|Fp\d+)\w*|^_scatter2scatter\w*|^_groupXtY\w*|^_(?:sdd|dsd|dds)_kernel\w*"
        r"|\bfmoe_\w*|dpsk::grouped_gemm::",
        "GEMM",
        "grouped GEMM",
    ),
    (
        r"Marlin\b|marlin_gemm|gptq_marlin\w*|awq_gemm\w*|gemm_half_q_half|kgemm_4bit\w*|fp8_gemm\w*"
        r"|gemm_fp8\w*|sm\d+_\w*gemm|deep_gemm::|w8a8_block\w*matmul|_w8a8_\w*|int8_gemm"
        r"|scaled_mm_kernel|wvSplitK\w*|LLGemm\w*|gemm_a8w8\w*|gemv_\w*|_gemm_\w+|tgv_gemm\w*",
        "GEMM",
        "GEMM",
    ),
    (
        r"liger_cross_entropy|cross_entropy\w*|_cross_entropy|fused_linear_cross_entropy|_kldiv_kernel"
        r"|_jsd_kernel|_?selective_log_softmax\w*|moe_aux_loss\w*|xentropy|cunn_SoftMaxXEntropy\w*|_dpo_|_grpo_\w*",
        "loss",
        "cross-entropy or other loss",
    ),
    (
        r"scaled_\w*softmax\w*|fused_softmax|masked_softmax\w*|_softmax_kernel"
        r"|_softmax_(?:fwd|bwd|forward|backward)\w*",
        "softmax",
        "softmax",
    ),
    (r"cast_transpose\w*|transpose_cast|cast_fp8_1D|(?<![a-z])cast_kernel|cast_mxfp8\w*|_cast_\w*", "copy", "cast"),
    (r"rms_?norm\w*|RMSNorm\w*|rmsnorm\w*", "norm", "RMS norm"),
    (
        r"layer_?norm\w*|LayerNorm\w*|\bln_(?:fwd|bwd)\w*|normalization::\w+|cuApplyLayerNorm"
        r"|cuCompute\w+Grad\w*|cuComputeGrad\w+|group_norm\w*|welford\w*|_group_norm\w*|l2_?norm\w*",
        "norm",
        "norm",
    ),
    (
        r"kOptimizer\w*|kPrecondition\w*|fused_adam\w*|AdamFunctor|adam_\w*kernel|lamb_\w*|_muon\w*"
        r"|newton_schulz\w*|kPercentileClipping",
        "optimizer",
        "optimizer update",
    ),
    (
        r"act_and_mul\w*|silu_and_mul\w*|gelu_and_mul\w*|swiglu\w*|geglu\w*|activation_kernel|gated_act\w*"
        r"|dgated_act\w*|(?<![a-z])act_kernel|bias_gelu\w*|bias_swiglu\w*|gelu_\w*kernel|silu_\w*kernel"
        r"|clamp_swiglu\w*|(?<![a-z])dact\w*|^_fg_kernel$|^_DWf_DW_dfg_kernel$|^_(?:exact|approx)_(?:for|back)ward_kernel$"
        r"|doActivation\w*|moe::dev::activation",
        "elementwise",
        "activation",
    ),
    (r"kDequantize\w*|dequant\w*|kdequant\w*|dequantize\w*", "elementwise", "dequantize"),
    (
        r"quant_fp8|fp8_quant|int8_quant|quantize\w*|kQuantize\w*|kInt8\w*Quant|per_token_group_quant\w*"
        r"|per_token_quant\w*|\w*scaled_quant\w*|cvt_fp16_to_fp4|segmented_max_reduction|act_quant\w*"
        r"|amax_kernel|absmax\w*|delayed_scaling\w*|compute_scale\w*|to_(?:mxfp8|nvfp4|mxfp4)\w*"
        r"|_fp8_per_group_\w*scales\w*|QuantInt8Kernel",
        "elementwise",
        "quantize",
    ),
    (r"causal_conv1d\w*", "convolution", "causal convolution"),
    (
        r"selective_scan\w*|selective_state_update\w*|chunk_scan\w*|_chunk_state\w*|_state_passing\w*"
        r"|_ssd_\w*"
        r"|_bmm_chunk\w*",
        "reduction",
        "state-space scan",
    ),
    (
        r"TopPSampling\w*|TopKTopP\w*|sampling_\w*kernel|SamplingFromProb\w*|apply_repetition_penalt\w*"
        r"|TopPRenorm\w*|TopKRenorm\w*|gumbel_?sampl\w*",
        "random",
        "sample tokens",
    ),
    (r"_triton_mul\w*|element_mul_kernel", "elementwise", "multiply"),
    (
        r"transpose_kernel\w*|\btranspose\w*|multi_padding\w*|(?:add|remove)_padding\w*|unpadding\w*|permute_\w*kernel"
        r"|unpermute_\w*kernel|swizzle_(?:row|col)_scaling\w*|sparse24_\w*|moe::dev::convertsf",
        "copy",
        "copy between layouts",
    ),
    (
        r"bucketize_sparse_features\w*|thd_partition_indices\w*|linearize_index\w*|bounds_check_indices\w*|_offsets_range\w*",
        "index",
        "compute or check indices",
    ),
    (r"^_?(?:XXT|XTX|ba_plus_cAA)_kernel$", "GEMM", "GEMM of Newton–Schulz iterations (Muon)"),
    (
        r"vectorized_pointwise|unary_kernel|unary_grad_kernel|add_bias\w*|bias_dropout_add\w*",
        "elementwise",
        "elementwise",
    ),
)


def recognise(anatomy: Anatomy) -> KernelName | None:
    text = anatomy.body[:1500]
    for pattern, kernel_class, operation in _KERNELS:
        match = pattern.search(anatomy.base) or (pattern.search(anatomy.qualified) if anatomy.scope else None)
        if match is None:
            continue
        if "matmul_ogs" in match[0]:
            return _decode_matmul_ogs(anatomy)
        if anatomy.qualified.endswith("gemm::fp8_gemm_kernel"):
            return _decode_deep_gemm(anatomy)
        library = _find_owner(text, anatomy)
        direction = find_direction(anatomy.base)
        owner = f"({library})" if library != "unknown" else None
        return build(
            anatomy,
            library,
            kernel_class,
            operation,
            join(operation, spell_direction(direction), owner),
            direction=direction,
            dtype=find_dtype(anatomy.template),
            is_cast=operation == "cast",
            parts=(part(match[0], operation),),
        )
    return None


def _find_owner(text: str, anatomy: Anatomy) -> str:
    found = first_match(_OWNERS, text)
    return found[1] if found else _find_language(anatomy)


def _find_language(anatomy: Anatomy) -> str:
    """Triton kernels have plain identifiers; C++ kernels have namespaces, template arguments or a mangled name."""
    plain = not (anatomy.mangled or anatomy.scope or anatomy.template or anatomy.arguments)
    return "Triton" if plain and anatomy.base.startswith("_") else "unknown"


def find_direction(text: str) -> Direction | None:
    lower = text.lower()
    if re.search(r"backward|bwd|_grad|computegrad|computepartgrad|dgated|\bd(?:gelu|silu|swiglu)", lower):
        return "backward"
    if re.search(r"forward|fwd", lower):
        return "forward"
    return None


def _decode_matmul_ogs(anatomy: Anatomy) -> KernelName:
    """`_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu`: result, activations and weights of experts."""
    parts = [part("matmul_ogs", "GEMM from Triton's own library that gathers and scatters tokens for experts")]
    if layouts := re.search(r"_([NT]{3})_", anatomy.base):
        parts.append(
            part(layouts[1], "innermost stride of result, activations and weights: N means 1, T means any other")
        )
    types = _MATMUL_TYPES.search(anatomy.base)
    if types:
        parts.append(part(types[0].strip("_"), "dtypes of result, activations and weights"))
    tile: tuple[int, ...] | None = None
    split = False
    if found := re.search(r"_(\d{1,4})x(\d{1,4})x(\d{1,4})x(\d{1,4})(?:_|$)", anatomy.base):
        tile = (int(found[1]), int(found[2]), int(found[3]))
        split = int(found[4]) > 1
        parts.append(explain_tile("x".join(map(str, tile)), tile))
        parts.append(part(found[4], "K is split among this many programs" if split else "not split"))
    rest = anatomy.base.rpartition("_")[2]
    if rest and rest[0].isalpha() and rest not in ("ogs",) and tile:
        parts.append(part(rest, "activation applied to the result"))
    activations, weights = (types[2], types[3]) if types else (None, None)
    dtype = CODES.get(activations or "")
    return build(
        anatomy,
        "Triton",
        "GEMM",
        "grouped GEMM",
        join("MoE GEMM", dtype, f"× {weights}" if weights else None, spell_tile(tile), "(Triton)"),
        dtype=dtype,
        tile=tile,
        split_k=split,
        parts=tuple(parts),
    )


def _decode_deep_gemm(anatomy: Anatomy) -> KernelName:
    """`deep_gemm::fp8_gemm_kernel<4096, 7168, 128, 160, 128, …, (deep_gemm::GemmType)1>`: N, K and the tile."""
    parts = [part("fp8_gemm_kernel", "GEMM in fp8 with a scale for each block of 128 elements")]
    tile: tuple[int, ...] | None = None
    if sizes := re.match(r"(\d{1,7}), (\d{1,7}), (\d{1,4}), (\d{1,4}), (\d{1,4}),", anatomy.template):
        tile = (int(sizes[3]), int(sizes[4]), int(sizes[5]))
        parts.append(part(f"{sizes[1]}, {sizes[2]}", f"compiled for N = {sizes[1]} and K = {sizes[2]}"))
        parts.append(explain_tile(", ".join(sizes.groups()[2:]), tile))
    kind = re.search(r"GemmType\)(\d)", anatomy.template)
    grouped = kind is not None and kind[1] != "0"
    if kind:
        parts.append(part(f"GemmType {kind[1]}", "one GEMM per expert, in one kernel" if grouped else "a single GEMM"))
    operation = "grouped GEMM" if grouped else "GEMM"
    return build(
        anatomy,
        "DeepGEMM",
        "GEMM",
        operation,
        join("fp8", operation, spell_tile(tile), "(DeepGEMM)"),
        dtype="fp8",
        tile=tile,
        tensor_cores=True,
        parts=tuple(parts),
    )


# --- Fallback: the words of a name -----------------------------------------------------------------------------


_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_MOST_WORDS = 40
# The first line with a word of the name wins. A line may require two words at once.
_RULES: tuple[tuple[KernelClass, str, tuple[str, ...]], ...] = (
    (
        "communication",
        "communication",
        ("allreduce", "allgather", "reducescatter", "alltoall", "nvshmem", "nccl", "rccl"),
    ),
    ("attention", "attention", ("attn", "attention", "fmha", "mha", "mla", "sdpa", "flash+fwd", "flash+bwd")),
    ("elementwise", "rotary embedding", ("rope", "rotary")),
    ("loss", "loss", ("cross+entropy", "crossentropy", "xentropy", "nll", "loss")),
    ("softmax", "softmax", ("softmax",)),
    ("norm", "norm", ("layernorm", "rmsnorm", "batchnorm", "groupnorm", "norm", "welford")),
    ("optimizer", "optimizer update", ("adam", "adamw", "adagrad", "lamb", "sgd", "muon", "lion", "optimizer")),
    ("convolution", "convolution", ("conv", "convolution", "wgrad", "dgrad", "fprop", "im+col")),
    ("GEMM", "GEMM", ("gemm", "matmul", "bmm", "gemv", "mm", "sgemm", "hgemm", "wgmma")),
    ("embedding", "embedding", ("embedding", "embed")),
    ("random", "random numbers", ("dropout", "philox", "curand", "rand", "random", "bernoulli", "sampling")),
    ("sort", "sort or top-k", ("sort", "topk", "argsort", "radix")),
    ("index", "gather or scatter", ("gather", "scatter", "index", "indexing", "permute+tokens")),
    ("copy", "copy", ("copy", "transpose", "memcpy", "concat", "cat", "permute", "pad")),
    (
        "elementwise",
        "activation",
        ("gelu", "silu", "swiglu", "geglu", "relu", "sigmoid", "tanh", "activation", "softplus"),
    ),
    ("elementwise", "quantize", ("quant", "quantize", "dequant", "dequantize")),
    (
        "reduction",
        "reduction",
        ("reduce", "reduction", "histogram", "sum", "mean", "scan", "cumsum", "argmax", "argmin", "pool", "pooling"),
    ),
    (
        "elementwise",
        "elementwise",
        ("elementwise", "pointwise", "add", "mul", "fill", "cast", "bias", "scale", "clamp", "exp"),
    ),
)


def recognise_words(anatomy: Anatomy) -> KernelName | None:
    words = [word.lower() for word in _WORD.findall(anatomy.base[:400])][:_MOST_WORDS]
    held = set(words)
    for kernel_class, operation, wanted in _RULES:
        told = next((want for want in wanted if all(word in held for word in want.split("+"))), None)
        if told is None:
            continue
        return build(
            anatomy,
            _find_language(anatomy),
            kernel_class,
            operation,
            anatomy.base.strip("_") or operation,
            direction=find_direction(anatomy.base),
            dtype=find_dtype(anatomy.template),
            parts=(part(told.replace("+", " … "), join("guessed from the name:", operation)),),
        )
    return None
