import pytest

from stepscope.recover.families.elementwise import ANY_SIZE, result_sizes
from tests.unit.recover.families.launches import AT, inner_lambda

HALF = "c10::Half"


@pytest.mark.parametrize(
    ("functor", "sizes"),
    [
        (f"{AT}CUDAFunctor_add<float>", (4,)),
        (f"{AT}CUDAFunctorOnSelf_add<long>", (8,)),
        (f"{AT}FillFunctor<unsigned char>", (1,)),
        (f"{AT}AUnaryFunctor<long, long, bool, {AT}CompareEqFunctor<long> >", (1,)),
        (f"{AT}(anonymous namespace)::CompareFunctor<long>", (1,)),
        (f"{AT}BinaryFunctor<{HALF}, {HALF}, {HALF}, {AT}binary_internal::MulFunctor<float> >", (2,)),
        (f"{AT}bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda(float)#1}}", (2,)),
        (inner_lambda("(anonymous namespace)::isneginf_kernel_impl", "float"), (1,)),
        (inner_lambda("(anonymous namespace)::where_kernel_impl", "bool, float, float"), (4,)),
        (inner_lambda("(anonymous namespace)::masked_fill_kernel", "c10::BFloat16, bool"), (2,)),
        (inner_lambda("direct_copy_kernel_cuda", "bool"), (1,)),
        (inner_lambda("tanh_backward_kernel_cuda", "double, double"), (8,)),
        ("native::<unnamed>::silu_kernel(at::TensorIteratorBase &)::[lambda(c10::Half) (instance 1)]", (2,)),
        ("void native::<unnamed>::pow_tensor_scalar_kernel_impl<float, float>(T2)::[lambda(float) (instance 2)]", (4,)),
        (inner_lambda("unheard_of_kernel", "float"), ANY_SIZE),
        (inner_lambda("direct_copy_kernel_cuda", "unheard_of"), ANY_SIZE),
        (f"{AT}CUDAFunctor_add<T>", ANY_SIZE),
        ("", ANY_SIZE),
    ],
)
def test_the_size_of_a_result(functor: str, sizes: tuple[int, ...]) -> None:
    assert result_sizes(functor, is_cast=False) == sizes
    assert result_sizes(functor, is_cast=True) == ANY_SIZE
