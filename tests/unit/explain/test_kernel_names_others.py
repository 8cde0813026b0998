"""Communication, copies by the runtime, AMD's libraries, and those of serving and training frameworks."""

import pytest

from stepscope.explain.kernel_names import KernelClass, decode

TENSILE = "Cijk_{}_{}_BH_MT64x32x128_MI16x16x16x1_SN_APM1_GSU1_GSUASB_ISA942_PGR2_WG64_4_1"


@pytest.mark.parametrize(
    ("name", "library", "operation", "dtype"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL", "all-reduce", "fp32"),
        (
            "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
            "NCCL",
            "all-reduce",
            "fp32",
        ),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "NCCL", "reduce-scatter", "bf16"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "NCCL", "all-gather", None),
        ("ncclDevKernel_SendRecv(x)", "NCCL", "send and receive", None),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "RCCL", "unnamed collective", None),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(x)", "DeepEP", "send tokens to their experts", None),
        (
            "void deep_ep::internode_ll::combine<true, 7168, 9, 32>(x)",
            "DeepEP",
            "return tokens from their experts",
            None,
        ),
        (
            "void multimem_all_reduce_kernel<c10::BFloat16, 16, 8>(x)",
            "ATen",
            "all-reduce through the NVLink switch",
            None,
        ),
        (
            "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16>(x)",
            "ATen",
            "all-reduce over peer memory",
            None,
        ),
        ("two_shot_all_reduce_kernel", "ATen", "all-reduce over peer memory", None),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(x)", "vLLM", "all-reduce", None),
        ("nvshmemi_barrier_kernel", "NVSHMEM", "one-sided communication", None),
    ],
)
def test_communication_is_recognized(name: str, library: str, operation: str, dtype: str | None) -> None:
    found = decode(name)
    assert found.kernel_class == "communication"
    assert (found.library, found.operation, found.dtype) == (library, operation, dtype)


@pytest.mark.parametrize(
    ("name", "kernel_class", "short"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "memcpy", "memcpy, host to device"),
        ("Memcpy DtoD (Device -> Device)", "memcpy", "memcpy, within the device"),
        ("Memcpy PtoP (Device -> Device)", "memcpy", "memcpy, between devices"),
        ("[CUDA memcpy Device-to-Host]", "memcpy", "memcpy, device to host"),
        ("CopyDeviceToHost", "memcpy", "memcpy, device to host"),
        ("__amd_rocclr_copyBuffer", "memcpy", "memcpy, direction not named"),
        ("Memset (Device)", "memset", "memset"),
        ("[CUDA memset]", "memset", "memset"),
        ("__amd_rocclr_fillBufferAligned.kd", "memset", "memset"),
    ],
)
def test_copies_and_fills_by_the_runtime_are_recognized(name: str, kernel_class: KernelClass, short: str) -> None:
    found = decode(name)
    assert (found.kernel_class, found.short) == (kernel_class, short)


@pytest.mark.parametrize(
    ("factors", "layout"), [("Ailk_Bljk", "nn"), ("Alik_Bljk", "tn"), ("Ailk_Bjlk", "nt"), ("Alik_Bjlk", "tt")]
)
@pytest.mark.parametrize(
    ("code", "dtype"),
    [("SB", "fp32"), ("DB", "fp64"), ("HHS", "fp16"), ("BBS", "bf16"), ("I8II", "int8"), ("F8BS", "fp8")],
)
def test_the_formula_of_a_tensile_kernel_is_read(factors: str, layout: str, code: str, dtype: str) -> None:
    found = decode(TENSILE.format(factors, code))
    assert (found.library, found.kernel_class) == ("rocBLAS", "GEMM")
    assert (found.layout, found.dtype, found.tile) == (layout, dtype, (64, 32, 128))
    assert (found.architecture, found.tensor_cores, found.split_k) == ("gfx942", True, False)


def test_long_tensile_names_are_read_to_their_end() -> None:
    name = (
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN" + "_LBSPPA1024" * 60 + "_GSU4_ISA942"
    )
    found = decode(name)
    assert (found.library, found.architecture, found.split_k) == ("hipBLASLt", "gfx942", True)


@pytest.mark.parametrize(
    ("name", "library", "kernel_class", "direction"),
    [
        (
            "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32_wt32x32x8_ws1x1_wr2x2_gkgs",
            "MIOpen",
            "convolution",
            "forward",
        ),
        (
            "igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x64_wt32x32x8_ws1x1_wr1x1_gkgs",
            "MIOpen",
            "convolution",
            "backward",
        ),
        ("miopenSp3AsmConv_v21_1_3_gfx9_fp32_stride1", "MIOpen", "convolution", None),
        ("naive_conv_fwd_nchw_float_double_float", "MIOpen", "convolution", "forward"),
        ("MIOpenBatchNormFwdTrainSpatial", "MIOpen", "norm", "forward"),
        ("batched_transpose_32x32_half", "MIOpen", "copy", None),
        ("SubTensorOpWithCastTensor1d", "MIOpen", "copy", None),
        ("SubTensorOpWithScalar1d", "MIOpen", "elementwise", None),
        ("void ck::kernel_gemm_xdl_cshuffle_v1<ck::GridwiseGemm_xdl<_Float16> >(x)", "CK", "GEMM", None),
        (
            "_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_4GridILi64EttftE",
            "CK",
            "convolution",
            "backward",
        ),
        (
            "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_4GridEttft",
            "CK",
            "convolution",
            "forward",
        ),
        ("_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_7ProblemIDF16bDF16bf", "CK", "norm", "forward"),
        ("rocblas_gemvn_kernel<64, 4, float>(x)", "rocBLAS", "GEMM", None),
    ],
)
def test_amd_kernels_have_their_class(
    name: str, library: str, kernel_class: KernelClass, direction: str | None
) -> None:
    found = decode(name)
    assert (found.library, found.kernel_class, found.direction) == (library, kernel_class, direction)


@pytest.mark.parametrize(
    ("name", "library", "kernel_class"),
    [
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16> >(x)", "vLLM", "elementwise"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x)", "vLLM", "norm"),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(x)", "vLLM", "elementwise"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>(x)", "vLLM", "copy"),
        ("void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(x)", "vLLM", "elementwise"),
        ("void vllm::moe::topkGatingSoftmax<8, 64, 4, 16, int>(x)", "vLLM", "sort"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "Triton", "GEMM"),
        ("_finalize_matmul_scatter_bf16", "Triton", "reduction"),
        ("fused_moe_kernel", "unknown", "GEMM"),
        ("void transformer_engine::normalization::rmsnorm_bwd_general_kernel<X>(x)", "Transformer Engine", "norm"),
        ("void transformer_engine::detail::cast_transpose_fused_kernel<true>(x)", "Transformer Engine", "copy"),
        ("void scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 10>(x)", "unknown", "softmax"),
        ("void cuApplyLayerNorm<float, float, float>(x)", "Apex", "norm"),
        (
            "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float, float, int>, float>(x)",
            "Apex or Transformer Engine",
            "optimizer",
        ),
        ("void kOptimizer32bit2State<float, 1>(x)", "bitsandbytes", "optimizer"),
        ("void kDequantizeBlockwise<__half, 512, 64, 8, 1>(x)", "bitsandbytes", "elementwise"),
        ("void marlin::Marlin<__half, 1, 256>(x)", "Marlin", "GEMM"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<1, 2>(x)", "DeepGEMM", "GEMM"),
        ("_rms_norm_backward_kernel", "Triton", "norm"),
        ("liger_cross_entropy_kernel", "Liger", "loss"),
        ("_swiglu_forward_kernel", "Triton", "elementwise"),
        ("_layer_norm_fwd_fused", "Triton", "norm"),
        ("_gumbel_sample_kernel", "Triton", "random"),
        ("_causal_conv1d_update_kernel", "Triton", "convolution"),
        ("topk_gating_softmax_kernel", "unknown", "sort"),
        ("void at::native::(anonymous namespace)::_assert_async_cuda_kernel<bool>(bool*)", "ATen", "other"),
        ("void gsplat::intersect_tile_kernel<float>(bool)", "unknown", "other"),
        ("matmul_kernel", "unknown", "GEMM"),
        ("softmax_kernel", "unknown", "softmax"),
        ("myFusedLayerNormKernel", "unknown", "norm"),
    ],
)
def test_kernels_of_other_libraries_have_their_class(name: str, library: str, kernel_class: KernelClass) -> None:
    found = decode(name)
    assert (found.library, found.kernel_class) == (library, kernel_class)


@pytest.mark.parametrize(
    ("name", "not_this"),
    [
        ("broadcast_kernel", "copy"),  # no cast
        ("extract_kernel", "elementwise"),  # no activation
        ("transform_format_kernel", "norm"),  # no norm
        ("void ns::summary_kernel<int>(x)", "reduction"),  # no sum
        ("void user::attempt<cutlass_like>(x)", "attention"),
    ],
)
def test_word_inside_another_does_not_count(name: str, not_this: KernelClass) -> None:
    assert decode(name).kernel_class != not_this


def test_mixed_dtypes_of_an_expert_gemm_are_decoded() -> None:
    found = decode("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x4_swiglu")
    assert (found.dtype, found.tile, found.split_k) == ("bf16", (128, 128, 128), True)
    assert found.short == "MoE GEMM bf16 × mxfp4 128×128 (Triton)"


def test_the_unsigned_short_of_ck_is_bf16() -> None:
    name = "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_4GridEttftE"
    assert decode(name).dtype == "bf16"
    assert decode("void ck::kernel_gemm_xdl_cshuffle_v1<ck::Grid<_Float16, float> >(x)").dtype == "fp16"
