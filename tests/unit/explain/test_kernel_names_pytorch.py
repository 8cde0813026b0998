"""PyTorch's own kernels and those of torch.compile: class, operation, direction, casts and fused operations."""

import pytest

from stepscope.explain.kernel_names import KernelClass, decode
from stepscope.explain.trace.attribution.names import classify_operator

LAMBDA = "{lambda()#1}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}"
VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, at::native::%s, std::array<char*, 2ul> >(int)"
NSIGHT = (
    "void at::native::vectorized_elementwise_kernel<(int)4, at::native::%s,"
    " std::array<char *, (unsigned long)2>>(int, T2, T3)"
)
STRIDED = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_imp"
    "l_nocast<at::native::%s>(x)::{lambda(int)#1}>(int)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::"
    "native::TensorListMetadata<2>, at::native::%s>(x)"
)
ANONYMOUS = "void at::native::(anonymous namespace)::%s(x)"


@pytest.mark.parametrize(
    ("functor", "operation", "kernel_class"),
    [
        ("CUDAFunctor_add<float>", "add", "elementwise"),
        ("CUDAFunctorOnSelf_add<float>", "add a number", "elementwise"),
        (
            "AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >",
            "multiply",
            "elementwise",
        ),
        (
            "BUnaryFunctor<float, float, float, at::native::binary_internal::DivFunctor<float> >",
            "divide",
            "elementwise",
        ),
        (
            "BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >",
            "multiply",
            "elementwise",
        ),
        ("FillFunctor<float>", "fill", "elementwise"),
        (f"exp_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", "exponential", "elementwise"),
        (f"rsqrt_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", "rsqrt", "elementwise"),
        (f"(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>(x)::{LAMBDA}", "power", "elementwise"),
        (f"(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{LAMBDA}", "SiLU", "elementwise"),
        (f"GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{LAMBDA}", "GELU", "elementwise"),
        (f"sigmoid_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", "sigmoid", "elementwise"),
        (f"(anonymous namespace)::where_kernel_impl(at::TensorIterator&)::{LAMBDA}", "where", "elementwise"),
        (f"(anonymous namespace)::masked_fill_kernel(at::TensorIterator&)::{LAMBDA}", "masked fill", "elementwise"),
        (f"(anonymous namespace)::launch_clamp_scalar(x)::{LAMBDA}", "clamp (also ReLU)", "elementwise"),
        (f"mse_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", "squared error", "loss"),
        (f"(anonymous namespace)::masked_scale_kernel<bool, float, float>(x)::{LAMBDA}", "dropout backward", "random"),
    ],
)
@pytest.mark.parametrize("shell", [VECTORIZED, NSIGHT, STRIDED])
def test_functor_determines_the_operation(shell: str, functor: str, operation: str, kernel_class: KernelClass) -> None:
    found = decode(shell % functor)
    assert (found.library, found.kernel_class, found.operation) == ("ATen", kernel_class, operation)
    assert found.dtype == "fp32"
    assert ("vectorized ×4" in found.short) == (shell is not STRIDED)
    assert not found.is_cast


@pytest.mark.parametrize(
    ("name", "is_cast", "operation"),
    [
        (VECTORIZED % "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}", True, "cast to bf16"),
        (STRIDED % f"direct_copy_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", False, "copy between layouts"),
        (STRIDED.replace("_nocast", "") % f"direct_copy_kernel_cuda(at::TensorIteratorBase&)::{LAMBDA}", True, "cast"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(x)::{lambda(float)#1}, "
            "std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, un"
            "signed int>, "
            "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(x)",
            True,
            "cast",
        ),
        (
            "_ZN2at6native27unrolled_elementwise_kernelIZZZNS0_23direct_copy_kernel_cudaERNS_18TensorIteratorBa"
            "seEENKUlvE1_"
            "clEvENKUlvE5_clEvEUlfE_St5arrayIPcLm2EELi4E23TrivialOffsetCalculatorILi1EjESB_NS0_6memory12LoadWit"
            "hCastILi1EEE"
            "NSC_13StoreWithCastILi1EEEEEviT_T0_T2_T3_T4_T5_",
            True,
            "cast",
        ),
        (
            FOREACH % "CopyFunctor<c10::BFloat16, float, 2, 1, 1>, at::native::Copy<c10::BFloat16, float>",
            True,
            "cast many tensors",
        ),
        (FOREACH % "CopyFunctor<float, float, 2, 1, 1>, at::native::Copy<float, float>", False, "copy many tensors"),
        (
            ANONYMOUS % "CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>, unsigned int, 3, 128, 1>",
            False,
            "concatenate",
        ),
        ("triton_poi_fused__to_copy_1", True, "cast"),
        ("triton_poi_fused_clone_transpose_4", False, "copy between layouts"),
    ],
)
def test_casts_are_distinguished_from_copies(name: str, is_cast: bool, operation: str) -> None:
    found = decode(name)
    assert found.kernel_class == "copy"
    assert (found.is_cast, found.operation) == (is_cast, operation)


@pytest.mark.parametrize(
    ("mangled", "short"),
    [
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_",
            "add fp32, vectorized ×4",
        ),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi2ENS0_11FillFunctorIlEESt5arrayIPcLm1EEEEviT0_T1_",
            "fill int64, vectorized ×2",
        ),
        (
            "_ZN43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi6ELb0ELb0EEEvPT0_PKT_iiiPKbib",
            "softmax fwd fp32",
        ),
        (
            "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_7MeanOpsIffffEEjfLi4ELi4EEEEEvT1_",
            "reduce, mean fp32",
        ),
    ],
)
def test_mangled_name_decodes_alike(mangled: str, short: str) -> None:
    assert decode(mangled).short == short


@pytest.mark.parametrize(
    ("name", "kernel_class", "direction"),
    [
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(x)",
            "softmax",
            "forward",
        ),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(x)",
            "loss",
            "forward",
        ),
        (
            "void <unnamed>::softmax_warp_forward<float, float, float, (int)6, (bool)1, (bool)0>(T2 *)",
            "loss",
            "forward",
        ),
        (
            "void (anonymous namespace)::softmax_warp_backward<float, float, float, 10, true, false>(x)",
            "loss",
            "backward",
        ),
        (
            ANONYMOUS % "cunn_SoftMaxForward<8, float, float, float, at::native::SoftMaxForwardEpilogue>",
            "softmax",
            "forward",
        ),
        (
            ANONYMOUS % "cunn_SoftMaxForwardSmem<8, float, float, float, at::native::LogSoftMaxForwardEpilogue>",
            "loss",
            "forward",
        ),
        (
            ANONYMOUS % "cunn_SoftMaxBackward<4, float, float, float, at::native::SoftMaxBackwardEpilogue>",
            "softmax",
            "backward",
        ),
        (ANONYMOUS % "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>", "loss", "forward"),
        (ANONYMOUS % "nll_loss_backward_reduce_cuda_kernel_2d<float, long>", "loss", "backward"),
        (ANONYMOUS % "vectorized_layer_norm_kernel<float, float>", "norm", "forward"),
        ("void at::<unnamed>::vectorized_layer_norm_kernel<float, float, 0>(int)", "norm", "forward"),
        (ANONYMOUS % "layer_norm_grad_input_kernel_vectorized<float, float>", "norm", "backward"),
        (ANONYMOUS % "GammaBetaBackwardCUDAKernel_32x32<float, float>", "norm", "backward"),
        (ANONYMOUS % "RowwiseMomentsCUDAKernel<float>", "norm", "forward"),
        ("void at::native::batch_norm_backward_kernel<float, float, float, int>(x)", "norm", "backward"),
        ("void at::native::batch_norm_collect_statistics_kernel<at::native::Var, float>(x)", "norm", "forward"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*)", "index", None),
        (ANONYMOUS % "indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>", "index", None),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<x>(y)>(long)", "index", None),
        ("void at::native::_scatter_gather_elementwise_kernel<128, 8, x>(int)", "index", None),
        (ANONYMOUS % "indexing_backward_kernel_stride_1<float, 4>", "index", "backward"),
        (ANONYMOUS % "embedding_backward_feature_kernel<float, float, long>", "embedding", "backward"),
        (ANONYMOUS % "compute_grad_weight<float, long>", "embedding", "backward"),
        (ANONYMOUS % "sum_and_scatter<float, long>", "embedding", "backward"),
        (ANONYMOUS % "fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>", "random", None),
        (ANONYMOUS % "distribution_elementwise_grid_stride_kernel<float, 4, x>", "random", None),
        (ANONYMOUS % "tensor_kernel_scan_innermost_dim<float, std::plus<float> >", "reduction", None),
        ("void at_cuda_detail::cub::DeviceScanKernel<x>(y)", "reduction", None),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<x>(y)", "sort", None),
        ("void at::cuda::detail::cub::DeviceSelectSweepKernel<x>(y)", "index", None),
        ("void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(x)", "index", None),
        ("void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, float>(x)", "index", None),
        (ANONYMOUS % "populate_cublas_grouped_args_kernel", "index", None),
        ("void at::cuda::kernelHistogram1D<int, int, long, 1, 2, -1, x>(y)", "reduction", None),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(x)", "sort", None),
        ("void at::native::bitonicSortKVInPlace<2, -1, 16, 16, long, long>(x)", "sort", None),
        ("void at::native::triu_tril_kernel<float, int, true, 2, true>(x)", "elementwise", None),
        (ANONYMOUS % "upsample_bilinear2d_out_frame<float, float>", "elementwise", None),
        (ANONYMOUS % "max_pool_backward_nchw<float, float>", "reduction", "backward"),
        (ANONYMOUS % "adaptive_average_pool<float>", "reduction", None),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float>, "
            "int>>(x)",
            "reduction",
            None,
        ),
        (
            "void <unnamed>::elementwise_kernel_with_index<int, at::native::arange_cuda_out(x)::[lambda(long) ("
            "instance 1)]>(T1)",
            "elementwise",
            None,
        ),
        (
            "void at::native::amp_update_scale_cuda_kernel(float*, int*, float const*, double, double, int)",
            "optimizer",
            None,
        ),
        ("vectorized_elementwise_kernel", "elementwise", None),
        ("reduce_kernel", "reduction", None),
        ("CatArrayBatchedCopy_vectorized", "copy", None),
    ],
)
def test_named_kernels_have_their_class(name: str, kernel_class: KernelClass, direction: str | None) -> None:
    found = decode(name)
    assert (found.kernel_class, found.direction) == (kernel_class, direction)
    assert found.library in ("ATen", "CUB")


@pytest.mark.parametrize(
    ("functor", "operation"),
    [
        ("FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>, float const*, double", "Adam update"),
        ("FusedSgdMathFunctor<float, 3>", "SGD update"),
        ("LpNormFunctor<float, (at::native::NormType)1, float, 1, 1, 0>", "norms of many tensors (gradient clipping)"),
        (
            "TernaryOpScalarFunctor<float, 2, 2, 0>, at::native::LerpFunctor<float>",
            "interpolate many tensors (foreach lerp)",
        ),
        (
            "PointwiseOpScalarFunctor<float, 3, 3, 0>, std::divides<float>",
            "addcmul or addcdiv of many tensors (foreach)",
        ),
        (
            "BinaryOpListAlphaFunctor<float, 2, 2, 0>, std::plus<float>, float",
            "binary operation on many tensors (foreach)",
        ),
    ],
)
def test_foreach_kernels_are_the_optimizer(functor: str, operation: str) -> None:
    found = decode(FOREACH % functor)
    assert (found.kernel_class, found.operation, found.dtype) == ("optimizer", operation, "fp32")


@pytest.mark.parametrize(
    ("name", "kernel_class", "fused"),
    [
        ("triton_poi_fused_add_mul_0", "elementwise", ("add", "mul")),
        ("triton_red_fused__softmax_add_3", "softmax", ("_softmax", "add")),
        ("triton_per_fused__to_copy_mean_pow_rsqrt_3", "norm", ("_to_copy", "mean", "pow", "rsqrt")),
        (
            "triton_red_fused__to_copy_add_embedding_mean_pow_rsqrt_0",
            "norm",
            ("_to_copy", "add", "embedding", "mean", "pow", "rsqrt"),
        ),
        (
            "triton_red_fused__to_copy_copy__fused_add_rms_norm_moe_forward_shared_3",
            "norm",
            ("_to_copy", "copy_", "fused_add_rms_norm", "moe_forward_shared"),
        ),
        ("triton_poi_fused_add_embedding_0", "embedding", ("add", "embedding")),
        ("triton_per_fused_add_native_layer_norm_2", "norm", ("add", "native_layer_norm")),
        ("triton_red_fused__log_softmax_nll_loss_forward_9", "loss", ("_log_softmax", "nll_loss_forward")),
        ("triton_red_fused__log_softmax_addmm_9", "loss", ("_log_softmax", "addmm")),
        ("triton_tem_fused_addmm_relu_4", "GEMM", ("addmm", "relu")),
        ("triton_poi_fused_addmm_gelu_8", "elementwise", ("addmm", "gelu")),
        ("triton_tem_fused_flex_attention_backward_3", "attention", ("flex_attention_backward",)),
        ("triton_tem_fused_convolution_1", "convolution", ("convolution",)),
        ("triton_poi_fused_embedding_dense_backward_0", "embedding", ("embedding_dense_backward",)),
        ("triton_poi_fused_native_dropout_2", "random", ("native_dropout",)),
        ("triton_poi_fused_index_view_2", "index", ("index", "view")),
        ("triton_poi_fused_add_addcdiv_mul_sqrt_5", "optimizer", ("add", "addcdiv", "mul", "sqrt")),
        ("triton_for_fused_0", "optimizer", ()),
        ("triton_red_fused_sum_11", "reduction", ("sum",)),
        ("triton_poi_fused_constant_pad_nd_moe_forward_0", "copy", ("constant_pad_nd", "moe_forward")),
        ("triton_poi_fused_0", "elementwise", ()),
        ("triton_mm", "GEMM", ()),
        ("triton_flex_attention", "attention", ()),
    ],
)
def test_compiled_kernels_get_their_most_specific_class(
    name: str, kernel_class: KernelClass, fused: tuple[str, ...]
) -> None:
    found = decode(name)
    assert found.library == "Inductor"
    assert (found.kernel_class, found.fused) == (kernel_class, fused)


def test_compiled_backward_is_recognized() -> None:
    assert decode("triton_per_fused__softmax_backward_data_5").direction == "backward"
    assert decode("triton_poi_fused_add_mul_0").direction is None


@pytest.mark.parametrize("scope", ["at::native", "native", "at"])
def test_nsight_compute_shortens_the_namespace(scope: str) -> None:
    found = decode(f"void {scope}::vectorized_elementwise_kernel<8, {scope}::CUDAFunctor_add<c10::Half>, x>(int)")
    assert (found.library, found.operation, found.dtype) == ("ATen", "add", "fp16")


@pytest.mark.parametrize(
    ("operator", "kernel_class"),
    [
        ("aten::mkldnn_rnn_layer", "GEMM"),
        ("aten::mkldnn_rnn_layer_backward", "GEMM"),
        ("aten::_cudnn_rnn", "GEMM"),
        ("aten::lstm", "GEMM"),
        ("aten::rnn_tanh.input", "GEMM"),
        ("aten::_thnn_fused_lstm_cell", "elementwise"),  # its two GEMMs are operators of their own
        ("aten::tanh", "elementwise"),
    ],
)
def test_recurrent_layers_on_a_cpu_are_gemms(operator: str, kernel_class: str) -> None:
    assert classify_operator(operator) == kernel_class
