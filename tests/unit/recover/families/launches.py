"""Recorded launches: kernel names of PyTorch 2.11 on an H200, as its profiler and as Nsight Compute spell them."""

from stepscope.explain.kernel_names import decode
from stepscope.recover.facts import Elements, Rows, Sighting
from stepscope.recover.families import Platform, read_fact

AT = "at::native::"
HIDDEN = "at::native::(anonymous namespace)::"


def seen(
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...] = (128,),
    *,
    stored: int | None = None,
    shared: int | None = None,
) -> Sighting:
    first, second = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
    return Sighting(
        index=0,
        name=decode(name),
        grid=(first[0], first[1], first[2]),
        block=(second[0], second[1], second[2]),
        shared_bytes=shared,
        counters={} if stored is None else {"store_bytes": stored},
    )


def vectorized(functor: str, width: int = 4, operands: int = 3, *, array: str = "std::array<char*, {}ul>") -> str:
    operand_array = array.format(operands)
    inner = f"{functor}, {operand_array}"
    return f"void at::native::vectorized_elementwise_kernel<{width}, {inner} >(int, {inner})"


def strided(functor: str, each: int, *, cast: bool = False) -> str:
    launcher = f"{AT}gpu_kernel_impl{'' if cast else '_nocast'}<{functor} >"
    called = f"{launcher}(at::TensorIteratorBase&, {functor} const&)::{{lambda(int)#1}}"
    return f"void at::native::elementwise_kernel<128, {each}, {called}>(int, {called})"


def inner_lambda(kernel: str, parameters: str) -> str:
    step = "::operator()() const::"
    return f"{AT}{kernel}(at::TensorIteratorBase&)::{{lambda()#2}}{step}{{lambda()#4}}{step}{{lambda({parameters})#1}}"


ADD_FLOAT = f"{AT}CUDAFunctor_add<float>"
ADD_BF16 = f"{AT}CUDAFunctor_add<c10::BFloat16>"
MULTIPLY = f"{AT}BinaryFunctor<float, float, float, {AT}binary_internal::MulFunctor<float> >"
COPY_BF16 = inner_lambda("direct_copy_kernel_cuda", "c10::BFloat16")


def read_elements(sighting: Sighting, *, recent: bool = False) -> Elements | None:
    fact = read_fact(sighting, Platform(recent=recent))
    assert fact is None or isinstance(fact, Elements)
    return fact


def read_rows(sighting: Sighting) -> Rows | None:
    fact = read_fact(sighting)
    assert fact is None or isinstance(fact, Rows)
    return fact
