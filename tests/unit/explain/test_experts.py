"""Mixtures of experts: which kernels are theirs, how tokens are spread, and what is said about both."""

import pytest

from stepscope.explain.rules import find
from stepscope.explain.story import Materials, tell
from stepscope.explain.trace.experts import (
    EXCHANGE,
    MOVING,
    PRODUCTS,
    REST,
    ROUTER,
    SHARED,
    experts_table,
    find_expert_kernels,
    find_expert_loads,
    say_loads,
)
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Finding
from tests.unit.recordings import ADD, GEMM_BF16, SOFTMAX, Timeline

INDEX = "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(long)"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)"
GROUPED = "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(int)"
TOKENS = (10, 90, 40, 60)


def run_layer(timeline: Timeline, layer: int, tokens: tuple[int, ...] = TOKENS, *, experts: int = 4) -> None:
    """A loop over experts in one module, next to its router."""
    mixture = f"model.layers.{layer}.mlp"
    with timeline.module(f"model.layers.{layer}.self_attn"):
        timeline.launch(GEMM_BF16, 20, op="aten::mm", shapes=[[200, 64], [64, 64]])
    with timeline.module(mixture):
        with timeline.module(f"{mixture}.gate"):
            timeline.launch(GEMM_BF16, 5, op="aten::mm", shapes=[[200, 64], [64, experts]])
            timeline.launch(SOFTMAX, 3, op="aten::_softmax")
        with timeline.module(f"{mixture}.experts"):
            for rows in tokens:
                timeline.launch(INDEX, 7, op="aten::index")
                timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[rows, 64], [64, 256]])
                timeline.launch(ADD, 4, op="aten::mul")
                timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[rows, 128], [128, 64]])
        with timeline.module(f"{mixture}.shared_expert.up"):
            timeline.launch(GEMM_BF16, 30, op="aten::mm", shapes=[[200, 64], [64, 256]])


def run_model(layers: int = 2, tokens: tuple[int, ...] = TOKENS, *, experts: int = 4, **manifest: object) -> Profile:
    timeline = Timeline()
    for _ in range(2):
        with timeline.step(), timeline.phase("forward"):
            for layer in range(layers):
                run_layer(timeline, layer, tokens, experts=experts)
    return timeline.profile(**manifest)


def look_up(profile: Profile, code: str) -> Finding | None:
    return next((one for one in find(profile) if one.code == code), None)


def test_kernels_are_placed_by_module() -> None:
    profile = run_model()
    times = {row[0]: row[1] for row in experts_table(profile).rows}
    assert times == {
        ROUTER: pytest.approx(2 * 0.008),
        MOVING: pytest.approx(2 * 4 * 0.007),
        PRODUCTS: pytest.approx(2 * 8 * 0.050),
        REST: pytest.approx(2 * 4 * 0.004),
        SHARED: pytest.approx(2 * 0.030),
    }
    assert not find_expert_kernels(profile)["module"].str.contains("self_attn").any()


def test_kernels_without_modules_are_placed_by_name() -> None:
    timeline = Timeline()
    with timeline.step():
        timeline.launch("void vllm::moe::topkGatingSoftmax<4, 8, 4, 16>(float const*)", 5, op=None)
        timeline.launch("void vllm::moe::moe_align_block_size_kernel<int>(int const*)", 6, op=None)
        timeline.launch("fused_moe_kernel", 70, op=None)
        timeline.launch(GEMM_BF16, 20, op="aten::mm")
    found = find_expert_kernels(timeline.profile())
    assert found["expert_part"].to_list() == [ROUTER, MOVING, PRODUCTS]


@pytest.mark.parametrize("shared", [False, True])
def test_parts_of_a_layer_that_the_order_of_kernels_shows_are_complete(*, shared: bool) -> None:
    """The GEMM of the router has the name of any other. If there are more of its kind, they may be shared experts."""
    timeline = Timeline()
    with timeline.step(), timeline.module("GPT.repeat of 9 kernels.0.mixture of experts"):
        timeline.launch(GEMM_BF16, 20, op=None)
        timeline.launch("void vllm::moe::topkGatingSoftmax<4, 8, 4, 16>(float const*)", 5, op=None)
        timeline.launch(INDEX, 6, op=None)
        timeline.launch("fused_moe_kernel", 70, op=None)
        timeline.launch(ADD, 4, op=None)
        if shared:
            timeline.launch(GEMM_BF16, 30, op=None)
    found = find_expert_kernels(timeline.profile())
    own = [REST, ROUTER, MOVING, PRODUCTS, REST, REST] if shared else [ROUTER, ROUTER, MOVING, PRODUCTS, REST]
    assert found["expert_part"].to_list() == own


def test_all_to_alls_belong_to_the_experts() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        run_layer(timeline, 0)
        with timeline.range("nccl:all_to_all"):
            timeline.launch(ALL_TO_ALL, 40, op="c10d::alltoall_base_")
        with timeline.range("nccl:all_reduce"):
            timeline.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL()", 40, op="c10d::allreduce_")
    found = find_expert_kernels(timeline.profile())
    assert found.filter(found["expert_part"] == EXCHANGE)["time_ns"].to_list() == [40_000]


def test_a_dense_model_has_no_experts() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("model.layers.0.mlp.gate_proj"):
        timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[200, 64], [64, 256]])
    profile = timeline.profile()
    assert not find_expert_kernels(profile).height
    assert experts_table(profile).notes == ("the recording has no experts",)
    assert "experts" not in [section.key for section in tell(Materials(name="run", profile=profile)).sections]


def test_rows_of_products_are_the_tokens_of_experts() -> None:
    loads = find_expert_loads(run_model())
    assert [one.module for one in loads] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert loads[0].tokens == TOKENS
    assert loads[0].imbalance == pytest.approx(90 / 50)


def test_experts_without_tokens_count() -> None:
    (load,) = find_expert_loads(run_model(layers=1, experts=8))
    assert load.tokens == (*TOKENS, 0, 0, 0, 0)
    assert load.imbalance == pytest.approx(90 / 25)


def test_a_module_for_each_expert() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for number, rows in enumerate(TOKENS):
            for weight in ("w1", "w3", "w2"):
                with timeline.module(f"layers.0.moe.experts.{number}.{weight}"):
                    timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[rows, 64], [64, 64]])
    (load,) = find_expert_loads(timeline.profile())
    assert load.tokens == TOKENS
    assert not load.is_complete
    assert "at least 1.80 times" in say_loads([load])


def test_two_weights_are_not_two_experts() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for weight in ("up", "down"):
            with timeline.module(f"layers.0.moe.experts.{weight}"):
                timeline.launch(GEMM_BF16, 50, op="aten::mm", shapes=[[70, 64], [64, 64]])
    assert find_expert_loads(timeline.profile()) == ()


def test_counted_tokens_come_first() -> None:
    (load,) = find_expert_loads(run_model(expert_tokens={"model.layers.0.mlp.experts": (1, 3)}))
    assert load.tokens == (1, 3)
    assert load.imbalance == 1.5


def test_experts_in_turn_are_found() -> None:
    finding = look_up(run_model(), "SS031")
    assert finding is not None
    assert "16 GEMMs per step in forward, of 10 to 90 rows each, in 2 layers" in finding.evidence
    assert "grouped_mm" in finding.fix


def test_a_grouped_product_is_not_a_loop() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("layers.0.mlp.experts"):
        timeline.launch(GROUPED, 200, op="aten::_grouped_mm")
    assert look_up(timeline.profile(), "SS031") is None


def test_uneven_experts_are_found() -> None:
    finding = look_up(run_model(), "SS032")
    assert finding is not None
    assert "1.80 times the mean number of tokens, in model.layers.0.mlp.experts" in finding.evidence
    assert look_up(run_model(tokens=(50, 60, 50, 40)), "SS032") is None


def test_the_page_has_a_section() -> None:
    report = tell(Materials(name="run", profile=run_model(expert_tokens={"model.layers.0.mlp.experts": (0, *TOKENS)})))
    (section,) = [one for one in report.sections if one.key == "experts"]
    assert section.lead.startswith("Mixtures of experts take ")
    assert [one.key for one in section.exhibits] == ["experts-time", "experts-tokens", "experts-loads"]
