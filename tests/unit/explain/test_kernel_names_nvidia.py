"""NVIDIA's libraries: GEMMs, convolutions and attention, including tile, layout and dtype."""

import pytest

from stepscope.explain.kernel_names import KernelClass, decode

FLASH = "void pytorch_flash::flash_{}<pytorch_flash::Flash_{}_kernel_traits<{}, cutlass::bfloat16_t, X<1> >, {}>(x)"


@pytest.mark.parametrize(
    ("name", "short", "architecture", "dtype", "tile", "stages", "layout", "tensor_cores"),
    [
        ("ampere_sgemm_128x64_tn", "sgemm 128×64 tn (cuBLAS)", "sm_80", "fp32", (128, 64), None, "tn", False),
        ("volta_sgemm_64x32_sliced1x4_nn", "sgemm 64×32 nn (cuBLAS)", "sm_70", "fp32", (64, 32), None, "nn", False),
        ("ampere_dgemm_64x64_nt", "dgemm 64×64 nt (cuBLAS)", "sm_80", "fp64", (64, 64), None, "nt", False),
        (
            "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
            "bf16 GEMM 128×64 tn (cuBLAS)",
            "sm_80",
            "bf16",
            (128, 64, 64),
            4,
            "tn",
            True,
        ),
        (
            "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
            "fp16 GEMM 128×128 tn (cuBLAS)",
            "sm_75",
            "fp16",
            (128, 128),
            None,
            "tn",
            True,
        ),
        (
            "turing_h1688gemm_128x128_ldg8_nn",
            "fp16 GEMM 128×128 nn (cuBLAS)",
            "sm_75",
            "fp16",
            (128, 128),
            None,
            "nn",
            True,
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_e"
            "xecute_kernel__5x_cublas",
            "fp32 GEMM 128×64 tn (cuBLAS)",
            "sm_80",
            "fp32",
            (128, 64, 8),
            3,
            "tn",
            False,
        ),
        (
            "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_execut"
            "e_kernel__5x_cublas",
            "tf32 GEMM 128×128 tn (cuBLAS)",
            "sm_80",
            "tf32",
            (128, 128, 16),
            4,
            "tn",
            True,
        ),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_o"
            "ff_kernel__5x_cublas",
            "bf16 GEMM 128×128 tn (cuBLAS)",
            "sm_90",
            "bf16",
            (128, 128, 64),
            None,
            "tn",
            True,
        ),
        (
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
            "bf16 GEMM 128×256 nn (cuBLAS nvjet)",
            None,
            "bf16",
            (128, 256, 64),
            4,
            "nn",
            True,
        ),
        (
            "nvjet_hsh_192x192_64x3_2x1_v_bz_coopB_NTN",
            "fp16 GEMM 192×192 nt (cuBLAS nvjet)",
            None,
            "fp16",
            (192, 192, 64),
            3,
            "nt",
            True,
        ),
        (
            "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT",
            "fp8 GEMM 128×256 tn (cuBLAS nvjet)",
            None,
            "fp8",
            (128, 256, 128),
            6,
            "tn",
            True,
        ),
        (
            "nvjet_sm90_tss_128x256_64x4_1x2_h_bz_coopA_TNT",
            "bf16 GEMM 128×256 tn (cuBLAS nvjet)",
            "sm_90",
            "bf16",
            (128, 256, 64),
            4,
            "tn",
            True,
        ),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(T1::Params)",
            "sgemm 128×32 nn (CUTLASS)",
            "sm_80",
            "fp32",
            (128, 32, 8),
            5,
            "nn",
            False,
        ),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(x::Params)",
            "tf32 GEMM 256×64 nt (CUTLASS)",
            "sm_80",
            "tf32",
            (256, 64, 16),
            4,
            "nt",
            True,
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_256x128_32x3_nn_align8>(x::Params)",
            "bf16 GEMM 256×128 nn (CUTLASS)",
            "sm_80",
            "bf16",
            (256, 128, 32),
            3,
            "nn",
            True,
        ),
        (
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8",
            "bf16 GEMM 32×32 tn (CUTLASS)",
            "sm_80",
            "bf16",
            (32, 32, 128),
            2,
            "tn",
            True,
        ),
        (
            "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_f32_128x128x64_2x1x1_0_tnn_align8_warpsp"
            "ecialized",
            "bf16 GEMM 128×128 tn (CUTLASS)",
            "sm_90",
            "bf16",
            (128, 128, 64),
            None,
            "tn",
            True,
        ),
    ],
)
def test_gemm_names_are_decoded(
    name: str,
    short: str,
    architecture: str | None,
    dtype: str,
    tile: tuple[int, ...],
    stages: int | None,
    layout: str,
    tensor_cores: bool,
) -> None:
    found = decode(name)
    assert found.kernel_class == "GEMM"
    assert found.operation == "GEMM"
    assert found.short == short
    assert (found.architecture, found.dtype, found.tile) == (architecture, dtype, tile)
    assert (found.stages, found.layout, found.tensor_cores) == (stages, layout, tensor_cores)
    assert not found.split_k


def test_second_kernel_of_a_split_gemm_is_a_sum() -> None:
    found = decode(
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_ffma_execute_split_k_kernel__5x_cublas"
    )
    assert found.operation == "adds up the partial results of a split GEMM"
    assert found.short == "split-K sum of fp32 GEMM 64×64 tn (cuBLAS)"


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("maxwell_sgemm_128x64_raggedMn_nn_splitK", "cuBLAS"),
        ("nvjet_sm100_tst_64x16_64x16_2x4_2cta_h_bz_splitK_TNT", "cuBLAS"),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_ffma_execute_split_k_kernel__5x_cublas",
            "cuBLAS",
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true>(x)", "cuBLASLt"),
        ("void splitKreduce_kernel<32, 16, int, float, float>(cublasSplitKParams<float>)", "cuBLAS"),
        ("Cijk_Ailk_Bljk_SB_MT128x128x16_SE_GSU4_PGR1_ISA906", "rocBLAS"),
    ],
)
def test_split_k_sum_is_recognized(name: str, library: str) -> None:
    found = decode(name)
    assert found.split_k
    assert found.kernel_class == "GEMM"
    assert found.library == library


@pytest.mark.parametrize(
    ("name", "kernel_class", "operation"),
    [
        ("void gemmSN_TN_kernel<float, 128, 16, cublasGemvTensor<float const> >(x)", "GEMM", "GEMM"),
        ("void gemv2T_kernel_val<int, int, float, float>(cublasGemvParamsEx<int>)", "GEMM", "matrix times vector"),
        ("void gemvNSP_kernel<float, float>(x)", "GEMM", "matrix times vector"),
        (
            "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, __nv_bfloat16>(x)",
            "GEMM",
            "matrix times vector",
        ),
        ("void dot_kernel<float, 128, 0, cublasDotParams<float> >(x)", "reduction", "dot product"),
        ("void reduce_1Block_kernel<float, 128, 7, cublasGemvTensor<float> >(x)", "reduction", "dot product"),
        ("nvjet_something_new", "GEMM", "GEMM"),
        (
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>, cutlass::bfloat"
            "16_t> >(x)",
            "GEMM",
            "GEMM",
        ),
        (
            "void cutlass::Kernel<cutlass::gemm::kernel::GemmGrouped<cutlass::half_t> >(x)",
            "GEMM",
            "grouped GEMM",
        ),
        ("Kernel2", "other", "CUTLASS kernel, short name"),
    ],
)
def test_small_and_templated_gemms_are_recognized(name: str, kernel_class: KernelClass, operation: str) -> None:
    found = decode(name)
    assert (found.kernel_class, found.operation) == (kernel_class, operation)


def test_undocumented_codes_are_marked() -> None:
    meanings = {piece.text: piece.meaning for piece in decode("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT").parts}
    assert "not documented" in meanings["nvjet"]
    assert meanings["h"] == meanings["bz"] == "not documented"
    meanings = {piece.text: piece.meaning for piece in decode("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn").parts}
    assert meanings["f2f"] == "undocumented"


@pytest.mark.parametrize(
    ("name", "direction", "dtype", "tensor_cores"),
    [
        (
            "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_"
            "warpsize2x2x1_g1_tensor16x8x8_execute_kernel_cudnn_infer",
            "forward",
            "tf32",
            True,
        ),
        (
            "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64x64_tensor16x"
            "8x8_execute_kernel_cudnn",
            "backward",
            "tf32",
            True,
        ),
        (
            "void cutlass_cudnn_infer::Kernel<cutlass_tensorop_s1688dgrad_optimized_tf32_64x128_32x3_nhwc_align4>(x)",
            "backward",
            "tf32",
            True,
        ),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16_256x64_32x4_nhwc_a"
            "lign8>(x)",
            "forward",
            "bf16",
            True,
        ),
        ("cudnn_infer_volta_scudnn_128x64_relu_xregs_large_nn_v1", None, "fp32", False),
        ("cudnn_infer_volta_scudnn_128x64_3dconv_fprop_medium_nn_v1", "forward", "fp32", False),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", "backward", "fp32", None),
        ("void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int)", "backward", "fp32", None),
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(x)", "forward", "fp32", None),
        ("void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false>(x)", None, "fp32", None),
        ("void cask_cudnn_infer::computeOffsetsKernel<false, false>(x)", None, None, None),
        (
            "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS_4gemm9GemmShapeILi128E"
            "Li128ELi32EEENS4_52Conv2dWgradOutputGradientTileAccessIteratorOptimizedINS_10tfloat32_tE",
            "backward",
            "tf32",
            None,
        ),
    ],
)
def test_convolutions_have_a_direction(
    name: str, direction: str | None, dtype: str | None, tensor_cores: bool | None
) -> None:
    found = decode(name)
    assert (found.kernel_class, found.library) == ("convolution", "cuDNN")
    assert (found.direction, found.dtype, found.tensor_cores) == (direction, dtype, tensor_cores)


@pytest.mark.parametrize(
    ("name", "kernel_class"),
    [
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(x)", "copy"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 128, true, 1, true>(x)", "norm"),
        ("void cudnn::ops::pooling_fw_4d_kernel<float, float>(x)", "reduction"),
        ("void cudnn::ops::scalePackedTensor_kernel<float, float>(long, float*, float)", "elementwise"),
    ],
)
def test_helpers_of_a_convolution_are_not_convolutions(name: str, kernel_class: KernelClass) -> None:
    assert decode(name).kernel_class == kernel_class


@pytest.mark.parametrize(
    ("name", "library", "short", "direction"),
    [
        (
            "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
            "CUTLASS",
            "mem-efficient attention fwd 64×64",
            "forward",
        ),
        (
            "fmha_cutlassB_f16_aligned_64x64_k64_dropout_sm80(x)",
            "CUTLASS",
            "mem-efficient attention bwd 64×64",
            "backward",
        ),
        (
            FLASH.format("fwd_kernel", "fwd", "128, 128, 64, 4, false, false", "false, true, false"),
            "FlashAttention",
            "flash attention fwd hd128",
            "forward",
        ),
        (
            FLASH.format("fwd_splitkv_kernel", "fwd", "64, 64, 256, 4, false, false", "true, false"),
            "FlashAttention",
            "flash attention fwd split-KV hd64",
            "forward",
        ),
        (
            FLASH.format(
                "bwd_dq_dk_dv_loop_seqk_parallel_kernel", "bwd", "64, 128, 128, 8, 4, 4, 4, false, false", "false, true"
            ),
            "FlashAttention",
            "flash attention bwd hd64",
            "backward",
        ),
        (
            FLASH.format("bwd_dot_do_o_kernel", "bwd", "64, 128, 128, 8, 4, 4, 4, false, false", "true"),
            "FlashAttention",
            "flash attention bwd dO·O hd64",
            "backward",
        ),
        (
            FLASH.format("bwd_convert_dq_kernel", "bwd", "64, 128, 128, 8, 4, 4, 4, false, false", "true"),
            "FlashAttention",
            "flash attention bwd convert dQ hd64",
            "backward",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::X<cutlass::"
            "bfloat16_t> > > >(x)",
            "FlashAttention",
            "flash attention 3 fwd",
            "forward",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnBwdSm90<flash::X> > >(x)",
            "FlashAttention",
            "flash attention 3 bwd",
            "backward",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
            "cuDNN",
            "cuDNN attention fwd 64×128",
            "forward",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_4x1x1_kernel0_0",
            "cuDNN",
            "cuDNN attention bwd 64×64",
            "backward",
        ),
        (
            "void vllm::paged_attention_v1_kernel<unsigned short, 128, 16>(x)",
            "vLLM",
            "paged attention (vLLM)",
            "forward",
        ),
        ("kernel_unified_attention_2d", "vLLM", "paged attention (vLLM)", "forward"),
        (
            "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::X> >(y)",
            "CK",
            "attention forward (CK)",
            "forward",
        ),
        (
            "void ck_tile::kentry<256, 2, ck_tile::FmhaBwdDQDKDVKernel<ck_tile::X> >(y)",
            "CK",
            "attention backward (CK)",
            "backward",
        ),
        ("_attn_fwd", "Triton", "attention forward (Triton)", "forward"),
        ("attention_forward", "stepscope", "attention forward (stepscope)", "forward"),
        ("attention_backward_keys", "stepscope", "attention backward, dK and dV (stepscope)", "backward"),
        ("attention_hopper_forward", "stepscope", "attention forward (stepscope)", "forward"),
        ("attention_hopper_local_forward", "stepscope", "attention forward (stepscope)", "forward"),
        ("attention_hopper_backward", "stepscope", "attention backward (stepscope)", "backward"),
        ("attention_hopper_finish", "stepscope", "convert the attention's dQ (stepscope)", "backward"),
        ("_attn_bwd_dkdv", "Triton", "attention backward (Triton)", "backward"),
    ],
)
def test_fused_attention_has_a_direction(name: str, library: str, short: str, direction: str) -> None:
    found = decode(name)
    assert found.kernel_class == "attention"
    assert (found.library, found.short, found.direction) == (library, short, direction)


@pytest.mark.parametrize("mangled", [False, True])
def test_flash_attention_says_whether_it_is_causal(mangled: bool) -> None:
    name = FLASH.format("fwd_kernel", "fwd", "128, 128, 64, 4, false, false", "false, true, false")
    if mangled:
        name = (
            "_ZN13pytorch_flash16flash_fwd_kernelINS_23Flash_fwd_kernel_traitsILi128ELi128ELi64ELi4ELb0ELb0EN7cutlass"
            "10bfloat16_tENS_19Flash_kernel_traitsILi128ELi128ELi64ELi4ES3_EEEELb0ELb1ELb0ELb0ELb1ELb1ELb0ELb0EEEvv"
        )
    found = decode(name)
    assert found.dtype == "bf16"
    assert found.tile == (128, 64)
    meanings = [piece.meaning for piece in found.parts]
    assert "head dimension 128" in meanings
    assert "dropout of attention weights: no" in meanings
    assert "causal: yes, the upper half is skipped" in meanings
