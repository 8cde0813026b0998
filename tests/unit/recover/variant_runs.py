"""Synthetic runs of models that are not plain decoders: mixtures of experts, encoder-decoders, low-rank adapters.

No such model was measured. The attention half of a layer is scaled from a recorded Llama (`synthetic_runs`). What
replaces its feed-forward half, or is added to it, follows the operators that `transformers` calls, in their order, and
the kernels that PyTorch's source launches for them: names, grids, blocks and shared memory. Counters of grouped GEMMs
are those of whole tiles.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

import msgspec

from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.facts import Sighting
from tests.unit.recover.families.launches import (
    ADD_BF16,
    AT,
    inner_lambda,
    seen,
    strided,
    vectorized,
)
from tests.unit.recover.families.test_lookups import LOOKUP
from tests.unit.recover.families.test_reductions import SUM
from tests.unit.recover.families.test_softmax import WARP
from tests.unit.recover.synthetic_runs import Change, Model, collect, launch_parts, multiply

LLAMA = "llama_bf16.csv.gz"
_FEED_FORWARD = ("gate", "up", "inner", "down")
_MULTIPLY_BF16 = (
    f"{AT}BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, {AT}binary_internal::MulFunctor<float> >"
)
_SCALE_BF16 = f"{AT}AUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, {AT}binary_internal::MulFunctor<float> >"
_SILU = inner_lambda("(anonymous namespace)::silu_kernel", "c10::BFloat16")
_RELU = f"{AT}(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&)::{{lambda(c10::BFloat16)#1}}"
_TO_FLOAT = inner_lambda("direct_copy_kernel_cuda", "float")
_ARANGE = (
    f"void (anonymous namespace)::elementwise_kernel_with_index<int, {AT}arange_cuda_out(c10::Scalar const&)>(int)"
)
TOP_K = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::detail::TensorInfo<float>)"
_SORT_RESULTS = "void at::native::bitonicSortKVInPlace<2, -1, 16, 16, float, long, at::native::GTOp<float, true> >(x)"
_SORT = "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::DeviceRadixSortPolicy<long> >(x)"
_INDEX = f"void at::native::index_elementwise_kernel<128, 4, {AT}gpu_index_kernel<{AT}index_kernel_impl<int> > >(long)"
_INDEX_PUT = _INDEX.replace("index_kernel_impl", "index_put_kernel_impl")
_INDEX_ADD = "void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(x)"
_NONZERO = "void at_cuda_detail::cub::DeviceSelectSweepKernel<at_cuda_detail::cub::DeviceSelectPolicy<long> >(x)"
HISTOGRAM = "void at::cuda::kernelHistogram1D<int, int, long, 1, 2, -1, (at::cuda::CUDAHistogramMemoryType)0>(x)"
_SCAN = "void at_cuda_detail::cub::DeviceScanKernel<at_cuda_detail::cub::DeviceScanPolicy<int> >(x)"
PREPARE = (
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::bfloat16_t, "
    "float, cute::tuple<int, int, int> >(cutlass::bfloat16_t*)"
)
GROUPED = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
    "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, cutlass::gemm::collective::CollectiveMma<"
    "cutlass::gemm::MainloopSm90ArrayTmaGmmaWarpSpecialized<4, cute::tuple<cute::C<2>, cute::C<1>, cute::C<1> >, "
    "cutlass::gemm::KernelPtrArrayTmaWarpSpecialized{schedule}>, cute::tuple<cute::C<{rows}>, cute::C<{columns}>, "
    "cute::C<{inner}> >, cutlass::bfloat16_t, cute::tuple<long, cute::C<1>, cute::C<0> >*> > > >(x)"
)
_ROUTER = "nvjet_sm90_tst_64x64_64x13_4x2_h_bz_TNT"
_SMALL = "nvjet_sm90_tst_64x48_64x15_2x4_h_bz_TNT"
_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`d_ff` is the width of one expert, `shared` that of a dense feed-forward layer next to them."""

    num_experts: int
    per_token: int
    d_ff: int
    shared: int = 0
    is_grouped: bool = True  # one grouped GEMM for all experts; otherwise a loop over the experts


def mixture(
    model: Model, experts: Experts, *, seed: int = 0, counted: bool = True, dense_layers: int = 0
) -> KernelEvidence:
    """Return a forward pass. The first `dense_layers` have no experts."""
    choice = random.Random(seed)
    layer = 0

    def change(role: str, made: list[Sighting]) -> Iterable[Sighting]:
        nonlocal layer
        layer += role == "query"
        if role not in _FEED_FORWARD or layer <= dense_layers:
            return made
        return [*route(model, experts, choice), *share(model, experts, made[0])] if role == "gate" else []

    return collect(
        launch_parts(model, LLAMA, ("before", "layers", "final", "head"), seed=seed, change=change), counted=counted
    )


def route(model: Model, experts: Experts, choice: random.Random) -> Iterator[Sighting]:
    """Yield the kernels from the router to the sum of the experts' results."""
    tokens, number, pairs = model.tokens, experts.num_experts, model.tokens * experts.per_token
    yield multiply(_ROUTER, tokens, number, model.d_model)
    yield elements(strided(_TO_FLOAT, 4), tokens * number, 4, 512)
    yield _soften(tokens, number)
    yield seen(TOP_K, (tokens,), (min(1024, ceil(number / 32) * 32),), stored=12 * pairs)
    yield seen(_SORT_RESULTS, (ceil(tokens / 16),), (16, 16), stored=12 * pairs)
    yield from _sum_rows(tokens, experts.per_token, "float", 4)
    yield elements(strided(_MULTIPLY_BF16.replace("c10::BFloat16", "float"), 2), pairs, 4, 256)
    sizes = _deal(pairs, number, choice)
    yield from _run_grouped(model, experts, sizes) if experts.is_grouped else _run_loop(model, experts, sizes)


def _run_grouped(model: Model, experts: Experts, sizes: list[int]) -> Iterator[Sighting]:
    tokens, width, pairs = model.tokens, model.d_model, sum(sizes)
    yield seen(_SORT, (ceil(pairs / 2048),), (256,), stored=16 * pairs)
    yield elements(vectorized(f"{AT}BUnaryFunctor<long, long, long, {AT}x>", 2, 2), pairs, 8, 1024)
    yield _gather(pairs, width)
    yield elements(_INDEX, pairs, 4, 512)
    yield elements(strided(inner_lambda("direct_copy_kernel_cuda", "int"), 4), pairs, 4, 512)
    yield seen(HISTOGRAM, (ceil(pairs / 512),), (512,), stored=0, shared=4 * experts.num_experts + 8)
    yield seen(_SCAN, (1,), (128,), stored=4 * experts.num_experts)
    yield _prepare(experts)
    yield multiply_grouped(sizes, 2 * experts.d_ff, width)
    yield elements(strided(_SILU, 4), pairs * experts.d_ff, 2, 512)
    yield elements(strided(_MULTIPLY_BF16, 4), pairs * experts.d_ff, 2, 512)
    yield _prepare(experts)
    yield multiply_grouped(sizes, width, experts.d_ff)
    yield elements(strided(_MULTIPLY_BF16, 4), pairs * width, 2, 512)
    yield elements(_ARANGE, pairs, 8, 64, threads=64)
    yield elements(_INDEX_PUT, pairs, 8, 512)
    yield _gather(pairs, width)
    yield from _sum_rows(tokens * width, experts.per_token, "c10::BFloat16", 2)


def _run_loop(model: Model, experts: Experts, sizes: list[int]) -> Iterator[Sighting]:
    width = model.d_model
    yield elements(vectorized(f"{AT}FillFunctor<c10::BFloat16>", 8, 1), model.tokens * width, 2, 1024)
    for rows in filter(None, sizes):
        yield seen(_NONZERO, (ceil(model.tokens * experts.per_token / 2048),), (256,), stored=16 * rows)
        yield _gather(rows, width)
        yield multiply(_SMALL, rows, 2 * experts.d_ff, width)
        yield elements(strided(_SILU, 4), rows * experts.d_ff, 2, 512)
        yield elements(strided(_MULTIPLY_BF16, 4), rows * experts.d_ff, 2, 512)
        yield multiply(_SMALL, rows, width, experts.d_ff)
        yield elements(_INDEX, rows, 4, 512)
        yield elements(strided(_MULTIPLY_BF16, 4), rows * width, 2, 512)
        yield seen(_INDEX_ADD, (min(ceil(rows * width / 128), 8 * _SMS),), (128,), stored=0)


def share(model: Model, experts: Experts, like: Sighting) -> Iterator[Sighting]:
    """Yield the kernels of a dense feed-forward layer next to the experts, and the sum with their results."""
    if not experts.shared:
        return
    tokens, width, inner = model.tokens, model.d_model, experts.shared
    yield multiply(like.name.name, tokens, inner, width)
    yield elements(vectorized(_SILU, 8, 2), tokens * inner, 2, 1024)
    yield multiply(like.name.name, tokens, inner, width)
    yield elements(vectorized(_MULTIPLY_BF16, 8), tokens * inner, 2, 1024)
    yield multiply(_SMALL, tokens, width, inner)
    yield elements(vectorized(ADD_BF16, 8), tokens * width, 2, 1024)


def _deal(pairs: int, number: int, choice: random.Random) -> list[int]:
    """Return how many rows each expert gets."""
    cuts = sorted(choice.randint(0, pairs) for _ in range(number - 1))
    return [after - before for before, after in zip([0, *cuts], [*cuts, pairs], strict=True)]


def _prepare(experts: Experts) -> Sighting:
    return seen(PREPARE, (1,), (experts.num_experts,), stored=72 * experts.num_experts)


def multiply_grouped(sizes: list[int], columns: int, inner: int) -> Sighting:
    small = sum(sizes) // len(sizes) <= 128 or columns <= 128
    rows, across, deep = (64, 128, 128) if small else (128, 256, 64)
    name = GROUPED.format(schedule="Pingpong" if small else "Cooperative", rows=rows, columns=across, inner=deep)
    tiles = sum(ceil(size / rows) for size in sizes) * ceil(columns / across)
    operations = 2 * tiles * rows * across * ceil(inner / deep) * deep
    made = seen(name, (2, _SMS // 2), (384,))
    return msgspec.structs.replace(made, counters={"tensor_ops": operations, "store_bytes": 0})


def _soften(rows: int, width: int) -> Sighting:
    log = (width - 1).bit_length()
    lanes = min(32, 2**log)
    warps = 128 // lanes
    per_block = warps * (2 if log <= 7 else 1)
    name = WARP.format(way="forward", kind="float", log=log)
    return seen(name, (ceil(rows / per_block),), (lanes, warps), stored=4 * rows * width)


def _gather(rows: int, width: int) -> Sighting:
    threads = ceil(width * 2 / 16 / 32) * 32
    return seen(LOOKUP, (rows, ceil(threads / 256)), (min(256, threads),), stored=rows * width * 2)


def _sum_rows(results: int, width: int, kind: str, size: int) -> Iterator[Sighting]:
    """Each thread adds up a few elements; the results are divided over blocks of 128 threads."""
    name = SUM.format(threads=128 if size == 2 else 512, each=4 if size == 2 else 1, kind=kind, vector=4)
    if width > 1:
        yield seen(name, (ceil(results / 512),), (128, 1), stored=results * size, shared=16)


def elements(name: str, count: int, size: int, per_block: int, *, threads: int = 128) -> Sighting:
    return seen(name, (ceil(count / per_block),), (threads,), stored=count * size)


# --- Low-rank adapters


def adapted(model: Model, rank: int, roles: Iterable[str], *, seed: int = 0, counted: bool = True) -> KernelEvidence:
    """Return a forward pass in which the projections of these roles have an adapter."""
    widths = {"query": model.query_width, "key": model.key_width, "value": model.key_width, "output": model.d_model}
    widths |= {"gate": model.d_ff, "up": model.d_ff, "down": model.d_model}
    inputs = {"output": model.query_width, "down": model.d_ff}
    chosen = frozenset(roles)

    def change(role: str, made: list[Sighting]) -> Iterable[Sighting]:
        yield from made
        if role in chosen:
            yield multiply(_ROUTER, model.tokens, rank, inputs.get(role, model.d_model))
            yield multiply(_SMALL, model.tokens, widths[role], rank)
            count = model.tokens * widths[role]
            yield elements(vectorized(_SCALE_BF16, 8, 2), count, 2, 1024)
            yield elements(vectorized(ADD_BF16, 8), count, 2, 1024)

    names = ("before", "layers", "final", "head")
    return collect(launch_parts(model, LLAMA, names, seed=seed, change=change), counted=counted)


# --- Encoders with decoders


def encoder_decoder(
    model: Model, *, decoder_layers: int, decoder_context: int, seed: int = 0, counted: bool = True
) -> KernelEvidence:
    """Return a pass of an encoder with `model.num_layers` layers and a decoder, as T5 and BART run them."""
    encoder = launch_parts(model, LLAMA, ("before", "layers", "final"), seed=seed, change=_feed_plainly(model))
    target = replace(model, context=decoder_context)
    block: list[Sighting] = []
    for _ in range(decoder_layers):
        layer = launch_parts(target, LLAMA, ("layer",), seed=seed + 1, change=_feed_plainly(target))
        attention = launch_parts(target, LLAMA, ("attention",), seed=seed + 1)
        keys = {"key": model, "value": model}
        cross = launch_parts(target, LLAMA, ("attention",), seed=seed + 1, change=_replace_rows(keys))
        block += [*attention, *cross, *layer[len(attention) :]]
    ends = [launch_parts(target, LLAMA, names, seed=seed + 1) for names in (("before",), ("final", "head"))]
    return collect([*encoder, *ends[0], *block, *ends[1]], counted=counted)


def _feed_plainly(model: Model) -> Change:
    """Two GEMMs with a ReLU between them."""

    def change(role: str, made: list[Sighting]) -> Iterable[Sighting]:
        if role == "gate":
            return [*made, elements(vectorized(_RELU, 8, 2), model.tokens * model.d_ff, 2, 1024)]
        return [] if role in ("up", "inner") else made

    return change


def _replace_rows(models: Mapping[str, Model]) -> Change:
    """Keys and values of cross-attention are computed from the encoder's result."""

    def change(role: str, made: list[Sighting]) -> Iterable[Sighting]:
        if role in models:
            other = models[role]
            return [multiply(one.name.name, other.tokens, other.key_width, other.d_model) for one in made]
        return made

    return change
