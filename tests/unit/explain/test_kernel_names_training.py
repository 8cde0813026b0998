"""Kernels of mixture-of-experts, FP8 and compiled training, with the names that public traces and sources have."""

import pytest

from stepscope.explain.kernel_names import KernelClass, decode, describe

# ruff: noqa: E501 - names are as recorded
NAMES: dict[KernelClass, tuple[str, ...]] = {
    "GEMM": (
        "XXT_kernel",
        "ba_plus_cAA_kernel",
        "void dpsk::gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 5u, 128u, 128u, 2u, (dpsk::gemm::GemmType)1>(__nv_bfloat16*, float*, int*)",
        "void deep_gemm::fp8_gemm_kernel<7168u, 2048u, 128u, 160u, 128u, 0u, 64u, 9u, 4u, 128u, 128u, 1u, true, (deep_gemm::GemmType)1>(__nv_bfloat16*, float*)",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u, 7168u, 1u, 128u, 128u, 128u>(float*)",
        "void cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c_outfmt_head::GemmKernel>(dpsk::grouped_gemm::cuda::fp8_ptp128c_outfmt_head::GemmKernel::Params)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float, float, float, false, true, true, false, 7, false, cublasGemvParamsEx<int> >(x)",
        "void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, int, long, float*, cublasLtEpilogue_t, int, float*)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(cublasLt::cublasSplitKParams<float>)",
        "_kernel_matmul_fp8_row",
        "_kernel_grouped_gemm_fp8_rowwise",
        "_grouped_gemm_kernel",
        "_kernel_grouped_gemm_ws",
        "group_gemm_kernel",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, x> >(y)",
        "void cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<x> >(y)",
        "_scatter2scatter",
        "_groupXtY",
        "_sdd_kernel",
        "bmm_E4m3_E4m3E4m3_Fp32_bA16_bB16_t128x8x128u2_s6_et64x8_m64x8x32_cga1x1x1_16dp256b_rM_TN_transOut_schedP_bN_dsFp8_ldgsts_rgTma_clmp_swiGlu_dynB_sm100f",
        "kernel_gemm_xdl_cshuffle_v3_multi_d",
        "void ck::kernel_moe_gemm<x>(y)",
        "void ck_tile::kentry<256, 1, ck_tile::GroupedGemmKernel<x> >(y)",
        "triton_tem_fused_mm_3",
        "_w8a8_block_fp8_matmul",
        "fused_moe_kernel",
        "_ZN5aiter50fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256E",
    ),
    "attention": (
        "void flash::compute_attn_ws<Flash_fwd_kernel_traits<192, 128, 128, 12, 2, false, 1, cutlass::bfloat16_t, 128>, true, flash::SingleTileScheduler, flash::SeqLenTraits<true> >(flash::CollectiveMainloopFwd<x>)",
        "void flash::flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576, 64, 64, 8, cutlass::bfloat16_t, 512, true, 0, cutlass::bfloat16_t, cutlass::bfloat16_t>, true>(Flash_fwd_mla_params)",
        "void flash::flash_fwd_splitkv_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512, 64>(Flash_fwd_mla_params)",
        "flash::prepare_varlen_num_blocks_kernel(int, int, int, int const*, int const*)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, 128, cutlass::bfloat16_t, float> > > >(x)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::CollectiveMainloopBwdSm90<2, 2, 2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> > > > > >(x)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm100_flash_bprop_f16_knob_3_128x128x128_1x1x1_kernel0_0",
        "sage_fwd",
        "_sage_fwd_mask",
        "sage_fwd_mxfp4",
        "void qk_int_sv_f8_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1>(signed char*)",
        "void qk_int_sv_f16_attn_kernel<128u, 64u, 32u, 64u, 128u, (DataType)1, (QuantGranularity)3>(signed char*)",
        "void qk_int8_sv_f8_attn_kernel<64u, 128u>(CUtensorMap_st)",
        "_fused_neighborhood_attention_QK_kernel",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "chunk_fwd_kernel_o",
        "chunk_bwd_kernel_dqkwg",
        "chunk_fwd_kernel_h",
        "recompute_w_u_fwd_kernel",
        "chunk_scaled_dot_kkt_fwd_kernel",
        "fused_recurrent_gated_delta_rule_fwd_kernel",
        "solve_tril_16x16_kernel",
        "merge_16x16_to_64x64_inverse_kernel",
        "chunk_gla_fwd_kernel_inter",
        "parallel_nsa_fwd_kernel",
        "fused_recurrent_rwkv7_fwd_kernel",
        "prepare_wy_repr_fwd_kernel_chunk64",
        "parallel_attn_fwd_kernel",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 128, 128, true, true>::Params)",
        "void efficient_attention_forward_ck<x>(y)",
        "fmhaSm100fKernel_QkvE4m3OBfloat16H192HV128PagedKvDenseP32VarSeqQ128Kv128PersistentContext",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<x>(y)",
        "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<x> >(y)",
        "_attn_fwd",
        "_bwd_preprocess_do_o_dot",
        "_ZN5aiter37fmha_fwd_hd128_bf16_causal_rtne_groupE",
        "_ZN5aiter33fmha_bwd_hd128_bf16_a32_rtne_psskE",
        "_ZN5aiter31pa_bf16_pertokenFp8_gqa8_2tg_4wE",
        "_ZN5aiter36mla_a8w8_qh16_qseqlen4_gqaratio16_psE",
    ),
    "communication": (
        "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, float*, long*, float*, dpsk::ep::internode::SourceMeta*, int4 const*)",
        "void dpsk::ep::internode::combine<false, 4, __nv_bfloat16, 4, 4, 16, 24>(int4*, float*, bool const*, int4 const*)",
        "void dpsk::ep::internode::notify_dispatch<false, 4>(int const*, long*, int)",
        "void dpsk::ep::internode::cached_notify<false>(int, int, int, int, int*)",
        "void dpsk::ep::internode::dispatch_ll<true, 3, 10, 7168>(void*, float*)",
        "void dpsk::ep::internode::combine_ll<3, 10, 7168, 9>(void*, void*)",
        "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)",
        "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(long const*, int*)",
        "void deep_ep::internode::cached_notify<false>(int, int)",
        "void hybrid_ep::device_sync_kernel<8>(unsigned int*)",
        "void hybrid_ep::dispatch_kernel<hybrid_ep::warp_group<1, 0> >(x)",
        "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(x)",
        "void nvshmemi_transfer::barrier_on_stream_kernel_threadgroup(nvshmem_team_t)",
        "void barrier_on_stream_kernel_threadgroup<>(int, int)",
        "void mscclpp::allreduce7<__half>(x)",
        "void allreduce_all_pairs<float>(mscclpp::MemoryChannelDeviceHandle*, x)",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymkDevWorkArgs)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8, false>(x)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, __nv_bfloat16, 2, false, false>(x)",
        "void tensorrt_llm::kernels::lamport_style_one_shot_all_reduce_norm_kernel<x>(y)",
        "void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_twoshot_sync<x>(y)",
        "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<x>(y)",
        "void tensorrt_llm::kernels::moe_comm::moeAllToAllKernel<x>(y)",
        "void aiter::cross_device_reduce_2stage<__hip_bfloat16, 8>(x)",
        "void aiter::reduce_scatter_cross_device_store<x>(y)",
    ),
    "convolution": (
        "cudnn_volta_scudnn_128x64_relu_interior_nn_v1",
        "cudnn_turing_scudnn_128x128_relu_small_nn_v1",
        "cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "_5x_cudnn_ampere_scudnn_128x32_relu_interior_nn_v1",
        "_5x_cudnn_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "_5x_cudnn_volta_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1",
        "ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "maxwell_scudnn_128x64_relu_small_nn",
        "volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "_5x_cudnn_ampere_fp16_scudnn_fp16_128x64_relu_interior_nn_v1",
        "cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_128x128_32x3_nhwc_align4>(cutlass_tensorop_s1688fprop::Params)",
        "causal_conv1d_fwd_kernel",
        "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4, 64, true, c10::BFloat16, c10::BFloat16>, false>(ConvParamsBase)",
    ),
    "copy": (
        "void cuda::per_token_cast_to_fp8_with_channels_impl<__nv_bfloat16, 128>(unsigned char*)",
        "void TransposePadPermuteKernel<128u, 64u, true, __nv_bfloat16>(x)",
        "void fbgemm_gpu::(anonymous namespace)::_float_to_FP8rowwise_cuda_kernel<float>(float const*, int, int, unsigned char*, bool)",
        "void fbgemm_gpu::(anonymous namespace)::_FP8rowwise_to_float_cuda_kernel<float>(unsigned char const*)",
        "void fbgemm_gpu::(anonymous namespace)::_float_to_paddedFP8rowwise_cuda_kernel<float>(float)",
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(x)",
        "void fbgemm_gpu::(anonymous namespace)::_float_to_bfloat16_cuda_kernel(x)",
        "void fbgemm_gpu::(anonymous namespace)::_bfloat16_to_float_cuda_kernel(x)",
        "void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int)",
        "void transformer_engine::(anonymous namespace)::cast_transpose_general_kernel<8, 4, float, __nv_bfloat16>(x)",
        "transformer_engine::cast_transpose_optimized_kernel",
        "void transformer_engine::detail::cast_transpose_fused_kernel_notaligned<true, false, false>(x)",
        "void transformer_engine::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<false, true, float, __nv_bfloat16>(x)",
        "void transformer_engine::(anonymous namespace)::block_scaled_cast_transpose_kernel_notaligned<true, float, __nv_bfloat16>(x)",
        "_permute_kernel",
        "_unpermute_bwd_with_merging_probs_kernel",
        "void transformer_engine::swizzle_row_scaling_kernel<int4>(x)",
        "_padded_copy",
        "_binned_copy",
        "void xformers::sparse24::sparse24_sparsify_both_ways_kernel<x>(y)",
        "void at::cuda::detail::CatArrayBatchedCopy<x>(y)",
    ),
    "elementwise": (
        "void cuda::swiglu_forward_with_weight_and_per_token_cast_to_fp8_with_channels_impl<__nv_bfloat16, false, true, 128>(unsigned char*)",
        "void cuda::batched_swiglu_forward_and_per_token_cast_to_fp8_with_channels_impl<__nv_bfloat16, 128, 512, true, 128>(unsigned char*)",
        "void QuantInt8Kernel<128u, 32u, 1u, false, false, __nv_bfloat16>(x)",
        "void fbgemm_gpu::dynamicQuantizeMatrixRowwise<(fbgemm_gpu::QuantizationMode)1, float, __nv_bfloat16>(x)",
        "_kernel_quantize_fp8_row",
        "_kernel_quantize_fp8_block",
        "_kernel_dequantize_fp8_row",
        "void jagged_dense_elementwise_dense_output_kernel_<2, long, float>(x)",
        "void transformer_engine::gated_kernels::cast_mxfp8_gated_kernel<true>(x)",
        "void transformer_engine::quantize_kernel<x>(y)",
        "void transformer_engine::dispatch::mxfp8::quantize_kernel::quantize_mxfp8_kernel<false>(x)",
        "void transformer_engine::dgated_act_kernel<4, float>(x)",
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(x)",
        "_swiglu_forward_kernel",
        "_triton_rope",
        "_swiglu_backward_kernel",
        "_geglu_tanh_forward_kernel",
        "_fg_kernel",
        "_DWf_DW_dfg_kernel",
        "_exact_forward_kernel",
        "_rope_embedding",
        "void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<__nv_bfloat16>(x)",
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &(silu(float const&))>(__nv_bfloat16*, __nv_bfloat16 const*, int)",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true>(x)",
        "void per_token_group_quant_8bit_kernel<__nv_bfloat16, c10::Float8_e4m3fn, false>(x)",
        "_silu_and_mul_post_quant_kernel",
        "void ck_tile::kentry<64, 1, ck_tile::MoeSmoothquant<x> >(y)",
        "void aiter::dynamic_per_group_scaled_quant_kernel<x>(y)",
        "_quantize_fp8_rowwise_kernel",
        "triton_quantize_mxfp8",
        "to_mxfp8_dim1_kernel",
        "_triton_fp8_per_group_colwise_scales_kernel",
        "_act_quant_kernel",
        "act_quant_kernel",
        "weight_dequant_kernel",
    ),
    "embedding": (
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, int, 4ul>(x)",
        "void split_embedding_nobag_codegen_forward_unweighted_small_kernel<float>(x)",
    ),
    "index": (
        "void bounds_check_indices_kernel<long, false>(at::GenericPackedTensorAccessor<long, 1ul>)",
        "void fbgemm_gpu::_offsets_range_cuda_kernel<long>(long, long, long const*, long*)",
        "void fbgemm_gpu::_block_bucketize_sparse_features_cuda_kernel1<int>(int)",
        "void fbgemm_gpu::_block_bucketize_sparse_features_cuda_kernel2<true, true, false, int, float>(int)",
        "void fbgemm_gpu::linearize_index_wo_infos_kernel<int>(x)",
        "void moe_permute_kernel<__nv_bfloat16, 128, 8, false>(x)",
        "moe_permute_row_map(int const*, int*, int, int, int)",
        "_row_id_map_pass_1_kernel",
        "_sort_chunks_by_idxs_kernel",
        "_sort_chunks_by_map_kernel",
        "_make_chunk_sort_map_kernel",
        "void transformer_engine::thd_partition_indices_kernel(x)",
        "_padded_gather",
        "k_index_select_cat",
        "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16>(x)",
        "void tensorrt_llm::kernels::cutlass_kernels::fusedBuildExpertMapsSortFirstTokenKernel<256>(x)",
        "_fwd_kernel_ep_scatter_2",
        "_fwd_kernel_ep_gather",
        "moe_align_block_size_kernel",
        "count_and_sort_expert_tokens_kernel",
    ),
    "loss": (
        "void transformer_engine::fused_moe_aux_loss_forward_kernel<float>(x)",
        "liger_cross_entropy_kernel",
        "_jsd_kernel",
        "_kldiv_kernel_forward",
        "_cross_entropy_forward",
        "_chunked_cross_entropy_forward",
        "_cross_entropy_backward",
        "_grpo_loss_fwd_kernel",
        "_selective_log_softmax_kernel",
    ),
    "norm": (
        "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16*, c10::BFloat16 const*, float, int, int)",
        "std::enable_if<(((8) > (0))) && vllm::_typeConvert<c10::BFloat16>::exists, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, c10::BFloat16*)",
        "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)",
        "void transformer_engine::normalization::ln_fwd_tuned_kernel<transformer_engine::normalization::Kernel_traits<__nv_bfloat16, __nv_bfloat16> >(x)",
        "void transformer_engine::normalization::rmsnorm_bwd_finalize_tuned_kernel<x>(y)",
        "_rms_norm_forward_kernel",
        "_layer_norm_backward_kernel",
        "_rms_layernorm_forward",
        "l2norm_fwd_kernel",
        "layer_norm_gated_fwd_kernel",
        "_layer_norm_fwd_1pass_kernel",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)",
        "void aiter::add_rmsnorm_quant_kernel<x>(y)",
        "void ck_tile::kentry<256, 1, ck_tile::Rmsnorm2dFwd<x> >(y)",
    ),
    "optimizer": (
        "void split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float, float, 4ul>(x)",
        "void transformer_engine::multi_tensor_adam::adam_kernel<x>(y)",
        "void transformer_engine::multi_tensor_apply_kernel<transformer_engine::TensorListMetadata<4, false>, transformer_engine::AdamFunctorMaster<__nv_bfloat16, __nv_bfloat16, float, int>, float, float>(long)",
        "void multi_tensor_apply_kernel<TensorListMetadata<2>, ScaleFunctor<float, float>, float>(x)",
    ),
    "random": ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>(x)",),
    "reduction": (
        "void dpsk::ep::CUB_200700_900_NS::DeviceScanKernel<x>(y)",
        "void cdpsk::ep::CUB_200700_900_NS::DeviceScanKernel<cdpsk::ep::CUB_200700_900_NS::DeviceScanPolicy<int> >(y)",
        "void MeanScaleKernel<64u, false, __nv_bfloat16>(x)",
        "void moe_unpermute_kernel<__nv_bfloat16, 8, true>(x)",
        "_unpermute_kernel",
        "void megablocks::histogram<int>(x)",
        "chunk_local_cumsum_scalar_kernel",
        "_chunk_cumsum_fwd_kernel",
        "_chunk_state_fwd_kernel",
        "_state_passing_fwd_kernel",
        "_bmm_chunk_fwd_kernel",
        "_chunk_scan_fwd_kernel",
        "_chunk_scan_bwd_ddAcs_stable_kernel",
        "void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16, 1, true, true, true, true, c10::BFloat16, float> >(SSMParamsBase)",
        "void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<__nv_bfloat16>(x)",
        "void moe::dev::finalize::finalizeKernel<x>(y)",
    ),
    "softmax": (
        "void transformer_engine::scaled_aligned_causal_masked_softmax_warp_forward<__half, __half, float, 11>(x)",
        "void (anonymous namespace)::scaled_upper_triang_masked_softmax_warp_forward<__half, __half, float, 11>(x)",
    ),
    "sort": (
        "void transformer_engine::fused_topk_with_score_function_forward_kernel<float>(x)",
        "void moe::dev::routing::routingDeepSeek::routingMainKernel<x>(y)",
        "void ck_tile::kentry<256, 1, ck_tile::MoeSortingKernel<x> >(y)",
        "void aiter::topk_softplus<x>(y)",
        "void aiter::grouped_topk_kernel<x>(y)",
    ),
}


@pytest.mark.parametrize(("kernel_class", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_class(kernel_class: KernelClass, name: str) -> None:
    found = decode(name)
    assert found.kernel_class == kernel_class
    assert found.parts, "says which part of the name tells"


DEEP_GEMM = (
    "void {}::fp8_gemm_kernel<4096u, 7168u, 128u, 160u, 128u, 5u, 128u, 128u, 2u, ({}::GemmType){}>(__nv_bfloat16*)"
)


@pytest.mark.parametrize("scope", ["deep_gemm", "dpsk::gemm"])
def test_deep_gemm_names_its_tile_and_whether_it_is_grouped(scope: str) -> None:
    one, grouped = (decode(DEEP_GEMM.format(scope, scope, kind)) for kind in (0, 1))
    assert (one.operation, grouped.operation) == ("GEMM", "grouped GEMM")
    for found in (one, grouped):
        assert (found.library, found.dtype, found.tile, found.tensor_cores) == (
            "DeepGEMM",
            "fp8",
            (128, 160, 128),
            True,
        )
        assert "compiled for N = 4096 and K = 7168" in {part.meaning for part in found.parts}


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*)", "send tokens to their experts"),
        ("void dpsk::ep::internode::combine_ll<3, 10, 7168, 9>(void*)", "return tokens from their experts"),
        ("void dpsk::ep::internode::notify_dispatch<false, 4>(int const*)", "prepare the exchange of tokens"),
        ("void hybrid_ep::dispatch_kernel<hybrid_ep::warp_group<1, 0> >(x)", "send tokens to their experts"),
    ],
)
def test_expert_parallel_exchange(name: str, operation: str) -> None:
    found = decode(name)
    assert (found.library, found.operation) == ("DeepEP", operation)


def test_fp32_convolutions_of_cudnn_do_not_use_tensor_cores() -> None:
    for prefix in ("", "cudnn_", "cudnn_infer_", "_5x_cudnn_"):
        found = decode(f"{prefix}ampere_scudnn_128x64_relu_xregs_large_nn_v1")
        assert (found.library, found.dtype, found.tile, found.tensor_cores) == ("cuDNN", "fp32", (128, 64), False)


def test_comparisons_in_a_return_type_do_not_hide_the_name() -> None:
    condition = "(((8) > (0))) && vllm::_typeConvert<c10::BFloat16>::exists"
    found = decode(f"std::enable_if<{condition}, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(x)")
    assert (found.library, found.operation, found.dtype) == ("vLLM", "RMS norm", "bf16")


def test_directions_of_linear_attention() -> None:
    assert decode("chunk_fwd_kernel_o").direction == "forward"
    assert decode("chunk_bwd_kernel_dqkwg").direction == "backward"
    assert decode("solve_tril_16x16_kernel").direction is None


def test_a_compiler_is_not_proposed_for_casts_of_other_libraries() -> None:
    cast = decode("void fbgemm_gpu::(anonymous namespace)::_float_to_FP8rowwise_cuda_kernel<float>(float const*)")
    assert cast.is_cast
    assert not any("torch.compile" in note for note in describe(cast).notes)


def test_an_epilogue_is_not_a_gemm_that_tensor_cores_would_speed_up() -> None:
    found = decode("void cublasLt::epilogue::impl::globalKernel<8, 32, float, float, float, true, true, 1>(int, int)")
    assert (found.library, found.tensor_cores) == ("cuBLASLt", None)
    assert describe(found).notes == ()


def test_grouped_gemms_of_pytorch_have_a_tile() -> None:
    cluster = "cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >"
    tile = "cute::tuple<cute::C<128>, cute::C<256>, cute::C<64> >"
    for spelled in (tile, tile.replace("C<", "C<(int)").replace(" >", ">")):
        name = decode(
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
            "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, cutlass::gemm::collective::CollectiveMma<"
            f"cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<4, {cluster}, cutlass::gemm::KernelPtrArray>, "
            f"{spelled}, cutlass::bfloat16_t, cute::tuple<long, cute::C<1> >*> > > >(x)"
        )
        assert (name.kernel_class, name.operation, name.tile, name.dtype) == (
            "GEMM",
            "grouped GEMM",
            (128, 256, 64),
            "bf16",
        )
