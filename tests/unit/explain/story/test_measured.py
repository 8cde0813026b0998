"""What the page itself measured: a faster setting is a finding, with the measured saving."""

from typing import Any

import msgspec
import pytest

from stepscope.explain.rules import RULES
from stepscope.explain.story import Materials
from stepscope.explain.story.measured import add_measured, find_measured
from stepscope.explain.story.opening import Opening
from stepscope.explain.story.run import list_advice
from stepscope.explain.story.soundness import judge
from stepscope.findings import Finding, joint_saving
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.store import Overhead
from stepscope.spec import build_case
from tests.unit.attention_rows import attend
from tests.unit.explain.story.story_materials import CASE, product, record_ours, small_row
from tests.unit.recordings import GEMM_FP32, Timeline

MS = 1_000_000


def timed(step_ms: float, **settings: Any) -> Any:
    row = small_row(**settings)
    assert row.measurement is not None
    samples = tuple(round(step_ms * MS * (1 + 0.001 * number)) for number in range(10))
    phases = dict.fromkeys(row.measurement.phases_ns, samples)
    return msgspec.structs.replace(
        row, measurement=msgspec.structs.replace(row.measurement, step_ns=samples, phases_ns=phases)
    )


def test_faster_precision_is_a_finding() -> None:
    materials = Materials(name="a", bench=(timed(60, precision="fp32"), timed(10)))
    (finding,) = find_measured(materials)
    assert finding.is_measured
    assert finding.code == "SS005"
    assert finding.title == "bf16 is 6× faster than fp32"
    assert finding.share == pytest.approx(5 / 6, rel=0.01)
    assert finding.saving_ns == pytest.approx(50 * MS, rel=0.01)
    assert "--precision bf16" in finding.fix
    advice = list_advice(materials)
    assert advice is not None
    assert [fix.text for one in advice for fix in one.fixes] == [finding.fix]


@pytest.mark.parametrize(
    ("other", "code"),
    [({"attention": "sdpa"}, "SS004"), ({"compile": True}, "SS003"), ({"optimizer": "adamw-fused"}, "SS007")],
)
def test_other_settings_are_compared_as_well(other: dict[str, Any], code: str) -> None:
    (finding,) = find_measured(Materials(name="a", bench=(timed(60), timed(20, **other))))
    assert finding.code == code
    assert code in RULES


@pytest.mark.parametrize(
    "rows",
    [
        (timed(10), timed(60, precision="fp32")),  # slower
        (timed(60), timed(59.9, precision="fp16")),  # within the spread
        (timed(60), timed(10, batch=1)),  # less work
        (timed(60), timed(10, precision="fp16", compile=True)),  # two changes
    ],
)
def test_slower_or_incomparable_variants_are_not(rows: tuple[Any, ...]) -> None:
    assert find_measured(Materials(name="a", bench=rows)) == ()


def test_measured_and_estimated_finding_are_one_card() -> None:
    """The saving is the measured ratio, applied to the page's step, which the profile timed."""

    def slow(timeline: Timeline) -> None:
        timeline.launch(GEMM_FP32, 2000, op="aten::mm", shapes=[[4096, 4096]] * 2, dtypes=["float"] * 2)

    case = msgspec.structs.replace(CASE, workload=msgspec.structs.replace(CASE.workload, precision="fp32"))
    profile = record_ours(slow, case=case, environment=None, overhead=Overhead(plain_ns=2 * MS, recorded_ns=2 * MS))
    advice = list_advice(Materials(name="a", profile=profile, bench=(timed(3, precision="fp32"), timed(0.5))))
    assert advice is not None
    (card,) = (one for one in advice if one.finding.code == "SS005")
    assert card.finding.is_measured
    assert card.finding.share == pytest.approx(5 / 6, rel=0.01)
    assert card.finding.saving_ns == pytest.approx(profile.clock.step_ns * 5 / 6, rel=0.01)
    assert [one.code for one in card.finding.also] == ["SS005"]
    assert [fix.text.split("--precision ")[1] for fix in card.fixes] == ["bf16", "tf32"]


def estimated(code: str, share: float, **fields: Any) -> Finding:
    ns = round(share * 1000)
    given = {"title": "t", "evidence": "e", "fix": code, "saving_ns": ns, "share": share, "joint_ns": ns}
    return Finding(code=code, **{**given, "joint_share": share, **fields})


def test_others_save_their_part_of_what_is_left() -> None:
    measured = estimated("SS005", 0.8, is_measured=True, joint_ns=None, joint_share=None)
    findings = add_measured([estimated("SS005", 0.5), estimated("SS007", 0.2)], [measured])
    assert [one.code for one in findings] == ["SS005", "SS007"]
    assert [one.joint_ns for one in findings] == [800, 80]
    total = joint_saving(findings)
    assert total is not None
    assert total.share == pytest.approx(0.88)


def test_other_fix_of_a_card_is_replaced_by_its_measurement() -> None:
    card = estimated("SS001", 0.5, also=(estimated("SS003", 0.2, fix="SS001"), estimated("SS004", 0.1)))
    attention = estimated("SS004", 0.3, is_measured=True)
    compiled, measured = add_measured([card], [attention])
    assert [one.code for one in compiled.also] == ["SS003"]
    assert measured.also == ()
    (whole,) = add_measured([card], [estimated("SS003", 0.4, is_measured=True)])
    assert [one.code for one in whole.also] == ["SS001", "SS003", "SS004"]


@pytest.mark.parametrize("code", ["SS001", "SS003", "SS006", "SS008"])
def test_measured_compilation_replaces_every_estimate_of_it(code: str) -> None:
    (measured,) = find_measured(Materials(name="a", bench=(timed(60), timed(20, compile=True))))
    first, second = add_measured([estimated(code, 0.2), estimated("SS007", 0.1)], [measured])
    assert first.is_measured
    assert [one.code for one in first.also] == [code]
    assert second.code == "SS007"


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ({"compile": True}, "torch.compile is 3× faster than eager code"),
        ({"attention": "flash"}, "Flash attention is 3× faster than sdpa attention"),
        ({"optimizer": "adamw-fused"}, "Optimizer adamw-fused is 3× faster than optimizer adamw"),
    ],
)
def test_titles_start_with_a_capital_or_an_identifier(other: dict[str, Any], title: str) -> None:
    rows = timed(60, attention="sdpa"), timed(20, **{"attention": "sdpa", **other})
    (finding,) = find_measured(Materials(name="a", bench=rows))
    assert finding.title == title


def bench(step_ms: tuple[float, ...], *codes: str, **settings: Any) -> Any:
    doubts = tuple(Doubt(code=code, text=code) for code in codes)
    return small_row(step_ns=tuple(round(one * MS) for one in step_ms), doubts=doubts, **settings)


def test_ratio_holds_given_the_spread() -> None:
    """Medians of 60 and 10 ms, but 40 and 20 ms are as likely."""
    slow, fast = (40, 40, 50, 60, 70, 80, 80), (5, 5, 8, 10, 15, 20, 20)
    (finding,) = find_measured(Materials(name="a", bench=(bench(slow, precision="fp32"), bench(fast))))
    assert finding.title == "bf16 is at least 2.21× faster than fp32"
    assert finding.share == pytest.approx(1 - 19 / 42)
    assert "60 ms (p20 to p80: 42 ms to 78 ms)" in finding.evidence


def test_other_processes_only_add_time() -> None:
    """On a busy machine, the fastest repetition of the slower one says what it takes."""
    slow, fast = (40, *[600] * 9), (10,) * 10
    (finding,) = find_measured(Materials(name="a", bench=(bench(slow, "shared", precision="fp32"), bench(fast))))
    assert finding.title == "bf16 is at least 4× faster than fp32"


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ((1000,) * 10, (427,) * 9 + (10_000,)),  # the median is 2.3× lower, the mean higher
        ((60, 20, 70, 15, 65), (10, 30, 11, 28, 12)),  # overlap
        ((60,), (10,)),  # single steps
    ],
)
def test_page_says_which_timings_were_too_noisy_for_a_finding(slow: tuple[int, ...], fast: tuple[int, ...]) -> None:
    materials = Materials(name="a", bench=(bench(slow, precision="fp32"), bench(fast)))
    assert find_measured(materials) == ()
    (said,) = (one for one in judge(Opening(materials)).details if "may be faster" in one)
    assert said.startswith("bf16 may be faster than fp32, but the timings vary too much to say so: ")


def test_small_or_certain_differences_need_no_explanation() -> None:
    for fast in (59.9, 10):
        materials = Materials(name="a", bench=(timed(60, precision="fp32"), timed(fast)))
        assert not [one for one in judge(Opening(materials)).details if "may be faster" in one]


def noisy_attention(slow_ns: tuple[int, ...], fast_ns: tuple[int, ...], *codes: str) -> Materials:
    case = build_case({"size": "small", "context": 2048, "precision": "bf16", "attention": "naive", "batch": 8})
    doubts = tuple(Doubt(code=code, text=code) for code in codes)
    rows = (
        attend("naive", length=2048, forward_ns=slow_ns, backward_ns=slow_ns, doubts=doubts),
        attend("sdpa-math", length=2048, forward_ns=fast_ns, backward_ns=fast_ns),
    )

    def work(timeline: Timeline) -> None:
        for _ in range(8):
            product(timeline)

    plain = Overhead(plain_ns=2 * MS, recorded_ns=30 * MS)
    return Materials(name="a", profile=record_ours(work, case=case, overhead=plain, host_us=3), attention=rows)


def test_page_says_that_attention_was_too_noisy_for_a_finding() -> None:
    materials = noisy_attention((1_000, 1_000, 60_000, 70_000, 80_000), (500, 500, 500, 1_500, 1_500))
    assert find_measured(materials) == ()
    assert [one for one in judge(Opening(materials)).details if one.startswith("sdpa attention may be faster")]


def test_attention_on_a_busy_machine_states_what_is_certain() -> None:
    materials = noisy_attention((2_000, 50_000, 60_000, 60_000, 70_000), (500,) * 5, "shared")
    (finding,) = find_measured(materials)
    assert finding.title == "sdpa attention is at least 4× faster than naive attention"
    assert finding.saving_ns == 12 * 3_000


@pytest.mark.parametrize(("plain_ms", "fires"), [(2, True), (20, False)])
def test_faster_attention_counts_where_the_gpu_is_the_limit(plain_ms: float, fires: bool) -> None:
    case = build_case({"size": "small", "context": 2048, "precision": "bf16", "attention": "naive", "batch": 8})
    rows = (
        attend("naive", length=2048, forward_ns=(30_000,) * 5, backward_ns=(60_000,) * 5),
        attend("triton", length=2048, forward_ns=(10_000,) * 5, backward_ns=(20_000,) * 5),
    )

    def work(timeline: Timeline) -> None:
        for _ in range(8):
            product(timeline)

    plain = Overhead(plain_ns=round(plain_ms * MS), recorded_ns=30 * MS)
    profile = record_ours(work, case=case, overhead=plain, host_us=3 if fires else 4000)
    found = find_measured(Materials(name="a", profile=profile, attention=rows))
    assert [one.code for one in found] == (["SS004"] if fires else [])
    for one in found:
        assert "--attention flash" in one.fix
        assert one.title == "Flash attention is 3× faster than naive attention"
        assert one.saving_ns == 12 * 60_000
