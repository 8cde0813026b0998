"""Tables of PyTorch's own kernels, by functor or base name.

An elementwise kernel is a loop around a functor (`MulFunctor`) or a function's lambda (`exp_kernel_cuda`). The kernel
determines how the loop runs, the functor what it computes.
"""

import re

from stepscope.explain.kernel_names.vocabulary import Direction, KernelClass, compile_rows

# Functors and functions in elementwise kernels: operation and class. Names not listed here are derived by
# dropping `_kernel_cuda` and the like.
FUNCTORS: dict[str, tuple[str, KernelClass]] = {
    "CUDAFunctor_add": ("add", "elementwise"),
    "CUDAFunctorOnSelf_add": ("add a number", "elementwise"),
    "CUDAFunctorOnOther_add": ("add a number", "elementwise"),
    "MulFunctor": ("multiply", "elementwise"),
    "DivFunctor": ("divide", "elementwise"),
    "AbsFunctor": ("absolute value", "elementwise"),
    "FillFunctor": ("fill", "elementwise"),
    "CopyFunctor": ("copy", "copy"),
    "BitwiseAndFunctor": ("bitwise and", "elementwise"),
    "BitwiseOrFunctor": ("bitwise or", "elementwise"),
    "BitwiseXorFunctor": ("bitwise xor", "elementwise"),
    "CompareEqFunctor": ("compare", "elementwise"),
    "CompareFunctor": ("compare", "elementwise"),
    "WhereFunctor": ("where", "elementwise"),
    "compare_scalar_kernel": ("compare", "elementwise"),
    "compare_kernel": ("compare", "elementwise"),
    "direct_copy_kernel_cuda": ("copy", "copy"),
    "bfloat16_copy_kernel_cuda": ("cast to bf16", "copy"),
    "bfloat16tofloat32_copy_kernel_cuda": ("cast to fp32", "copy"),
    "float16_copy_kernel_cuda": ("cast to fp16", "copy"),
    "float16tofloat32_copy_kernel_cuda": ("cast to fp32", "copy"),
    "float8_copy_kernel_cuda": ("cast to fp8", "copy"),
    "conj_kernel_cuda": ("conjugate", "elementwise"),
    "pow_tensor_scalar_kernel_impl": ("power", "elementwise"),
    "pow_tensor_tensor_kernel": ("power", "elementwise"),
    "pow_scalar_tensor_impl": ("power", "elementwise"),
    "threshold_kernel_impl": ("threshold (ReLU backward)", "elementwise"),
    "launch_clamp_scalar": ("clamp (also ReLU)", "elementwise"),
    "clamp_scalar_kernel_impl": ("clamp (also ReLU)", "elementwise"),
    "launch_relu_kernel": ("ReLU", "elementwise"),
    "GeluCUDAKernelImpl": ("GELU", "elementwise"),
    "GeluBackwardCUDAKernelImpl": ("GELU backward", "elementwise"),
    "silu_kernel": ("SiLU", "elementwise"),
    "silu_backward_kernel": ("SiLU backward", "elementwise"),
    "mish_kernel": ("Mish", "elementwise"),
    "elu_kernel": ("ELU", "elementwise"),
    "glu_kernel": ("GLU", "elementwise"),
    "glu_backward_kernel": ("GLU backward", "elementwise"),
    "leaky_relu_kernel": ("leaky ReLU", "elementwise"),
    "softplus_kernel": ("softplus", "elementwise"),
    "where_kernel_impl": ("where", "elementwise"),
    "masked_fill_kernel": ("masked fill", "elementwise"),
    "masked_scale_kernel": ("dropout backward", "random"),
    "arange_cuda_out": ("arange", "elementwise"),
    "linspace_cuda_out": ("linspace", "elementwise"),
    "lerp_scalar_kernel": ("interpolate (lerp)", "elementwise"),
    "lerp_tensor_kernel": ("interpolate (lerp)", "elementwise"),
    "addcmul_cuda_kernel": ("add a product (addcmul)", "elementwise"),
    "addcdiv_cuda_kernel": ("add a quotient (addcdiv)", "elementwise"),
    "addcmul_cuda_scalar_tensor2_kernel": ("add a product (addcmul)", "elementwise"),
    "mse_kernel_cuda": ("squared error", "loss"),
    "mse_backward_cuda_kernel": ("squared error backward", "loss"),
    "smooth_l1_kernel_cuda": ("smooth L1 loss", "loss"),
    "smooth_l1_backward_cuda_kernel": ("smooth L1 loss backward", "loss"),
    "huber_kernel_cuda": ("Huber loss", "loss"),
    "huber_backward_cuda_kernel": ("Huber loss backward", "loss"),
    "binary_cross_entropy_out_kernel": ("binary cross-entropy", "loss"),
    "binary_cross_entropy_backward_out_kernel": ("binary cross-entropy backward", "loss"),
    "batch_norm_update_stats_and_invert": ("batch norm statistics", "norm"),
    "batch_norm_update_stats": ("batch norm statistics", "norm"),
    "batch_norm_calc_invstd": ("batch norm statistics", "norm"),
    "batch_norm_elementwise": ("batch norm", "norm"),
    "batch_norm_elementwise_backward_train": ("batch norm backward", "norm"),
    "batch_norm_elementwise_backward_eval": ("batch norm backward", "norm"),
    "index_kernel_impl": ("gather by index", "index"),
    "index_put_kernel_impl": ("write by index", "index"),
    "index_fill_kernel_impl": ("fill by index", "index"),
    "index_copy_kernel_impl": ("copy by index", "index"),
    "take_kernel": ("gather by index (take)", "index"),
    "put_kernel": ("write by index (put)", "index"),
    "gather_kernel": ("gather", "index"),
    "uniform_kernel": ("uniform random numbers", "random"),
    "normal_kernel": ("normal random numbers", "random"),
    "bernoulli_kernel": ("random mask", "random"),
    "bernoulli_tensor_cuda_kernel": ("random mask", "random"),
    "exponential_kernel": ("exponential random numbers", "random"),
    "random_from_to_kernel": ("random integers", "random"),
    "GroupNormKernelImplInternal": ("group norm", "norm"),
    "GroupNormBackwardKernelImplInternal": ("group norm backward", "norm"),
    "GroupNorm1dForward": ("group norm", "norm"),
    "GroupNorm1dBackward": ("group norm backward", "norm"),
}
STEM = re.compile(
    r"(?P<stem>[a-z0-9_]+?)(?:_tensor|_scalar)?_kernel(?:_cuda|_impl|_cuda_impl|_gpu)?$|(?P<out>[a-z0-9]+)_cuda_out$"
)
# Words that do not say what is computed.
SHELL_WORDS = frozenset(
    (
        "gpu_kernel_impl_nocast",
        "gpu_kernel_impl",
        "gpu_kernel",
        "gpu_kernel_with_scalars",
        "jitted_gpu_kernel_impl",
        "opmath_gpu_kernel_with_scalars",
        "opmath_symmetric_gpu_kernel_with_scalars",
        "elementwise_kernel",
        "vectorized_elementwise_kernel",
        "kernel",
    )
)

# Kernels with their own base name. The first match wins: class, operation, direction.
BASES: tuple[tuple[re.Pattern[str], KernelClass, str, Direction | None], ...] = compile_rows(
    (r"nll_loss\w*forward|nll_loss2d_forward", "loss", "negative log-likelihood", "forward"),
    (r"nll_loss\w*backward", "loss", "negative log-likelihood backward", "backward"),
    (r"cross_entropy|CrossEntropy|MultiMarginLoss|multilabel_margin|MultiLabelMargin|kl_div", "loss", "loss", None),
    (r"ctc_loss\w*backward", "loss", "CTC loss backward", "backward"),
    (r"ctc_loss", "loss", "CTC loss", "forward"),
    (r"batch_norm\w*backward|batch_norm_backward", "norm", "batch norm backward", "backward"),
    (r"batch_norm", "norm", "batch norm", "forward"),
    (
        r"GammaBetaBackward|layer_norm_grad|LayerNormBackward|layer_norm_backward|cuComputeGrad"
        r"|cuComputePartGrad",
        "norm",
        "layer norm backward",
        "backward",
    ),
    (r"layer_norm|LayerNorm|cuApplyLayerNorm", "norm", "layer norm", "forward"),
    (r"rms_?norm\w*(?:backward|grad)|RMSNorm\w*Backward", "norm", "RMS norm backward", "backward"),
    (r"rms_?norm|RMSNorm", "norm", "RMS norm", "forward"),
    (
        r"GroupNorm\w*Backward|group_norm\w*backward|ComputeInternalGradients|ComputeBackwardFusedParams",
        "norm",
        "group norm backward",
        "backward",
    ),
    (r"GroupNorm|group_norm|RowwiseMoments|ComputeFusedParams", "norm", "group or layer norm", "forward"),
    (r"weight_norm\w*bwd", "norm", "weight norm backward", "backward"),
    (r"weight_norm|renorm", "norm", "weight norm", None),
    (
        r"embedding_bag\w*backward|EmbeddingBag_accGrad|EmbeddingBag\w*backward",
        "embedding",
        "embedding bag backward",
        "backward",
    ),
    (r"EmbeddingBag|embedding_bag", "embedding", "embedding bag", "forward"),
    (
        r"embedding_backward_feature_kernel|embedding_dense_backward|compute_grad_weight\w*"
        r"|sum_and_scatter|krn_partials_per_segment|krn_partial_segment_offset|partials_per_segment"
        r"|compute_num_of_partial_segments",
        "embedding",
        "embedding backward",
        "backward",
    ),
    (r"embedding", "embedding", "embedding", None),
    (r"indexing_backward_kernel\w*", "index", "add up gradients by index", "backward"),
    (r"indexFunc\w*", "index", "add by index", None),
    (r"prepare_grouped_gemm_data|populate_cublas_grouped_args\w*", "index", "prepare a grouped GEMM", None),
    (
        r"index_?[sS]elect\w*|vectorized_gather_kernel|_?gather_kernel|index_elementwise_kernel|index_copy"
        r"|index_fill|indexCopy\w*|indexFill\w*|\btake_|\bput_",
        "index",
        "gather by index",
        None,
    ),
    (
        r"scatter_gather|_scatter_gather_elementwise|scatter|index_add|indexAdd\w*|index_reduce|index_put"
        r"|segment_reduce",
        "index",
        "scatter or gather",
        None,
    ),
    (r"nonzero|masked_select|masked_scatter|write_indices|flag_kernel|unique", "index", "find or pack elements", None),
    (r"fused_dropout|dropout|masked_scale", "random", "dropout", None),
    (
        r"distribution_\w+|philox|curand|randperm|random|bernoulli|multinomial|sampleMultinomial"
        r"|generate_seed",
        "random",
        "random numbers",
        None,
    ),
    (
        r"radixSort|RadixSort|bitonic\w*|topk|TopK|sbtopk|mbtopk|gatherTopK|gatherKthValue|gatherMedian"
        r"|sort|Sort|radixFindKth|computeBlockwise\w*|fill_reverse_indices|fill_index_and_segment",
        "sort",
        "sort or top-k",
        None,
    ),
    (r"tensor_kernel_scan\w*|scan|Scan|cumsum|cumprod", "reduction", "running sum", None),
    (
        r"(?:max|avg|adaptive|fractional|lp)_?\w*pool\w*backward|adaptive\w*Pool\w*Grad"
        r"|atomic_adaptive\w*grad\w*",
        "reduction",
        "pooling backward",
        "backward",
    ),
    (r"(?:max|avg|adaptive|fractional|lp)_?\w*pool\w*|adaptive_\w+|MaxUnpool\w*", "reduction", "pooling", None),
    (r"CatArrayBatchedCopy\w*", "copy", "concatenate", None),
    (r"chunk_cat|split_with_sizes_copy\w*|foreach_copy|fsdp", "copy", "pack or unpack shards", None),
    (r"triu_tril_kernel|tril_indices|triu_indices", "elementwise", "triangle (triu, tril)", None),
    (r"upsample\w*backward", "elementwise", "upsample backward", "backward"),
    (r"upsample|grid_sampler|interpolate", "elementwise", "upsample", None),
    (r"reflection_pad\w*|replication_pad\w*|\w*pad\d?d?_out", "copy", "pad", None),
    (r"conv_depthwise\w*(?:backward|grad)\w*", "convolution", "gradient of a depthwise convolution", "backward"),
    (r"conv_depthwise\w*|convolution|slow_conv", "convolution", "depthwise convolution", "forward"),
    (r"im2col\w*|vol2col|col2im\w*|col2vol", "convolution", "fold or unfold a convolution's input", None),
    (
        r"roll_cuda_kernel|flip_cuda_kernel|flip|transpose|kernel_pointwise_flip\w*|rot90|unfold_backward"
        r"|repeat_interleave\w*|compute_cuda_kernel|unpackRawBufferKernel|packed|copy|spatial_transpose",
        "copy",
        "copy between layouts",
        None,
    ),
    (
        r"amp_update_scale|amp_non_finite|multi_tensor\w*|fused_adam|fused_sgd|adagrad|lamb",
        "optimizer",
        "optimizer update",
        None,
    ),
    (r"softmax\w*backward|SoftMax\w*Backward|masked_softmax\w*backward", "softmax", "softmax backward", "backward"),
    (r"softmax|SoftMax|host_softmax|transform_bias_rescale_qkv\w*", "softmax", "softmax forward", "forward"),
    (r"gemm|_mm_kernel|tinygemm\w*|int4_mm|int8mm|bmm|addmm|dot_kernel", "GEMM", "GEMM", None),
    (r"[hH]istogram\w*|bincount", "reduction", "histogram", None),
    (
        r"reduce_kernel|reduction|norm_reduce|cdist|pdist|logcumsumexp|aminmax|trace|searchsorted",
        "reduction",
        "reduction",
        None,
    ),
    (r"fft|_fft_conjugate", "elementwise", "Fourier transform helper", None),
    (r"rnn|lstm_cell|gru_cell", "elementwise", "recurrent cell", None),
    (
        r"elementwise|pointwise|arange|eye_kernel|fill|quantize|fake_quant\w*|ChooseQuantizationParams"
        r"|complex|linspace|binary|unary",
        "elementwise",
        "elementwise",
        None,
    ),
)

# The operation of `multi_tensor_apply_kernel`; the first match wins.
FOREACH = compile_rows(
    (r"FusedAdam\w*Functor|AdamFunctor\w*|AdamCapturable\w*|DistAdam\w*", "Adam update"),
    (r"FusedSgd\w*|SGDFunctor", "SGD update"),
    (r"FusedAdagrad\w*|AdagradFunctor", "Adagrad update"),
    (r"LAMBStage\w*|LambStage\w*", "LAMB update"),
    (r"NovoGrad\w*", "NovoGrad update"),
    (r"Lion\w*", "Lion update"),
    (r"LpNorm\w*|L2Norm\w*|MaxNorm\w*|LpMax\w*", "norms of many tensors (gradient clipping)"),
    (r"ScaleFunctor|_amp_\w*|amp_non_finite\w*", "unscale gradients"),
    (r"AxpbyFunctor", "scale and add many tensors"),
    (r"TernaryOpList\w*|TernaryOpScalar\w*|Lerp\w*", "interpolate many tensors (foreach lerp)"),
    (r"PointwiseOp\w*", "addcmul or addcdiv of many tensors (foreach)"),
    (r"BinaryOp\w*", "binary operation on many tensors (foreach)"),
    (r"UnaryOp\w*|ZeroFunctor", "unary operation on many tensors (foreach)"),
)
# The inner operation of a foreach or reduction kernel.
INNER = {
    "plus": "add",
    "multiplies": "multiply",
    "divides": "divide",
    "minus": "subtract",
    "Sqrt": "square root",
    "reverse_divides": "reciprocal",
    "maximum": "maximum",
    "minimum": "minimum",
    "power_functor": "power",
}
REDUCTIONS = compile_rows(
    (r"MeanOps", "mean"),
    (r"WelfordOps", "mean and variance"),
    (r"sum_functor|sum_kernel|nansum_functor", "sum"),
    (r"prod_functor", "product"),
    (r"NormOneOps|NormTwoOps|NormOps|NormZeroOps|AbsMaxOps|AbsMinOps|norm_kernel", "vector norm"),
    (r"ArgMaxOps|argmax", "argmax"),
    (r"ArgMinOps|argmin", "argmin"),
    (r"MaxOps|MaxNanFunctor|max_values|max_kernel|aminmax", "maximum"),
    (r"MinOps|MinNanFunctor|min_values|min_kernel", "minimum"),
    (r"and_kernel|all_kernel", "all"),
    (r"or_kernel|any_kernel", "any"),
    (r"xor_sum", "xor sum"),
    (r"NanSumOps", "sum"),
)
# CUB, Thrust and rocPRIM, by a word anywhere in the name.
PRIMITIVES: tuple[tuple[re.Pattern[str], KernelClass, str], ...] = compile_rows(
    (r"(?i)radix_?sort|merge_?sort|segmented_?sort|onesweep|block_sort", "sort", "sort"),
    (r"(?i)scan", "reduction", "running sum"),
    (r"(?i)select|partition|unique|run_?length|rle", "index", "pick elements"),
    (r"(?i)histogram", "reduction", "histogram"),
    (r"(?i)reduce", "reduction", "reduction"),
    (r"(?i)copy|transform|for_each|fill|parallel_for", "elementwise", "transform or copy"),
)
