"""What fused attention kernels allow, compared with problems of known sizes."""

from dataclasses import dataclass, field

import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recording.readers.counter_metrics import CounterKey
from stepscope.recover.facts import Attention, Sighting, Triple, Window, exactly
from stepscope.recover.families import Platform, read_fact
from stepscope.recover.families.grids import PROCESSORS


def read(sighting: Sighting, processors: int = PROCESSORS) -> Attention | None:
    fact = read_fact(sighting, Platform(processors=processors))
    assert fact is None or isinstance(fact, Attention)
    return fact


# batch, heads, key-value heads, queries, keys, head size, causal
Problem = tuple[int, int, int, int, int, int, bool]

EFFICIENT = "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, arch::Sm80, 1>)"
EFFICIENT_WIDE = (
    "fmha_cutlassF_f32_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float, true>::Params)"
)
EFFICIENT_BACKWARD = "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<float>)"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"
CUDNN_WIDE = CUDNN.replace("64x128x64", "64x128x128")
CUDNN_BACKWARD = "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0"
CUDNN_DOT = "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*, void*)"
CUDNN_CONVERT = "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)"
CUDNN_HEADS = "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int)"
HOPPER = "attention_hopper_forward"


def flash(head: int, queries: int, keys: int, flags: str, kernel: str = "flash_fwd_kernel", way: str = "fwd") -> str:
    """Flags as Kineto and as Nsight Compute write them."""
    traits = f"Flash_{way}_kernel_traits<{head}, {queries}, {keys}, 4, false, false, cutlass::bfloat16_t>"
    return f"void pytorch_flash::{kernel}<{traits}, {flags}>(pytorch_flash::Flash_fwd_params)"


CAUSAL = "false, true, false, false, false, false, false, false"
CAUSAL_EVEN = "0, 1, 0, 0, 1, 1, 0, 0"
PLAIN_EVEN_HEAD = "false, false, false, false, false, true, false, false"


@dataclass(frozen=True)
class Seen:
    name: str
    grid: Triple
    problem: Problem
    # What must be rejected: positions in the problem, and the values to put there.
    refused: tuple[dict[int, int], ...] = ()
    counters: dict[CounterKey, int] = field(default_factory=dict)
    threads: int = 384

    def sighting(self) -> Sighting:
        return Sighting(
            index=0, name=decode(self.name), grid=self.grid, block=(self.threads, 1, 1), counters=self.counters
        )

    def fact(self) -> Attention:
        fact = read(self.sighting())
        assert fact is not None
        return fact

    def __str__(self) -> str:
        return f"{self.name[:40]} {self.problem} {'counted' if self.counters else ''}"


BATCH, HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM, MASK = range(7)
SEEN = (
    Seen(EFFICIENT, (2, 12, 1), (1, 12, 12, 128, 128, 64, True),
         ({BATCH: 2}, {HEADS: 11}, {QUERIES: 129}, {QUERIES: 64}, {HEAD_DIM: 65})),
    Seen(EFFICIENT, (2, 12, 1), (1, 12, 12, 128, 128, 64, True),
         ({HEAD_DIM: 56}, {MASK: False}, {KEYS: 65, QUERIES: 65}),
         {"fadd": 2_427_133, "fmul": 543_997, "ffma": 49_152, "tensor_ops": 113_246_208, "store_bytes": 393_216}),
    Seen(EFFICIENT, (8, 16, 2), (2, 16, 16, 512, 512, 64, True), ({HEAD_DIM: 32}, {KEYS: 448}, {MASK: False}),
         {"fadd": 77_118_979, "fmul": 15_252_995, "tensor_ops": 3_623_878_656, "store_bytes": 4_194_304}),
    Seen(EFFICIENT_WIDE, (4, 8, 2), (2, 8, 8, 256, 256, 128, True), ({HEAD_DIM: 64}, {HEAD_DIM: 96}, {KEYS: 384}),
         {"fadd": 31_298_167, "fmul": 4_203_127, "tensor_ops": 1_610_612_736, "store_bytes": 2_097_152}),
    Seen(EFFICIENT_BACKWARD, (2, 12, 1), (1, 12, 12, 128, 128, 64, True),
         ({HEADS: 6}, {BATCH: 3}, {KEYS: 64}, {HEAD_DIM: 80})),
    Seen(CUDNN, (60, 1, 1), (3, 10, 10, 200, 200, 64, True), ({HEADS: 11}, {QUERIES: 257}, {HEAD_DIM: 72})),
    Seen(CUDNN, (60, 1, 1), (3, 10, 10, 200, 200, 64, True), ({MASK: False}, {KEYS: 128, QUERIES: 128, HEADS: 20}),
         {"tensor_ops": 377_487_360}),
    Seen(CUDNN, (128, 1, 1), (2, 16, 4, 512, 512, 64, True), ({BATCH: 1, QUERIES: 1024, KEYS: 1024}, {HEADS: 15}),
         {"tensor_ops": 1_342_177_280}),
    # With a mask as a tensor, on more tiles than SMs.
    Seen(CUDNN, (132, 1, 1), (2, 32, 32, 1024, 1024, 64, True), ({BATCH: 3}, {QUERIES: 512, KEYS: 512}),
         {"tensor_ops": 17_179_869_184}),
    Seen(CUDNN, (132, 1, 1), (2, 32, 32, 1024, 1024, 64, True), ({BATCH: 1, HEADS: 1},)),
    Seen(CUDNN_WIDE, (64, 1, 1), (2, 16, 8, 256, 256, 128, True), ({MASK: False}, {QUERIES: 128, KEYS: 128}),
         {"tensor_ops": 805_306_368}),
    Seen(CUDNN_BACKWARD, (60, 1, 1), (3, 10, 10, 200, 200, 64, True), ({KEYS: 128}, {BATCH: 4})),
    Seen(CUDNN_DOT, (13, 3, 10), (3, 10, 10, 200, 200, 64, True), ({QUERIES: 192}, {BATCH: 10}, {HEADS: 3})),
    Seen(CUDNN_CONVERT, (7, 3, 10), (3, 10, 10, 200, 200, 64, True), ({QUERIES: 192}, {QUERIES: 225}, {HEADS: 3})),
    Seen(CUDNN_HEADS, (32, 2, 4), (2, 16, 4, 512, 512, 64, True), ({KV_HEADS: 16}, {BATCH: 4}, {KEYS: 256})),
    Seen(flash(96, 128, 64, CAUSAL), (3, 2, 15), (2, 15, 15, 384, 384, 80, True),
         ({BATCH: 15, HEADS: 2}, {QUERIES: 385}, {HEAD_DIM: 64}, {HEAD_DIM: 96}, {MASK: False})),
    Seen(flash(96, 128, 64, CAUSAL), (3, 2, 15), (2, 15, 15, 384, 384, 80, True),
         ({QUERIES: 383, KEYS: 383}, {HEAD_DIM: 72}, {HEAD_DIM: 88}, {KEYS: 448}),
         {"tensor_ops": 1_132_462_080, "store_bytes": 1_889_280}),
    Seen(HOPPER, (30, 1, 1), (1, 10, 5, 768, 768, 128, True), ({BATCH: 2}, {QUERIES: 769}, {QUERIES: 512})),
    Seen(HOPPER, (30, 1, 1), (1, 10, 5, 768, 768, 128, True), ({QUERIES: 767}, {HEAD_DIM: 64}, {KEYS: 640}),
         {"tensor_ops": 1_761_607_680, "store_bytes": 30_720}),
    Seen(HOPPER, (64, 1, 1), (2, 8, 8, 1024, 1024, 128, True), ({BATCH: 3}, {QUERIES: 1025}, {MASK: False})),
)  # fmt: skip


def changed(problem: Problem, places: dict[int, int]) -> Problem:
    return tuple(places.get(place, size) for place, size in enumerate(problem))  # type: ignore[return-value]


@pytest.mark.parametrize("seen", SEEN, ids=str)
def test_true_sizes_are_admitted_and_others_are_not(seen: Seen) -> None:
    fact = seen.fact()
    assert fact.admits(*seen.problem)
    for places in seen.refused:
        assert not fact.admits(*changed(seen.problem, places)), places


def test_windows_follow_from_the_grid() -> None:
    fact = SEEN[0].fact()
    assert (fact.batch, fact.heads, fact.length) == (exactly(1), exactly(12), Window(65, 128))
    assert fact.head_dim == Window(1, 64)
    flash_fact = SEEN[15].fact()
    assert (flash_fact.batch, flash_fact.heads, flash_fact.length) == (exactly(2), exactly(15), Window(257, 384))
    assert flash_fact.head_dim == Window(65, 88)  # not 96: the kernel shows that the head does not fill it
    assert SEEN[5].fact().heads is None


@pytest.mark.parametrize(
    ("rest", "queries", "head_dim"),
    [("64x64_rf", 64, Window(1, 64)), ("64x128_rf", 64, Window(65, 128)), ("32x128_gmem", 32, Window(129, 65_536))],
)
def test_the_result_location_bounds_the_head_size(rest: str, queries: int, head_dim: Window) -> None:
    fact = Seen(f"fmha_cutlassF_bf16_aligned_{rest}_sm80(Params)", (3, 4, 5), (5, 4, 4, 3 * queries, 1, 1, True)).fact()
    assert (fact.head_dim, fact.length) == (head_dim, Window(2 * queries + 1, 3 * queries))
    assert (fact.heads, fact.batch) == (exactly(4), exactly(5))


@pytest.mark.parametrize(
    "counters",
    [{"fadd": 2_427_133, "fmul": 543_997}, {"tensor_instructions": 55_296}, {"tensor_ops": 113_246_208}],
)
def test_each_counter_of_memory_efficient_attention_suffices(counters: dict[CounterKey, int]) -> None:
    fact = Seen(EFFICIENT, (2, 12, 1), (1, 12, 12, 128, 128, 64, True), (), counters).fact()
    assert fact.admits(*(1, 12, 12, 128, 128, 64, True))
    assert not fact.admits(*(1, 12, 12, 128, 64, 64, True))
    assert not fact.admits(*(1, 12, 12, 128, 128, 64, False))


def test_counters_of_memory_efficient_attention_need_fp32() -> None:
    counters: dict[CounterKey, int] = {"fadd": 7, "fmul": 7, "tensor_ops": 7, "store_bytes": 7}
    for name in (EFFICIENT.replace("_f32_", "_bf16_"), EFFICIENT.replace("64x64_rf", "32x128_gmem")):
        fact = Seen(name, (2, 12, 1), (1, 12, 12, 64, 64, 64, True), (), counters).fact()
        assert fact.length is not None
        assert fact.head_dim is not None
        assert fact.admits(*(1, 12, 12, fact.length.high, 64, fact.head_dim.low, True))


def test_training_stores_one_more_number_per_row() -> None:
    result, kept = 4 * 12 * 100 * 64, 4 * 12 * 128  # rows in multiples of 32
    for stored, fits in ((result - 4, False), (result, True), (result + kept, True), (result + kept + 4, False)):
        fact = Seen(EFFICIENT, (2, 12, 1), (1, 12, 12, 100, 100, 64, True), (), {"store_bytes": stored}).fact()
        assert fact.admits(*(1, 12, 12, 100, 100, 64, True)) is fits


def test_work_of_partial_tiles_is_between_whole_ones() -> None:
    counters: dict[CounterKey, int] = {"tensor_ops": 113_246_208}  # like 128
    for length, fits in ((128, True), (127, True), (65, True)):
        fact = Seen(EFFICIENT, (2, 12, 1), (1, 12, 12, length, length, 64, True), (), counters).fact()
        assert fact.admits(*(1, 12, 12, length, length, 64, True)) is fits


def test_a_causal_mask_ends_at_the_last_key() -> None:
    """100 queries after 200 keys see all of these: none of the five tiles of keys is skipped."""
    name = flash(64, 128, 64, CAUSAL)
    for pairs, fits in ((5, True), (2, False), (4, False)):
        counters: dict[CounterKey, int] = {"tensor_ops": 8 * pairs * 4 * 128 * 64 * 64}
        fact = Seen(name, (1, 2, 4), (2, 4, 4, 100, 300, 48, True), (), counters).fact()
        assert fact.admits(*(2, 4, 4, 100, 300, 48, True)) is fits
    # Two tiles of queries after 128 keys: the first reaches key 256, the second the end.
    counters = {"tensor_ops": 8 * (4 + 6) * 4 * 128 * 64 * 64}
    fact = Seen(name, (2, 2, 4), (2, 4, 4, 256, 384, 48, True), (), counters).fact()
    assert fact.admits(*(2, 4, 4, 256, 384, 48, True))


def test_flash_attention_flags_show_even_tiles_and_heads() -> None:
    fact = Seen(flash(64, 128, 128, CAUSAL_EVEN), (2, 3, 5), (3, 5, 5, 256, 256, 64, True)).fact()
    assert fact.admits(*(3, 5, 5, 256, 256, 64, True))
    assert not fact.admits(*(3, 5, 5, 255, 255, 64, True))
    assert not fact.admits(*(3, 5, 5, 256, 256, 48, True))
    assert not fact.admits(*(3, 5, 5, 256, 256, 64, False))
    assert fact.head_dim == Window(57, 64)


@pytest.mark.parametrize(
    ("compiled", "least"),
    [(32, 1), (64, 33), (96, 65), (128, 97), (160, 129), (192, 129), (224, 193), (256, 193)],
)
def test_flash_attention_has_a_few_compiled_head_sizes(compiled: int, least: int) -> None:
    around = flash(compiled, 64, 128, "false", kernel="flash_bwd_convert_dq_kernel", way="bwd")
    assert Seen(around, (5, 2, 20), (2, 20, 20, 320, 320, 64, True)).fact().head_dim == Window(least, compiled)
    assert Seen(flash(compiled, 64, 64, PLAIN_EVEN_HEAD), (2, 1, 1), (1, 1, 1, 99, 99, 9, False)).fact().head_dim == (
        Window(compiled - 7, compiled)
    )


def test_a_window_of_keys_leaves_mask_and_work_open() -> None:
    local = "false, false, true, false, false, true, false, false"
    fact = Seen(flash(64, 128, 64, local), (2, 1, 3), (1, 3, 3, 256, 256, 64, True), (), {"tensor_ops": 12_345}).fact()
    assert fact.admits(*(1, 3, 3, 256, 256, 64, True))


def test_unknown_cudnn_tiles_are_divided_evenly_among_heads() -> None:
    for name in (CUDNN_BACKWARD.replace("64x64x64", "64x64x128"), CUDNN.replace("64x128x64", "64x64x256")):
        fact = Seen(name, (15, 2, 2), (2, 10, 10, 300, 300, 96, True)).fact()
        assert fact.admits(*(2, 10, 10, 300, 300, 96, True))
        assert fact.admits(*(2, 10, 10, 3000, 3000, 96, True))
        assert not fact.admits(*(2, 7, 7, 300, 300, 96, True))
        full = Seen(name, (66, 2, 1), (2, 7, 7, 300, 300, 96, True)).fact()
        assert full.admits(*(2, 7, 7, 300, 300, 96, True))


def test_a_single_query_with_grouped_heads_is_a_group_of_queries() -> None:
    fact = Seen(flash(64, 128, 128, PLAIN_EVEN_HEAD), (1, 2, 4), (2, 16, 4, 1, 300, 64, True)).fact()
    assert fact.admits(*(2, 16, 4, 1, 300, 64, True))
    assert fact.admits(*(2, 4, 4, 1, 300, 64, True))  # as many heads as groups: nothing to combine
    assert not fact.admits(*(2, 16, 8, 1, 300, 64, True))


def test_split_keys_combine_batch_and_heads() -> None:
    name = flash(64, 64, 256, CAUSAL, kernel="flash_fwd_splitkv_kernel")
    fact = Seen(name, (1, 6, 32), (2, 16, 16, 40, 4096, 64, True)).fact()
    assert fact.admits(*(2, 16, 16, 40, 4096, 48, True))
    assert fact.admits(*(4, 8, 8, 40, 4096, 48, True))
    assert not fact.admits(*(2, 15, 15, 40, 4096, 48, True))
    assert not fact.admits(*(2, 16, 16, 80, 4096, 48, True))
    one = Seen(name, (1, 6, 8), (2, 16, 4, 1, 4096, 48, True)).fact()
    assert one.admits(*(2, 16, 4, 1, 4096, 48, True))  # eight groups
    assert not one.admits(*(2, 16, 2, 1, 4096, 48, True))


def test_flash_attention_backward_grids() -> None:
    around = flash(64, 64, 128, "false", kernel="flash_bwd_convert_dq_kernel", way="bwd")
    fact = Seen(around, (5, 2, 20), (2, 20, 20, 320, 320, 64, True)).fact()
    assert (fact.direction, fact.length) == ("backward", Window(257, 320))
    flags = "false, true, false, false, false, true, false"
    middle = flash(64, 64, 128, flags, kernel="flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", way="bwd")
    fact = Seen(middle, (3, 2, 20), (2, 20, 20, 320, 320, 64, True)).fact()
    assert fact.admits(*(2, 20, 20, 320, 320, 64, True))
    assert not fact.admits(*(2, 20, 20, 400, 400, 64, True))
    assert not fact.admits(*(20, 2, 2, 320, 320, 64, True))
    # As many blocks as divide the GPU: deterministic mode.
    assert Seen(middle, (4, 2, 20), (2, 20, 20, 320, 320, 64, True)).fact().admits(*(2, 20, 20, 4000, 4000, 64, True))


@pytest.mark.parametrize(
    ("name", "grid", "admitted", "refused"),
    [
        ("attention_forward", (24 * 3, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 12, 4, 500, 500, 64, True)),
        ("attention_forward", (24 * 19, 1, 1), (2, 12, 4, 300, 300, 256, True), (2, 12, 4, 320, 320, 256, True)),
        ("attention_forward", (24 * 10, 1, 1), (2, 12, 4, 300, 300, 256, True), (2, 12, 4, 330, 330, 256, True)),
        ("attention_backward_queries", (24 * 5, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 13, 4, 300, 300, 64, True)),
        ("attention_backward_keys", (8 * 5, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 12, 12, 300, 300, 64, True)),
        ("attention_hopper_prepare", (24 * 3, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 12, 4, 400, 400, 64, True)),
        ("attention_hopper_backward", (8 * 3, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 12, 12, 300, 300, 64, True)),
        ("attention_hopper_finish", (24 * 5, 1, 1), (2, 12, 4, 300, 300, 64, True), (2, 12, 4, 321, 321, 64, True)),
    ],
)  # fmt: skip
def test_our_own_kernels_follow_their_launchers(name: str, grid: Triple, admitted: Problem, refused: Problem) -> None:
    fact = Seen(name, grid, admitted).fact()
    assert fact.direction == ("forward" if name.endswith("forward") else "backward")
    assert fact.admits(*admitted)
    assert not fact.admits(*refused)


def test_our_forward_without_a_mask_has_three_warpgroups() -> None:
    fact = Seen(HOPPER, (2 * 8 * 2, 1, 1), (2, 8, 8, 384, 384, 64, False)).fact()
    assert fact.admits(*(2, 8, 8, 384, 384, 64, False))
    assert fact.admits(*(2, 8, 8, 512, 512, 64, True))  # four tiles of 128, in pairs
    assert not fact.admits(*(2, 8, 8, 385, 385, 64, False))


def test_our_forward_of_a_long_causal_sequence_has_two_or_three_warpgroups() -> None:
    long = (1, 1, 1, 8192, 8192, 64, True)
    for tiles in (64, 43):  # of 128 and of 192 rows
        assert Seen(HOPPER, ((tiles + 1) // 2, 1, 1), long).fact().admits(*long)
    assert not Seen(HOPPER, (30, 1, 1), long).fact().admits(*long)
    shorter = (1, 1, 1, 2048, 2048, 64, True)
    assert Seen(HOPPER, (8, 1, 1), shorter).fact().admits(*shorter)
    assert not Seen(HOPPER, (6, 1, 1), shorter).fact().admits(*shorter)


def test_our_forward_with_a_window_says_nothing_about_its_work() -> None:
    assert read(Seen("attention_hopper_local_forward", (16, 1, 1), (1, 1, 1, 4096, 4096, 64, True)).sighting()) is None


def test_partial_tiles_bound_the_work_of_our_forward() -> None:
    pair = 4 * 128 * 128 * 128
    for pairs, fits in ((5, True), (6, True), (9, True), (10, False)):
        counters: dict[CounterKey, int] = {"tensor_ops": pair * pairs}
        for queries, keys in ((300, 384), (384, 300)):
            fact = Seen(HOPPER, (2, 1, 1), (1, 1, 1, queries, keys, 128, True), (), counters).fact()
            assert fact.admits(*(1, 1, 1, queries, keys, 128, True)) is fits


def test_unknown_attention_launches_have_no_fact() -> None:
    unknown = (
        "flash_fwd_splitkv_combine_kernel",
        "kernel_unified_attention_2d",
        "softmax_warp_forward",
        "attention_fwd",
    )
    for name in unknown:
        assert read(Sighting(index=0, name=decode(name), grid=(8, 2, 2), block=(128, 1, 1))) is None
    strange = CUDNN.replace("64x128x64_4x1x1_cga1x1x1", "tall")
    assert read(Sighting(index=0, name=decode(strange), grid=(8, 2, 2), block=(128, 1, 1))) is None
