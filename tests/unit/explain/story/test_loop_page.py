"""The page of a script that `stepscope run` recorded: its name, its loop, and advice that fits a script."""

import pytest

from stepscope.explain.story import Materials, tell
from stepscope.explain.story.run import list_advice
from stepscope.findings import Bars, Lanes, Report, Table
from stepscope.render.site import write_site
from tests.unit.explain.story.random_recordings import build_loop
from tests.unit.explain.story.story_materials import all_there, not_measured, section
from tests.unit.loop_recordings import LoopPlan, profile_loop


def page_of(plan: LoopPlan | None = None) -> Report:
    return tell(Materials(name="today", profile=profile_loop(plan or LoopPlan(waits=True))))


def test_script_and_model_name_the_page() -> None:
    page = page_of()
    assert page.title == "train.py: GPT, training step, 2 micro-batches per step"
    assert page.sentence.startswith("GPT in train.py: ")
    assert [one.text for one in page.commands] == ["stepscope run train.py"]


def test_headline_names_the_input_if_it_is_the_first_finding() -> None:
    assert "the GPU waits for input" in page_of(LoopPlan(loading_us=2_000)).sentence
    assert "loading input takes" in page_of(LoopPlan(on_cpu=True)).sentence


@pytest.mark.parametrize("on_cpu", [True, False])
def test_loop_is_the_first_section(on_cpu: bool) -> None:
    page = page_of(LoopPlan(on_cpu=on_cpu))
    assert page.sections[0].key == "loop"
    parts = {one.key: one.part for one in page.sections[0].exhibits}
    chart = parts["loop-time"]
    assert isinstance(chart, Bars)
    assert chart.labels == (("CPU",) if on_cpu else ("CPU", "GPU"))
    assert ("loop-syncs" in parts) == (not on_cpu)


def test_run_of_stepscope_has_no_loop() -> None:
    assert "loop" not in [one.key for one in tell(all_there()).sections]


def test_environment_has_the_facts_of_the_loop() -> None:
    exhibits = {one.key: one.part for one in section(page_of(), "environment").exhibits}
    table = exhibits["environment-loop"]
    assert isinstance(table, Table)
    facts = {row[0]: row[1] for row in table.rows}
    assert facts["steps found by"] == "optimizer steps"
    assert facts["DataLoader"] == "TokenDataset with batch_size=8, num_workers=0; 2 batches per step"


def test_what_is_missing_is_explained_for_a_script() -> None:
    lines = not_measured(page_of())
    assert all("train.py" in one.why for one in lines), lines
    assert not any("--size" in one.command for one in lines)


def test_advice_is_code_to_paste() -> None:
    advice = list_advice(Materials(name="today", profile=profile_loop(LoopPlan(waits=True, host_us=20))))
    assert advice
    texts = [fix.text for one in advice for fix in one.fixes]
    assert any("DataLoader" in text for text in texts)
    assert not any("stepscope report" in text or "--size" in text for text in texts)


def test_timeline_shows_lines_of_code() -> None:
    (exhibit,) = section(page_of(), "timeline").exhibits
    assert isinstance(exhibit.part, Lanes)
    assert "source: model.py:12" in exhibit.part.lines


def test_phases_of_a_loop_are_in_order() -> None:
    page = page_of(LoopPlan(checkpoint_us=50))
    assert page.picture is not None
    assert page.picture.bars[0] is not None
    names = [phase.name for phase in page.picture.bars[0].phases]
    assert names == ["input", "forward", "loss", "backward", "clipping", "optimizer", "logging"]


def test_page_is_written() -> None:
    assert "waiting for the GPU" in write_site(page_of())


def test_explain_shows_the_loop_first() -> None:
    run, _ = build_loop(LoopPlan())
    tables = [table.title for table in run.page(overhead=True).tables]
    assert tables[0] == "Time of the training loop"
    assert tables[-1].startswith("train.py, ")
