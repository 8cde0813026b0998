"""The picture of a step: phases, classes and idle time add up to the clock, whatever overlaps."""

import pytest

from stepscope.explain.story import Materials, tell, tell_both
from stepscope.explain.story.sections.step_picture import draw_steps
from stepscope.explain.trace.profile import Profile
from stepscope.findings import StepBar, StepPhase
from stepscope.recording.store import Overhead
from tests.unit.explain.story.story_materials import addition, counted, product, record, record_ours, traced
from tests.unit.question_recordings import model_profile
from tests.unit.recordings import ADD, ALL_REDUCE, GEMM_BF16, Timeline


def bar_of(profile: Profile) -> StepBar:
    picture = draw_steps([profile], [""])
    assert picture is not None
    (bar,) = picture.bars
    assert bar is not None
    return bar


def times_of(phase: StepPhase) -> dict[str, float]:
    return dict(zip(phase.classes, phase.times_ns, strict=True))


@pytest.mark.parametrize(
    "profile",
    [
        model_profile(steps=3),
        record(product, addition, steps=4),
        record_ours(product, addition, overhead=Overhead(plain_ns=700_000, recorded_ns=1_100_000)),
        traced(),
    ],
)
def test_parts_add_up_to_the_clock(profile: Profile) -> None:
    bar = bar_of(profile)
    assert bar.step_ns == pytest.approx(profile.clock.step_ns)
    assert bar.busy_ns == pytest.approx(profile.clock.busy_ns)
    assert sum(phase.busy_ns for phase in bar.phases) == pytest.approx(bar.busy_ns)
    assert sum(phase.idle_ns for phase in bar.phases) == pytest.approx(bar.step_ns - bar.busy_ns)


def test_idle_time_belongs_to_the_phase_of_the_kernel_that_ends_it() -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        with timeline.phase("forward"):
            timeline.launch(GEMM_BF16, 100, op="aten::mm")
            timeline.wait()
        with timeline.phase("optimizer"):
            timeline.host(300)
            timeline.launch(ADD, 50, op="aten::add")
            timeline.wait()
    bar = bar_of(timeline.profile())
    idle = {phase.name: phase.idle_ns for phase in bar.phases}
    assert list(idle) == ["forward", "optimizer"]
    assert idle["optimizer"] >= 300_000
    assert idle["forward"] < 50_000


def test_phases_are_in_the_order_of_a_step() -> None:
    timeline = Timeline(host_us=5)
    with timeline.step():
        for phase in ("optimizer", "backward", "forward", "input", "loss"):
            with timeline.phase(phase):
                timeline.launch(GEMM_BF16, 100, op="aten::mm")
    names = [phase.name for phase in bar_of(timeline.profile()).phases]
    assert names == ["input", "forward", "loss", "backward", "optimizer"]


def test_hidden_communication_takes_no_time_from_compute() -> None:
    timeline = Timeline(host_us=1)
    with timeline.step(), timeline.phase("backward"):
        timeline.launch(ALL_REDUCE, 500, op="c10d::allreduce_", stream=20)
        timeline.launch(GEMM_BF16, 300, op="aten::mm")
        timeline.wait()
    (phase,) = bar_of(timeline.profile()).phases
    times = times_of(phase)
    assert times["GEMM"] == pytest.approx(300_000)
    assert times["communication"] == pytest.approx(200_000, abs=20_000)


def test_without_phases_the_bar_is_by_class() -> None:
    picture = draw_steps([traced()], [""])
    assert picture is not None
    assert picture.title == "The trace by kernel class"
    (bar,) = picture.bars
    assert bar is not None
    assert [phase.name for phase in bar.phases] == [""]
    assert not bar.is_step


def test_serialized_kernels_have_no_picture() -> None:
    assert draw_steps([counted()], [""]) is None
    assert tell(Materials(name="counters.csv", profile=counted())).picture is None


def test_a_comparison_has_a_bar_per_run() -> None:
    one, two = Materials(name="a", profile=record(product)), Materials(name="b", profile=record(product, addition))
    picture = tell_both(one, two).picture
    assert picture is not None
    assert len(picture.runs) == 2
    lengths = [bar.step_ns for bar in picture.bars if bar]
    assert lengths[1] > lengths[0]
    alone = tell_both(one, Materials(name="c")).picture
    assert alone is not None
    assert alone.bars[1] is None


def test_means_over_several_devices_say_so() -> None:
    timeline = Timeline()
    with timeline.step():
        for device in (0, 1):
            timeline.launch(GEMM_BF16, 100, device=device)
        timeline.wait()
    drawn = draw_steps([timeline.profile()], [""])
    assert drawn is not None
    assert "times are means over 2 GPUs" in drawn.notes
