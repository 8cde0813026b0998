"""What `stepscope optimise` measured, on the page: a section of its own, and findings with the measured gain."""

from dataclasses import replace

import msgspec
import pytest

from stepscope.explain.story import Materials, tell, tell_both
from stepscope.explain.story.measured import add_measured, find_measured
from stepscope.explain.story.run import list_advice
from stepscope.findings import Bars, Finding, Missing, joint_saving
from stepscope.render.site import write_site
from stepscope.spec import build_case
from tests.unit.explain.story.story_materials import product, record_ours, small_row
from tests.unit.optimisations import CHANGES, change, optimisation

MS = 1_000_000
FAST = (*CHANGES[:2], change("graph", "kept", 30.0), change("operations", "kept", 24.0), change("norms", "kept", 20.0))


def run_with(changes: tuple[object, ...] = FAST, **settings: object) -> Materials:
    report = optimisation(changes, **settings)  # type: ignore[arg-type]
    return Materials(name="a", bench=(small_row(),), optimisation=report)


def test_kept_changes_are_findings_with_the_measured_gain() -> None:
    materials = run_with()
    found = {one.code: one for one in find_measured(materials)}
    assert {code: one.share for code, one in found.items()} == {
        "SS003": pytest.approx(24 / 60),  # compile and norms
        "SS001": pytest.approx(10 / 60),
        "SS004": pytest.approx(6 / 60),
    }
    assert materials.step_ns == 100 * MS, "the page's own step differs from the start"
    assert found["SS001"].saving_ns == pytest.approx(100 * MS / 6, rel=0.01)
    assert found["SS001"].title == "CUDA graphs make the step 17% shorter"
    assert "in a run of its own" in found["SS001"].evidence
    assert "40 ms → 30 ms" in found["SS001"].evidence
    assert all(one.is_measured for one in found.values())


def test_gains_add_up_to_that_of_all_changes() -> None:
    joined = add_measured((), find_measured(run_with()))
    joint = joint_saving(joined)
    assert joint is not None
    assert joint.share == pytest.approx(40 / 60)


def test_estimates_about_the_same_time_belong_to_the_measured_finding() -> None:
    estimated = Finding(code="SS001", title="Launch-bound", evidence="e", fix="f", saving_ns=MS, share=0.01)
    joined = add_measured((estimated,), find_measured(run_with()))
    assert "Launch-bound" not in [one.title for one in joined]
    assert any(part.title == "Launch-bound" for one in joined for part in one.also)


def test_the_fix_is_a_command_or_a_line_of_python() -> None:
    advice = list_advice(run_with())
    assert advice is not None
    assert {(fix.label, fix.text) for one in advice for fix in one.fixes} == {
        ("this run with the fix", "stepscope report --size small --context 256 --preset fast")
    }
    case = build_case({"hf": "gpt2", "context": 256, "precision": "bf16", "device": "cuda:0"})
    own = Materials(
        name="a",
        bench=(msgspec.structs.replace(small_row(), case=case),),
        optimisation=msgspec.structs.replace(optimisation(FAST), case=case),
    )
    advice = list_advice(own)
    assert advice is not None
    assert {fix.label for one in advice for fix in one.fixes} == {"in your own code"}
    assert "stepscope.optimise(model, optimizer, example=batch)" in advice[0].fixes[0].text


def test_another_case_gives_no_findings() -> None:
    assert find_measured(run_with(batch=8)) == ()


def test_the_section_has_bars_changes_and_checks() -> None:
    report = tell(Materials(name="a", profile=record_ours(product), optimisation=optimisation()))
    section = next(one for one in report.sections if one.key == "optimise")
    assert [one.key for one in section.exhibits] == ["optimise-steps", "optimise-changes", "optimise-check"]
    assert section.lead.startswith("60 ms per step before, 30 ms after: 2× faster")
    assert "a run of their own" in section.lead
    bars = section.exhibits[0].part
    assert isinstance(bars, Bars)
    assert bars.labels == ("start", "compile", "attention", "optimizer (no gain)", "norms (failed)")
    assert bars.values == ((60.0, 40.0, 30.0, 33.0, 20.0),)
    page = write_site(report)
    assert "the title of compile" in page
    assert "CUDA graphs need a GPU" in page


def test_a_page_without_it_says_nothing_unless_it_failed() -> None:
    plain = Materials(name="a", profile=record_ours(product))
    assert "optimise" not in [one.key for one in tell(plain).sections]
    why = Missing(
        what="optimized step", why="precision `fp16` cannot be optimized", command="stepscope optimise --help"
    )
    failed = tell(replace(plain, absent={"optimise": why}))
    assert why in next(one for one in failed.sections if one.key == "not-measured").missing


def test_two_runs_are_shown_side_by_side() -> None:
    first = Materials(name="a", profile=record_ours(product), optimisation=optimisation())
    both = tell_both(first, replace(first, name="b", optimisation=None))
    assert "optimise" in [one.key for one in both.sections]
    assert write_site(both)
