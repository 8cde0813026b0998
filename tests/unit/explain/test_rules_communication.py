"""Rules about communication: the strategy, what could overlap, waiting for other ranks, and copies over the bus."""

from dataclasses import replace
from typing import Any

import pytest

from stepscope.explain.ranks.matching import match_ranks
from stepscope.explain.rules import find
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.rules.strategies.communication import Communication
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Finding, joint_saving
from stepscope.recording.rows.loop_run import LoopFacts
from tests.unit.explain.test_rules_host import found, saving_us
from tests.unit.rank_recordings import Rank, record_ranks, reduce_ranks
from tests.unit.recordings import ADD, ALL_REDUCE, GEMM_BF16, STREAM, TO_DEVICE, TO_DEVICE_PINNED, Timeline

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
RCCL = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
MB = 1_000_000


def training(
    forward: tuple[str, ...] = (),
    backward: tuple[str, ...] = (),
    update: tuple[str, ...] = (),
    *,
    us: float = 200,
    per_message: int | None = 100 * MB,
    **told: Any,
) -> Profile:
    """Two steps with a GEMM after each collective of forward and backward, all on one stream."""
    timeline = Timeline()
    for _ in range(2):
        with timeline.step():
            for phase, collectives in (("forward", forward), ("backward", backward), ("optimizer", update)):
                with timeline.phase(phase):
                    timeline.launch(ADD if phase == "optimizer" else GEMM_BF16, 300, op="aten::mm")
                    for name in collectives:
                        timeline.launch(name, us, op="c10d::op", bytes=per_message, group_size=8, **told)
                        if phase != "optimizer":
                            timeline.launch(GEMM_BF16, 300, op="aten::mm")
    return timeline.profile(rank=3, world_size=8, file="trace_rank3.json.gz")


def strategy_of(profile: Profile) -> str:
    return Communication(StepEvidence(profile=profile)).strategy


@pytest.mark.parametrize(
    ("profile", "strategy", "said", "never"),
    [
        (training(backward=(ALL_REDUCE, ALL_REDUCE)), "DDP", "static_graph", "prefetch"),
        (training((ALL_GATHER,), (ALL_GATHER, REDUCE_SCATTER)), "FSDP", "forward_prefetch", "bucket_cap_mb"),
        (
            training(backward=(REDUCE_SCATTER,), update=(ALL_GATHER, ALL_GATHER)),
            "sharded optimizer",
            "overlap_comm",
            "bucket_cap_mb",
        ),
        (training((ALL_REDUCE,) * 2, (ALL_REDUCE,) * 2), "tensor parallel", "_micro_pipeline_tp", "bucket_cap_mb"),
        (training((SEND,), (SEND,), collective="all_to_all"), "all-to-all", "all_to_all_single", "bucket_cap_mb"),
        (training((SEND,), (SEND,)), "pipeline", "n_microbatches", "bucket_cap_mb"),
        (training(backward=(RCCL, RCCL), collective="allreduce"), "DDP", "static_graph", "prefetch"),
    ],
)
def test_advice_fits_the_strategy(profile: Profile, strategy: str, said: str, never: str) -> None:
    assert strategy_of(profile) == strategy
    finding = found(profile, "SS011")
    assert finding is not None
    assert said in finding.fix
    assert never not in finding.fix + finding.action


FSDP = ((ALL_GATHER,), (ALL_GATHER, REDUCE_SCATTER))
ZERO = ((), (REDUCE_SCATTER,), (ALL_GATHER, ALL_GATHER))
BROADCAST = "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("collectives", "wrapper", "strategy", "said", "never"),
    [
        (FSDP, "FullyShardedDataParallel", "FSDP", "BackwardPrefetch.BACKWARD_PRE", "set_modules"),
        (FSDP, "FSDPModule", "FSDP", "set_modules_to_forward_prefetch", "BackwardPrefetch"),
        (FSDP, "DeepSpeedEngine", "FSDP", "overlap_comm", "BackwardPrefetch"),
        (ZERO, "DeepSpeedEngine", "sharded optimizer", "overlap_comm", "Megatron"),
        (
            ((), (), (BROADCAST,) * 4),
            "ZeroRedundancyOptimizer",
            "sharded optimizer",
            "hook_with_zero_step",
            "overlap_comm",
        ),
        (((), (ALL_REDUCE,) * 2), "DistributedDataParallel", "DDP", "static_graph", "prefetch"),
    ],
)
def test_advice_fits_the_classes_of_the_run(
    collectives: tuple[tuple[str, ...], ...], wrapper: str, strategy: str, said: str, never: str
) -> None:
    profile = training(*collectives)
    loop = LoopFacts(script="train.py", found_by="optimizer steps", wrappers=(wrapper,))
    profile = replace(profile, recording=profile.recording.with_manifest(loop=loop))
    assert strategy_of(profile) == strategy
    finding = found(profile, "SS011")
    assert finding is not None
    assert said in finding.fix
    assert never not in finding.fix + finding.action


@pytest.mark.parametrize(("apart", "strategy"), [(True, "FSDP"), (False, "sharded optimizer")])
def test_gathered_weights_without_phases(apart: bool, strategy: str) -> None:
    timeline = Timeline()
    for _ in range(4):
        timeline.launch(ALL_GATHER, 200, op=None)
        if apart:
            timeline.launch(GEMM_BF16, 300, op=None)
    with timeline.phase("backward"):
        timeline.launch(GEMM_BF16, 300, op="aten::mm")
        timeline.launch(REDUCE_SCATTER, 100, op=None)
    assert strategy_of(timeline.profile()) == strategy


@pytest.mark.parametrize("name", [ALL_REDUCE, ALL_GATHER, "void vllm::cross_device_reduce_1stage<__half, 2>(int)"])
def test_inference_has_no_gradients_to_reduce(name: str) -> None:
    timeline = Timeline()
    for _ in range(4):
        timeline.launch(GEMM_BF16, 300, op="aten::mm")
        timeline.launch(name, 100, op="vllm::all_reduce")
    assert strategy_of(timeline.profile()) == "tensor parallel"


def test_without_phases_a_run_is_not_said_to_be_inference() -> None:
    """A trace that begins after the launches: no operator and no phase is known."""
    timeline = Timeline()
    for _ in range(4):
        timeline.launch(GEMM_BF16, 300, op=None)
        timeline.launch(ALL_REDUCE, 100, op=None)
    timeline.forget_launches()
    assert strategy_of(timeline.profile()) == "unknown"


def test_kernels_without_launches_count_although_they_run_after_the_last_step() -> None:
    """Only kernels and steps were recorded, and the CPU was far ahead of the GPU."""
    timeline = Timeline(host_us=1)
    for _ in range(3):
        with timeline.step():
            for _ in range(4):
                timeline.launch(GEMM_BF16, 100, op=None)
                timeline.launch(ALL_REDUCE, 500, op=None)
    timeline.forget_launches()
    finding = found(timeline.profile(), "SS011")
    assert finding is not None
    assert finding.about == pytest.approx(500 / 600, rel=0.02)


def test_all_to_all_is_told_by_its_range() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        with timeline.range("nccl:all_to_all"):
            timeline.launch(SEND, 200, op="record_param_comms")
        timeline.launch(GEMM_BF16, 300, op="aten::mm")
    assert strategy_of(timeline.profile()) == "all-to-all"


def test_small_messages_need_larger_buckets() -> None:
    few = found(training(backward=(ALL_REDUCE,) * 2, per_message=100 * MB), "SS011")
    many = found(training(backward=(ALL_REDUCE,) * 8, per_message=50_000), "SS011")
    assert few is not None
    assert many is not None
    assert "bucket_cap_mb=100" in many.fix
    assert "bucket_cap_mb=10," in few.fix
    assert "50 kB" in many.evidence


def test_last_bucket_has_nothing_to_overlap_with() -> None:
    timeline = Timeline()
    for _ in range(2):
        with timeline.step(), timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 500, op="aten::mm")
            timeline.launch(ALL_REDUCE, 300, op="c10d::allreduce_")
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.launch(ALL_REDUCE, 300, op="c10d::allreduce_")
    # The first can overlap with the second GEMM, and the second with nothing: the next step is not its backward.
    evidence = StepEvidence(profile=timeline.profile())
    assert Communication(evidence).hidden_by_overlap.tolist() == [100_000, 0, 100_000, 0]
    assert saving_us(timeline.profile(), "SS011") == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize(
    ("name", "said", "saves_us"),
    [(ALL_REDUCE, "bf16_compress_hook", 300), (ALL_REDUCE.replace("f32", "bf16"), "no_sync", None)],
)
def test_without_kernels_to_overlap_with_fewer_bytes_help(name: str, said: str, saves_us: float | None) -> None:
    timeline = Timeline()
    for _ in range(2):
        with timeline.step(), timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 500, op="aten::mm")
            timeline.launch(name, 600, op="c10d::allreduce_", bytes=100 * MB)
    finding = found(timeline.profile(), "SS011")
    assert finding is not None
    assert said in finding.fix
    assert finding.saving_ns == (None if saves_us is None else pytest.approx(saves_us * 1000, rel=0.03))


def accumulating(reduced: tuple[bool, ...], name: str = ALL_REDUCE.replace("f32", "bf16")) -> Profile:
    """Two updates of several micro-batches, with the all-reduces of those in `reduced`, on a stream of their own."""
    timeline = Timeline(host_us=1)
    for _ in range(2):
        with timeline.step():
            for is_reduced in reduced:
                with timeline.phase("forward"):
                    timeline.launch(GEMM_BF16, 200, op="aten::mm")
                with timeline.phase("backward"):
                    for _ in range(2):
                        timeline.launch(GEMM_BF16, 200, op="aten::mm")
                        if is_reduced:
                            timeline.launch(name, 600, op="c10d::allreduce_", bytes=100 * MB, stream=20, after=STREAM)
            timeline.wait()
            with timeline.phase("optimizer"):
                timeline.launch(ADD, 100, op="aten::_fused_adamw_")
                timeline.wait()
    return timeline.profile()


def test_gradients_are_reduced_once_per_update() -> None:
    each, once = accumulating((True,) * 4), accumulating((False,) * 3 + (True,))
    finding = found(each, "SS011")
    assert finding is not None
    assert "no_sync" in finding.fix
    assert "4 micro-batches" in finding.evidence
    assert finding.saving_ns == pytest.approx(each.step_ns - once.step_ns, rel=0.15)


def test_run_that_reduces_once_per_update_is_not_told_to_do_so() -> None:
    finding = found(accumulating((False,) * 3 + (True,)), "SS011")
    assert finding is not None
    assert finding.is_remark


def test_overlapped_weights_are_a_remark() -> None:
    """FSDP that gathers ahead of time: only the first of forward and the last reduction are exposed."""
    timeline = Timeline(host_us=1)
    for _ in range(2):
        with timeline.step():
            for phase in ("forward", "backward"):
                with timeline.phase(phase):
                    for _ in range(4):
                        timeline.launch(ALL_GATHER, 180, op="c10d::_allgather_base_", stream=20)
                        timeline.launch(GEMM_BF16, 200, op="aten::mm")
                    timeline.wait()
            with timeline.phase("backward"):
                timeline.launch(REDUCE_SCATTER, 180, op="c10d::_reduce_scatter_base_")
    assert strategy_of(timeline.profile()) == "FSDP"
    finding = found(timeline.profile(), "SS011")
    assert finding is not None
    assert finding.is_remark
    assert finding.saving_ns is None


def test_experts_cannot_overlap_with_their_own_layer() -> None:
    timeline = Timeline()
    for _ in range(2):
        with timeline.step(), timeline.phase("forward"):
            for _ in range(3):
                timeline.launch(GEMM_BF16, 300, op="aten::mm")
                timeline.launch(SEND, 200, op="c10d::op", collective="all_to_all")
    finding = found(timeline.profile(), "SS011")
    assert finding is not None
    assert finding.saving_ns is None
    assert "shared experts" in finding.evidence
    assert finding.evidence.startswith("0.6 ms per step does not overlap with other kernels, and none does; ")


def test_pipeline_stages_wait_for_each_other_without_a_late_rank() -> None:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step(), timeline.phase("forward"):
            for us in (2000, 100, 100):
                timeline.launch(SEND, us, op="c10d::recv_", bytes=20 * MB, group_size=4)
                timeline.launch(GEMM_BF16, 300, op="aten::mm")
    finding = found(timeline.profile(rank=1, world_size=4), "SS011")
    assert finding is not None
    assert "n_microbatches" in finding.fix
    assert "waiting for other ranks" not in finding.title


def test_weights_are_gathered_ahead_of_time() -> None:
    timeline = Timeline()
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(ALL_GATHER, 200, op="c10d::_allgather_base_")
            timeline.launch(GEMM_BF16, 150, op="aten::mm")
            timeline.launch(ALL_GATHER, 200, op="c10d::_allgather_base_")
            timeline.launch(GEMM_BF16, 150, op="aten::mm")
        with timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 250, op="aten::mm")
            timeline.launch(REDUCE_SCATTER, 100, op="c10d::_reduce_scatter_base_")
    # Nothing runs before the first, and the reduction is the last of the step.
    hidden = Communication(StepEvidence(profile=timeline.profile())).hidden_by_overlap
    assert hidden.tolist() == [0, 150_000, 0]


def test_communication_that_does_not_lengthen_the_step_is_not_found() -> None:
    timeline = Timeline(host_us=2000)  # the GPU waits for each launch
    for _ in range(3):
        with timeline.step(), timeline.phase("backward"):
            for _ in range(4):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
                timeline.launch(ALL_REDUCE, 100, op="c10d::allreduce_")
    assert found(timeline.profile(), "SS011") is None


def slow_now_and_then(names: tuple[str, ...] = (ALL_REDUCE,)) -> Profile:
    timeline = Timeline()
    for number in range(4):
        with timeline.step(), timeline.phase("backward"):
            timeline.launch(GEMM_BF16, 300, op="aten::mm")
            for name in names:
                us = 2000 if number % 2 else 100
                timeline.launch(name, us, op="c10d::allreduce_", bytes=20 * MB, group_size=8, collective="allreduce")
    return timeline.profile(rank=3, world_size=8, file="trace_rank3.json.gz")


def test_waiting_for_other_ranks_is_told_from_communication() -> None:
    profile = slow_now_and_then()
    finding = found(profile, "SS011")
    assert finding is not None
    assert "waiting for other ranks" in finding.title
    assert finding.fix == "stepscope explain trace_rank*.json.gz"
    # 1.9 ms in every second step, and the GEMM of the next step starts that much earlier.
    assert saving_us(profile, "SS011") == pytest.approx(1900 / 2, rel=0.02)


def test_slow_link_is_named_with_its_bandwidth() -> None:
    # 20 MB take 10 ms, which is 2 GB/s: 3.5 GB/s on the bus of 8 ranks.
    profile = training(backward=(ALL_REDUCE,) * 2, us=10_000, per_message=20 * MB)
    finding = found(profile, "SS011")
    assert finding is not None
    assert "3.5 GB/s" in finding.title
    # At 20 GB/s the same bytes take 1.75 ms.
    assert saving_us(profile, "SS011") == pytest.approx(2 * (10_000 - 1750 - 50), rel=0.01)
    fast = found(training(backward=(ALL_REDUCE,) * 2, us=300, per_message=20 * MB), "SS011")
    assert fast is not None
    assert "NCCL_DEBUG" not in fast.fix


# --- Several ranks ----------------------------------------------------------------------------------------------------


def findings_of(profiles: list[Profile], shown: int = 0) -> dict[str, Finding]:
    return {one.code: one for one in find(profiles[shown], match_ranks(reduce_ranks(profiles)))}


def test_late_rank_is_a_finding_on_the_page_of_every_rank() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), late, Rank(compute_us=[100.0] * 12)])
    for shown in range(3):
        finding = findings_of(profiles, shown)["SS030"]
        assert find(profiles[shown], match_ranks(reduce_ranks(profiles)))[0] == finding
        assert finding.title == "The other ranks wait for rank 1: 1.2 ms per step"
        assert "0.3 ms after the other ranks, in total 1.2 ms per step; " in finding.evidence
        assert "CPU" in finding.evidence
        assert "trace_rank1.json.gz" in finding.action
        # Four collectives per step, each 300 µs late.
        assert finding.saving_ns == pytest.approx(4 * 300_000, rel=0.01)
    assert "SS030" not in {one.code for one in find(profiles[0])}


def test_late_rank_with_a_shorter_trace() -> None:
    """Its lateness is per step of its own trace: the first two steps of the others do not count."""
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12, missing=8)
    finding = findings_of(record_ranks([Rank(compute_us=[100.0] * 12), late]))["SS030"]
    assert finding.saving_ns == pytest.approx(4 * 300_000, rel=0.01)
    assert "1.2 ms per step (in 1 matched step)" in finding.evidence


def test_lateness_behind_kernels_of_the_others_is_named() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    finding = findings_of(record_ranks([Rank(compute_us=[100.0] * 12), late], overlap=True))["SS030"]
    assert finding.title == "Rank 0 waits for rank 1: 0.8 ms per step"
    said = "0.3 ms after rank 0, in total 1.2 ms per step, of which rank 0 still computes for 0.4 ms; "
    assert said in finding.evidence
    assert "the other" not in finding.evidence


def test_waiting_is_not_also_exposed_communication() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), late], transfer_us=2)
    assert "SS011" in {one.code for one in find(profiles[0])}
    assert "SS011" not in findings_of(profiles)


def test_exposed_communication_is_what_is_left_without_waits() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), late], transfer_us=100)
    findings = findings_of(profiles)
    # Of four times 400 µs of a step, four times 300 are waits.
    assert findings["SS011"].title.startswith("Exposed communication: 0.4 ms per step")
    assert "1.2 ms of it is spent waiting for ranks that arrive later" in findings["SS011"].evidence
    assert findings["SS011"].about == pytest.approx(400_000 / profiles[0].step_ns, rel=0.01)
    assert next(iter(findings)) == "SS030"


def test_waits_for_ranks_without_a_trace_are_not_said_to_be_none() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[302.0] * 12)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), Rank(compute_us=[100.0] * 12), late])
    text = findings_of(profiles[:2])["SS011"].evidence
    assert "0 µs of it" not in text
    assert "waiting for ranks other than these 2 of 3" in text


def test_late_rank_whose_trace_is_missing() -> None:
    late = Rank(compute_us=[100.0] * 12, idle_us=[2.0, 302.0] * 6)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), Rank(compute_us=[101.0] * 12), late])
    findings = findings_of(profiles[:2])
    assert "SS030" not in findings
    assert "waiting for other ranks" in findings["SS011"].title
    assert findings["SS011"].fix == "stepscope explain trace_rank*.json.gz"


@pytest.mark.parametrize("is_loading", [True, False])
def test_late_rank_counts_its_own_delay_once(is_loading: bool) -> None:
    """On the page of the late rank, its idle time and the waits of the others are the same time."""
    late = Rank(compute_us=[100.0] * 12, idle_us=[1302.0] * 12, is_loading=is_loading)
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), late])
    findings = find(profiles[1], match_ranks(reduce_ranks(profiles)))
    total = joint_saving(findings)
    assert total is not None
    assert total.saving_ns <= 4 * 1_310_000
    with_saving = [one for one in findings if one.joint_ns]
    assert len(with_saving) == 1
    assert "SS030" in {one.code for first in with_saving for one in (first, *first.also)}


def test_ranks_that_take_turns_are_blamed_together() -> None:
    idle = [[302.0 if place % 3 == rank else 2.0 for place in range(12)] for rank in range(3)]
    profiles = record_ranks([Rank(compute_us=[100.0] * 12, idle_us=own) for own in idle])
    finding = findings_of(profiles)["SS030"]
    assert finding.title.startswith("Ranks wait for each other")
    assert finding.saving_ns == pytest.approx(4 * 300_000, rel=0.01)


def test_equal_ranks_have_no_straggler() -> None:
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), Rank(compute_us=[100.5] * 12)])
    assert "SS030" not in findings_of(profiles)


# --- Copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [TO_DEVICE, TO_DEVICE_PINNED])
def test_trace_of_transfers_says_so_first(copy: str) -> None:
    timeline = Timeline()
    for _ in range(8):
        timeline.launch(copy, 2000, op="aten::copy_", bytes=40 * MB, call="cudaMemcpyAsync")
        timeline.launch(GEMM_BF16, 50, op="aten::mm")
    first = find(timeline.profile())[0]
    assert first.code == "SS020"
    assert "98%" in first.title
    assert "320 MB at 20 GB/s" in first.evidence
    assert ("pinned" if copy == TO_DEVICE_PINNED else "pageable") in first.evidence
    assert "in the trace" in first.evidence
    assert ".to('cuda')" in first.fix
    assert first.saving_ns == pytest.approx(8 * 2_000_000, rel=0.05)


def test_input_that_is_copied_once_per_step_can_only_overlap() -> None:
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            timeline.launch(TO_DEVICE_PINNED, 300, op="aten::copy_", bytes=6 * MB, call="cudaMemcpyAsync")
            for _ in range(8):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
    finding = found(timeline.profile(), "SS020")
    assert finding is not None
    assert "stream" in finding.fix
    assert ".to('cuda')" not in finding.fix


def test_copies_in_both_directions_count_once() -> None:
    """Weights come in while gradients go out: the step waits for both at the same time."""
    timeline = Timeline()
    for _ in range(8):
        timeline.launch(TO_DEVICE_PINNED, 1000, op="aten::copy_", bytes=20 * MB, call="cudaMemcpyAsync", stream=7)
        timeline.launch(
            "Memcpy DtoH (Device -> Pinned)", 1000, op="aten::copy_", bytes=20 * MB, call="cudaMemcpyAsync", stream=8
        )
        timeline.launch(GEMM_BF16, 50, op="aten::mm")
    profile = timeline.profile()
    finding = found(profile, "SS020")
    assert finding is not None
    assert finding.about is not None
    assert finding.about <= 1
    assert finding.saving_ns is None or finding.saving_ns <= profile.step_ns
