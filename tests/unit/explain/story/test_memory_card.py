"""The card about memory: which predictions it has, in which order, and that it agrees with the rest of the page."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from stepscope.explain.story import Materials, tell, tell_both
from stepscope.explain.story.memory_card import drop_larger_batches, find_proposed, make_memory_card
from stepscope.explain.story.opening import Opening
from stepscope.findings import Advice, Copyable, Finding, MemoryCard, MemoryLine
from stepscope.recording.rows.plan_result import FitResult, Proposal
from stepscope.render.paper import collect
from stepscope.render.site import write_site
from stepscope.render.terminal import summarize_report
from stepscope.spec import Workload
from stepscope.units import GIB
from tests.unit.explain.story.contradictions import check_same
from tests.unit.explain.story.statements import read_page
from tests.unit.explain.story.story_materials import lacks, product, record, record_ours, small_row
from tests.unit.plans import fit_of
from tests.unit.rows import row

MS = 1_000_000
FP32 = row(size="small", context=256, precision="fp32").case.workload
CHANGES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "flash attention": {"attention": "flash"},
    "checkpoint every block": {"checkpoint": "1"},
    "checkpoint every 3 blocks": {"checkpoint": "3"},
    "2 micro-batches": {"grad_accumulation": 2},
}


def predicted(title: str, gib: float, ms: float | None, *, fits: bool = True, **changes: Any) -> Proposal:
    return Proposal(
        title=title,
        changes=changes or CHANGES[title],
        command="stepscope bench",
        fits=fits,
        peak_allocated_bytes=round(gib * GIB),
        step_ns=None if ms is None else round(ms * MS),
    )


def fit(*proposals: Proposal, workload: Workload = FP32, **more: Any) -> FitResult:
    """8 GiB and 100 ms as it is."""
    return fit_of(workload, *proposals, **more)


def run_with(plan: FitResult, **more: Any) -> Materials:
    """The timed run took 100 ms and 10 GiB."""
    measured = row(size="small", context=256, precision="fp32")
    assert measured.measurement is not None
    peak = msgspec.structs.replace(measured.measurement, peak_bytes=10 * GIB, peak_kind="cuda allocator")
    return Materials(name="a", bench=(msgspec.structs.replace(measured, measurement=peak),), plan=plan, **more)


def card_of(materials: Materials, *advice: Advice) -> MemoryCard:
    card = make_memory_card(Opening(materials), advice)
    assert card is not None
    return card


def titles(card: MemoryCard) -> list[str]:
    return [line.title for line in card.lines]


def find_line(card: MemoryCard, title: str) -> MemoryLine:
    return next(line for line in card.lines if line.title == title)


def finding(code: str, command: str, saving_ms: float | None = 30) -> Advice:
    saving = None if saving_ms is None else round(saving_ms * MS)
    found = Finding(code=code, title="a finding", evidence="e", fix=command, saving_ns=saving, share=0.3)
    return Advice(finding=found, fixes=(Copyable(label="this run with the fix", text=command),))


ALL = fit(
    predicted("2 micro-batches", 6, 110),
    predicted("checkpoint every block", 2, 125),
    predicted("flash attention", 5, 80),
    predicted("bf16", 6.5, 60),
    batch=40,
)


def test_what_saves_most_comes_first_and_the_batch_last() -> None:
    card = card_of(run_with(ALL))
    assert titles(card) == [
        "Checkpoint every block",
        "Flash attention",
        "2 micro-batches",
        "bf16",
        "Largest batch that fits: 40",
    ]
    assert [line.saving_bytes for line in card.lines] == [6 * GIB, 3 * GIB, 2 * GIB, round(1.5 * GIB), None]
    assert [line.adds_ns for line in card.lines] == [25 * MS, -20 * MS, 10 * MS, -40 * MS, None]
    assert card.lines[0].command == "stepscope report --size small --context 256 --checkpoint block"
    assert card.lines[-1].command == "stepscope report --size small --batch 40 --context 256"


def test_savings_are_differences_between_predictions() -> None:
    """The measured peak is 10 GiB, the predicted one 8 GiB."""
    card = card_of(run_with(fit(predicted("checkpoint every block", 2, 125))))
    assert card.lines[0].saving_bytes == 6 * GIB


def test_little_is_not_worth_a_line() -> None:
    card = card_of(run_with(fit(predicted("bf16", 7.7, 60), predicted("flash attention", 8.5, 80))))
    assert not card.lines


def test_a_setting_has_no_line_that_another_of_its_values_beats() -> None:
    worse = fit(predicted("checkpoint every block", 2, 125), predicted("checkpoint every 3 blocks", 3, 126))
    assert titles(card_of(run_with(worse))) == ["Checkpoint every block"]
    faster = fit(predicted("checkpoint every block", 2, 125), predicted("checkpoint every 3 blocks", 3, 110))
    assert titles(card_of(run_with(faster))) == ["Checkpoint every block", "Checkpoint every 3 blocks"]


def test_predictions_are_next_to_measurements() -> None:
    card = card_of(run_with(ALL))
    assert card.sentences == (
        "Peak memory: measured 10 GiB, predicted 8 GiB (−20.0%).",
        "Step time: measured 100 ms, predicted 100 ms (+0.0%), from 90 ms to 110 ms.",
    )


def test_savings_are_called_rough_if_the_prediction_is_far_off() -> None:
    assert any("savings are rough" in one for one in card_of(run_with(ALL)).notes)
    assert not any("rough" in one for one in card_of(run_with(fit(gib=9.9))).notes)


def test_measured_step_is_that_of_the_page() -> None:
    case = msgspec.structs.replace(small_row().case, workload=FP32)
    materials = replace(run_with(ALL), profile=record_ours(product, case=case), bench=())
    statements = list(read_page(tell(materials), explains_step=True, has_idle=True))
    assert any(one.where.startswith("card about memory") for one in statements)
    assert not list(check_same(statements))


def test_time_of_a_finding_is_not_predicted_again() -> None:
    command = "stepscope report --size small --context 256 --attention flash"
    line = find_line(card_of(run_with(ALL), finding("SS004", command)), "Flash attention")
    assert (line.adds_ns, line.finding, line.saving_bytes) == (-30 * MS, "SS004", 3 * GIB)


def test_finding_that_changes_more_has_the_time_of_its_own() -> None:
    preset = finding("SS004", "stepscope report --size small --context 256 --preset fast")
    line = find_line(card_of(run_with(ALL), preset), "Flash attention")
    assert (line.adds_ns, line.finding) == (None, "SS004")


def test_change_that_contradicts_a_finding_is_left_out() -> None:
    other = finding("SS004", "stepscope report --size small --context 256 --attention sdpa")
    assert "Flash attention" not in titles(card_of(run_with(ALL), other))
    assert find_proposed((other,), "attention") == "sdpa"
    assert find_proposed((other,), "precision") == ""


def test_what_bench_measured_is_not_predicted() -> None:
    materials = run_with(ALL)
    other = row(size="small", context=256, precision="bf16", step_ns=(70 * MS,) * 10)
    assert other.measurement is not None
    peak = msgspec.structs.replace(other.measurement, peak_bytes=7 * GIB, peak_kind="cuda allocator")
    materials = replace(materials, bench=(*materials.bench, msgspec.structs.replace(other, measurement=peak)))
    line = find_line(card_of(materials), "bf16")
    assert (line.saving_bytes, line.is_measured) == (3 * GIB, True)
    assert line.adds_ns == pytest.approx(-30 * MS, rel=0.05)


def test_step_that_did_not_run_has_what_makes_it_fit() -> None:
    both = predicted("bf16 + checkpoint every block", 90, 300, precision="bf16", checkpoint="1")
    plan = fit(both, predicted("bf16", 150, 200, fits=False), gib=200.0, batch=2)
    card = card_of(replace(run_with(plan), bench=()))
    assert titles(card) == ["bf16 + checkpoint every block", "Largest batch that fits: 2"]
    assert "It does not fit" in card.sentences[0]


def test_step_that_ran_fits_whatever_is_predicted() -> None:
    card = card_of(run_with(fit(predicted("bf16", 150, 90, fits=False), gib=200.0, batch=2)))
    assert titles(card) == ["bf16"]


def test_the_present_batch_is_not_advice() -> None:
    assert not card_of(run_with(fit(batch=FP32.batch))).lines


def test_findings_propose_no_batch_that_does_not_fit() -> None:
    larger = finding("SS010", "stepscope report --size small --batch 8 --context 256")
    assert drop_larger_batches(larger, fit(batch=8)) == larger
    assert not drop_larger_batches(larger, fit(batch=7)).fixes
    assert drop_larger_batches(larger, None) == larger


def test_another_workload_has_no_card() -> None:
    other = msgspec.structs.replace(FP32, batch=32)
    assert tell(run_with(fit(predicted("bf16", 5, 60), workload=other))).memory_card is None


def test_page_terminal_and_comparison_have_the_card() -> None:
    report = tell(run_with(ALL))
    page = write_site(report)
    assert "What would save memory" in page
    assert "<strong>−6.00 GiB</strong> · +25.0 ms · predicted" in page
    assert "2× the tokens per second · predicted" in page
    assert "advice on memory" not in page, "nothing is missing"
    said = [line for line in summarize_report(report) if line.startswith("memory: ")]
    assert "Checkpoint every block: −6.00 GiB, +25.0 ms, predicted" in said[0]
    assert "memory-advice" in [one.key for one in collect(report)[1]]
    both = tell_both(run_with(ALL), replace(run_with(ALL), name="b"))
    assert both.memory_card is not None


def test_a_foreign_trace_says_what_predictions_need() -> None:
    missing = lacks(tell(Materials(name="trace", profile=record(product))), "advice on memory")
    assert "needs the model itself" in missing.why
    assert missing.command == "stepscope plan --model my_model:build"
