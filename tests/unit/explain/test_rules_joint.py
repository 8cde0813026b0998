"""Findings that hold together: savings of overlapping fixes, launches that are the limit, and advice that is new."""

import re
from dataclasses import replace

import msgspec
import polars as pl
import pytest

from stepscope.explain.rules import find
from stepscope.explain.rules.evidence import StepEvidence
from stepscope.explain.rules.joint import join, rank
from stepscope.explain.rules.rule import settle
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings import Finding, joint_saving
from stepscope.spec import build_case
from tests.unit.explain.test_rules_host import found, products, saving_us, waiting
from tests.unit.explain.test_rules_optimizer import update
from tests.unit.recordings import ADD, BF16, COPY, FP32, GEMM_BF16, GEMM_FP32, INDUCTOR, SOFTMAX, Timeline

APEX_ADAM = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>, float, float>(int)"
OWN_CAST = "void (anonymous namespace)::convert_float_to_bf16_kernel<256>(float const*, __nv_bfloat16*, int)"


# --- Launches


def launch_bound() -> Timeline:
    """100 GEMMs of 5 µs, launched every 20 µs, and a chain of two kernels of 5 µs."""
    timeline = Timeline(host_us=20)
    with timeline.step(), timeline.phase("forward"):
        for _ in range(100):
            timeline.launch(GEMM_BF16, 5, op="aten::mm")
        for _ in range(2):
            timeline.launch(ADD, 5, op="aten::mul")
    return timeline


def test_chain_saves_the_cpu_time_of_its_own_launches() -> None:
    profile = launch_bound().profile()
    # Its GPU time of 10 µs becomes 5, and its launches of 40 µs take a quarter.
    assert saving_us(profile, "SS003") < 2 * 20
    assert saving_us(profile, "SS001") > 100 * 20 * 0.6


def test_chain_far_from_where_the_gpu_waits_saves_gpu_time_only() -> None:
    """The CPU is ahead of the GPU at the chains, and behind only later."""
    timeline = Timeline(host_us=20)
    with timeline.step(), timeline.phase("forward"):
        for _ in range(20):
            timeline.launch(GEMM_BF16, 200, op="aten::mm")
            timeline.launch(ADD, 10, op="aten::mul")
            timeline.launch(ADD, 10, op="aten::mul")
        timeline.wait()
        for _ in range(200):
            timeline.launch(GEMM_BF16, 2, op="aten::mm")
    assert saving_us(timeline.profile(), "SS003") == pytest.approx(20 * 10, rel=0.15)


def test_without_recorded_launches_no_cpu_time_is_saved() -> None:
    """GPU idle time whose reason is unknown stays."""
    timeline = Timeline(host_us=200)
    for _ in range(20):
        timeline.launch(GEMM_BF16, 10, op="aten::mm")
        for _ in range(3):
            timeline.launch(ADD, 10, op="aten::mul")
    recording = timeline.record()
    profile = make_profile(replace(recording, launches=recording.launches.head(0), ops=recording.ops.head(0)))
    assert saving_us(profile, "SS003") == pytest.approx(20 * 20, rel=0.15)


def test_launch_bound_trace_without_marked_steps_is_found() -> None:
    timeline = Timeline(host_us=20)
    for _ in range(100):
        timeline.launch(GEMM_BF16, 2, op="aten::mm")
    assert saving_us(timeline.profile(), "SS001") == pytest.approx(100 * 15, rel=0.03)


def test_saving_of_launches_is_at_most_their_idle_time() -> None:
    """A faster CPU would also reach its stall earlier, but that is not what launches cost."""
    timeline = Timeline(host_us=20)
    for _ in range(3):
        with timeline.step(), timeline.phase("forward"):
            timeline.host(3000)
            for _ in range(100):
                timeline.launch(GEMM_BF16, 30, op="aten::mm")
    assert "SS001" not in {one.code for one in find(timeline.profile())}


# --- Never what the run already does


def graphs(profile: Profile) -> Profile:
    return replace(profile, kernels=profile.kernels.with_columns(launched=pl.lit("graph")))


def test_compiled_run_is_told_to_use_cuda_graphs() -> None:
    eager = found(products(20, 2).profile(), "SS001")
    compiled = found(products(20, 2).profile(compiled=True), "SS001")
    assert eager is not None
    assert eager.fix == "model = torch.compile(model)"
    assert compiled is not None
    assert "reduce-overhead" in compiled.fix
    assert compiled.saving_ns is not None


@pytest.mark.parametrize("sign", ["kernel", "op"])
def test_compiled_code_is_recognised_in_foreign_traces(sign: str) -> None:
    timeline = products(20, 2)
    with timeline.step():
        timeline.launch(
            INDUCTOR if sign == "kernel" else GEMM_BF16, 2, op="Torch-Compiled Region: 0/0" if sign == "op" else None
        )
    finding = found(timeline.profile(), "SS001")
    assert finding is not None
    assert "reduce-overhead" in finding.fix


def test_a_run_with_cuda_graphs_is_told_neither() -> None:
    finding = found(graphs(products(20, 2).profile(compiled=True)), "SS001")
    assert finding is not None
    assert "compile" not in finding.fix
    assert finding.saving_ns is None


def test_launches_inside_a_graph_are_not_late() -> None:
    """Two graphs per step, each after CPU time in which the GPU has nothing to do."""
    timeline = Timeline(host_us=1)
    for _ in range(4):
        with timeline.step():
            for _ in range(2):
                timeline.host(500)
                for _ in range(100):
                    timeline.launch(GEMM_BF16, 2, op="aten::mm")
    finding = found(graphs(timeline.profile(compiled=True)), "SS001")
    assert finding is not None
    assert finding.title.startswith("Late CUDA graphs: the GPU is idle ")
    assert "kernels start late" not in finding.evidence
    assert "with_stack" in finding.fix


def test_compiled_step_is_to_be_captured() -> None:
    case = build_case({"size": "small", "compile": True})
    finding = found(products(20, 2).profile(case=case, compiled=True), "SS001")
    assert finding is not None
    assert finding.action == "Run with `--graph`"
    assert finding.saving_ns is not None


def test_larger_batch_saves_no_time() -> None:
    case = build_case({"size": "small", "compile": True, "graph": True})
    finding = found(products(20, 2).profile(case=case, compiled=True), "SS001")
    assert finding is not None
    assert "`--batch 8`" in finding.action
    assert "throughput" in finding.action
    assert finding.saving_ns is None
    assert finding.joint_ns is None
    assert finding.about is not None
    assert finding.about > 0.5


@pytest.mark.parametrize("code", ["SS006", "SS008"])
def test_copies_in_a_compiled_run_are_remarks(code: str) -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        timeline.launch(INDUCTOR, 5, op=None)
        for _ in range(10):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            dtypes = [BF16 if code == "SS008" else FP32, FP32, "Scalar"]
            timeline.launch(COPY, 20, op="aten::copy_", shapes=[[1024, 4096], [1024, 4096], []], dtypes=dtypes)
    finding = found(timeline.profile(), code)
    assert finding is not None
    assert finding.is_remark


def test_fused_optimizers_of_other_libraries_are_recognised() -> None:
    profile = update(APEX_ADAM, "").profile(parameters=1_000_000)
    assert (profile.kernels["class"] == "optimizer").any()
    assert found(profile, "SS007") is None


@pytest.mark.parametrize(("name", "fires"), [("AdamW", True), ("Muon", False)])
def test_only_optimizers_that_have_a_fused_version(name: str, fires: bool) -> None:
    timeline = update(ADD, "aten::addcdiv_")
    with timeline.range(f"Optimizer.step#{name}.step"):
        timeline.host(1)
    assert (found(timeline.profile(), "SS007") is not None) == fires


def test_casts_of_hand_written_kernels_cannot_be_fused() -> None:
    def casting(kernel: str) -> Profile:
        timeline = Timeline()
        for _ in range(10):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.launch(
                kernel,
                20,
                op="aten::copy_",
                shapes=[[8], [8]],
                dtypes=[BF16, FP32],
            )
        profile = timeline.profile()
        kernels = profile.kernels.with_columns(
            pl.when(pl.col("name") == OWN_CAST).then(pl.lit("copy")).otherwise("class").alias("class")
        )
        return replace(profile, kernels=kernels)

    assert found(casting(COPY), "SS008") is not None
    assert found(casting(OWN_CAST), "SS008") is None


def test_waits_in_inference_are_not_blamed_on_a_loss() -> None:
    inference = found(waiting(5, 20).profile(), "SS002")
    assert inference is not None
    assert "loss" not in inference.fix
    assert "item()" in inference.fix
    timeline = waiting(5, 20)
    with timeline.step(), timeline.phase("backward"):
        timeline.launch(GEMM_BF16, 20, op="aten::mm")
    training = found(timeline.profile(), "SS002")
    assert training is not None
    assert "loss" in training.fix


# --- Together


def test_findings_with_one_fix_are_one_finding() -> None:
    timeline = Timeline(host_us=20)
    with timeline.step(), timeline.phase("forward"):
        for _ in range(20):
            timeline.launch(GEMM_BF16, 2, op="aten::mm")
            for _ in range(3):
                timeline.launch(ADD, 2, op="aten::mul")
    profile = timeline.profile()
    (finding,) = (one for one in find(profile) if one.fix == "model = torch.compile(model)")
    assert {finding.code, *(one.code for one in finding.also)} == {"SS001", "SS003"}
    own = [one.saving_ns for one in finding.also if one.saving_ns is not None]
    assert finding.saving_ns is not None
    assert finding.saving_ns >= max(own)


def test_a_saving_beyond_the_evidence_is_explained() -> None:
    """A fused chain still reads its input, but compiling removes the copies in it altogether."""
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for _ in range(10):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            for kernel, op in ((ADD, "aten::mul"), (COPY, "aten::copy_"), (COPY, "aten::copy_"), (ADD, "aten::mul")):
                timeline.launch(kernel, 100, op=op)
    (finding,) = (one for one in find(timeline.profile()) if one.fix == "model = torch.compile(model)")
    assert [one.code for one in finding.also] == ["SS006"]
    assert finding.saving_ns is not None
    said = re.search(r"; ([\d.]+) ms of the saving comes from the findings below", finding.evidence)
    assert said is not None
    took = [float(one) for one in re.findall(r"([\d.]+) ms", finding.evidence)[:2]]
    assert finding.saving_ns / 1e6 == pytest.approx(took[0] - took[1] + float(said[1]), rel=0.02)


def overlapping() -> Timeline:
    """Attention whose softmax and scale are a chain as well, and another chain."""
    timeline = Timeline()
    shapes = [[64, 1024, 64], [64, 64, 1024]], [[64, 1024, 1024], [64, 1024, 64]]
    for _ in range(2):
        with timeline.step(), timeline.phase("forward"):
            for layer in range(5):
                with timeline.module(f"blocks.{layer}.attention"):
                    timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=shapes[0], dtypes=[BF16, BF16])
                    for _ in range(3):
                        timeline.launch(ADD, 200, op="aten::mul")
                    timeline.launch(SOFTMAX, 200, op="aten::_softmax")
                    timeline.launch(GEMM_BF16, 100, op="aten::bmm", shapes=shapes[1], dtypes=[BF16, BF16])
                with timeline.module(f"blocks.{layer}.norm"):
                    timeline.launch(ADD, 150, op="aten::mul")
                    timeline.launch(ADD, 150, op="aten::mul")
    return timeline


def test_joint_saving_counts_time_once() -> None:
    profile = overlapping().profile()
    findings = find(profile)
    attention, chains = (next(one for one in findings if one.code == code) for code in ("SS004", "SS003"))
    assert attention.saving_ns is not None
    assert chains.saving_ns is not None
    assert attention.joint_ns == attention.saving_ns
    # Of the chains, only the norms are left.
    assert chains.joint_ns == pytest.approx(5 * 150_000, rel=0.02)
    assert (chains.joint_ns or 0) < chains.saving_ns
    total = joint_saving(findings)
    assert total is not None
    assert total.saving_ns == sum(one.joint_ns or 0 for one in findings)
    assert total.share == pytest.approx(total.saving_ns / StepEvidence(profile=profile).step_ns)
    assert max(attention.saving_ns, chains.saving_ns) <= total.saving_ns < attention.saving_ns + chains.saving_ns


def test_finding_inside_a_larger_one_is_part_of_it() -> None:
    """Without other chains, fusing adds nothing to fused attention."""
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"), timeline.module("blocks.0.attention"):
        timeline.launch(GEMM_BF16, 100, op="aten::bmm")
        for _ in range(3):
            timeline.launch(ADD, 200, op="aten::mul")
        timeline.launch(SOFTMAX, 200, op="aten::_softmax")
        timeline.launch(GEMM_BF16, 100, op="aten::bmm")
    findings = find(timeline.profile())
    assert "SS003" not in {one.code for one in findings}
    attention = next(one for one in findings if one.code == "SS004")
    assert [one.code for one in attention.also] == ["SS003"]
    total = joint_saving(findings)
    assert total is not None
    assert total.saving_ns == attention.saving_ns


def test_gpu_time_counts_once_the_cpu_is_faster() -> None:
    """Alone, a faster kernel saves nothing in a CPU-bound step."""
    timeline = Timeline(host_us=60)
    with timeline.step(), timeline.phase("forward"):
        for _ in range(50):
            timeline.launch(GEMM_FP32, 55, op="aten::mm", shapes=[[1024, 1024], [1024, 1024]], dtypes=[FP32, FP32])
    findings = {one.code: one for one in find(timeline.profile())}
    precision = findings["SS005"]
    assert precision.saving_ns is not None
    assert precision.joint_ns is not None
    assert precision.saving_ns < 50 * 10_000
    assert precision.joint_ns > 2 * precision.saving_ns


def test_fix_that_does_not_shorten_the_step_says_so() -> None:
    timeline = Timeline(host_us=60)
    with timeline.step(), timeline.phase("forward"):
        timeline.launch(GEMM_FP32, 55, op="aten::mm")
        timeline.launch(ADD, 5, op="aten::add")
    evidence = StepEvidence(profile=timeline.profile())
    gain = replace(evidence.gain_of(evidence.durations), gpu_ns=40_000, step_ns=0)
    hit = settle(evidence, gain, "they take 55 µs", title="slow")
    assert hit is not None
    said = "they take 55 µs; a fix saves 40 µs of GPU time but no step time, because the GPU is idle "
    assert hit.evidence.startswith(said)


def test_stall_is_explained_once() -> None:
    timeline = Timeline(host_us=5)
    for _ in range(3):
        with timeline.step():
            with timeline.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                timeline.host(5000)
            for _ in range(50):
                timeline.launch(GEMM_BF16, 20, op="aten::mm")
            timeline.wait()
    profile = timeline.profile()
    assert saving_us(profile, "SS012") == pytest.approx(5000, rel=0.01)
    assert found(profile, "SS019") is None


def test_what_a_rule_knows_beyond_the_replay_counts_as_well() -> None:
    """A saving that no change of this rank explains, such as waiting for another rank, and one that the replay sees.
    Both stay findings, and together they save at most the step."""
    evidence = StepEvidence(profile=products(20, 2).profile())
    unseen = evidence.gain(evidence.replay.unchanged())
    change = evidence.replay.unchanged()
    change.host_share[:] = 0.5
    seen, step = evidence.gain(change), evidence.step_ns
    first = card("SS001", saving_ns=round(seen.step_ns), share=seen.step_ns / step, fix="a")
    second = card("SS030", saving_ns=round(0.3 * step), share=0.3, fix="b")
    findings = join(evidence, [(first, seen), (second, unseen)])
    assert [one.code for one in findings] == ["SS001", "SS030"]
    assert findings[1].joint_share == pytest.approx(0.3 * (1 - seen.step_ns / step), rel=0.01)
    limited = join(evidence, [(msgspec.structs.replace(first, saving_ns=round(seen.step_ns / 2)), seen)])
    assert limited[0].joint_ns == pytest.approx(seen.step_ns / 2, rel=0.01)


# --- Order


def card(code: str, **fields: object) -> Finding:
    return Finding(**{"code": code, "title": "t", "evidence": "e", "fix": "f", **fields})  # type: ignore[arg-type]


def test_findings_are_ranked_by_what_matters_to_the_step() -> None:
    small = card("SS003", saving_ns=100, share=0.1, joint_ns=100, joint_share=0.1)
    overlapping_most = card("SS008", saving_ns=300, share=0.3, joint_ns=20, joint_share=0.02)
    most_of_the_step = card("SS011", saving_ns=0, share=0.0, about=0.64)
    part_of_the_step = card("SS020", saving_ns=10, share=0.01, about=0.3)
    unknown = card("SS015", about=0.3)
    remark = card("SS019", fix="", saving_ns=900, share=0.9)
    ranked = rank([remark, small, overlapping_most, part_of_the_step, unknown, most_of_the_step])
    assert [one.code for one in ranked] == ["SS011", "SS015", "SS003", "SS008", "SS020", "SS019"]


def test_fixes_save_at_most_what_is_not_computing() -> None:
    """Two rules that know more than the replay, such as waits of other ranks."""
    profile = products(20, 10).profile()
    evidence = StepEvidence(profile=profile)
    unseen, step = evidence.gain(evidence.replay.unchanged()), evidence.step_ns
    cards = [(card(code, saving_ns=round(0.4 * step), share=0.4, fix=code), unseen) for code in ("SS012", "SS030")]
    total = joint_saving(join(evidence, cards))
    assert total is not None
    assert total.saving_ns <= step - profile.clock.busy_ns + 1


def test_a_fix_comes_after_those_that_its_joint_saving_includes() -> None:
    """Accepted second, a fix may add more than the first: alone, it saved nothing."""
    first = card("SS003", saving_ns=100, share=0.1, joint_ns=100, joint_share=0.1)
    second = card("SS002", saving_ns=0, share=0.0, joint_ns=200, joint_share=0.2)
    assert [one.code for one in rank([first, second])] == ["SS003", "SS002"]
