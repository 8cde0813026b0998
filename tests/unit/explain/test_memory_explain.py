"""Memory profiles: categories of foreign snapshots from stacks, and sums that add up for any recording."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.api.rank_files import Opened
from stepscope.api.run import Run
from stepscope.errors import StepscopeError
from stepscope.explain.memory import MemoryProfile, make_memory_profile, timeline
from stepscope.explain.memory.answers import answer_memory
from stepscope.explain.memory.categories import stage_of_stack
from stepscope.explain.memory.memory_tables import PARTS, headline, leaks_table, make_part, memory_page
from stepscope.explain.memory.timeline import memory_timeline
from stepscope.findings import Axis, Timeline
from stepscope.recording import tables
from stepscope.recording.memory import reader as memory
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, MemoryFacts, Recording
from stepscope.spec import build_case
from stepscope.units import say_bytes
from tests.unit.snapshot_files import MIB, Entry, Model, empty, event, frame, write

FIXTURE = Path(__file__).parents[2] / "fixtures/h200_tiny_train.pickle.gz"
TORCH = "/venv/lib/python3.12/site-packages/torch"
STACKS = {
    "building": [frame(f"{TORCH}/nn/modules/linear.py", 90, "__init__"), frame("/lab/train.py", 3, "main")],
    "forward": [frame(f"{TORCH}/nn/functional.py", 12, "softmax"), frame("/lab/model.py", 30)],
    "backward": [frame(f"{TORCH}/autograd/graph.py", 8, "_engine_run_backward"), frame("/lab/train.py", 9, "main")],
    "optimizer": [frame(f"{TORCH}/optim/adamw.py", 50, "step"), frame("/lab/train.py", 11, "main")],
    "communication": [frame(f"{TORCH}/distributed/distributed_c10d.py", 40, "all_reduce")],
    "workspace": [frame("??", 0, "at::cuda::getCUDABlasLtWorkspace()"), frame("/lab/model.py", 30)],
    "unknown": [frame("/lab/train.py", 5, "load_batch")],
}


@dataclass(slots=True, kw_only=True)
class Training:
    """A user's training loop. Autograd's thread has no frames, unless `threaded` is false."""

    model: Model = field(default_factory=Model)
    threaded: bool = True
    stacks: bool = True

    def take(self, stage: str, size: int) -> int:
        bare = not self.stacks or (stage == "backward" and self.threaded)
        self.model.frames = [] if bare else STACKS[stage]
        return self.model.malloc(size)

    def run(self, steps: int, *, leaking: int = 0, once_in: int = -1) -> "Training":
        """Leak `leaking` bytes in every step, and keep one allocation in step `once_in`."""
        if not self.model.entries:
            self.take("building", 2 * MIB)
        for step in range(steps):
            kept = self.take("forward", 3 * MIB)
            self.model.free(self.take("forward", 512))
            if leaking:
                self.take("unknown", leaking)
            grads = [self.take("backward", 2 * MIB)]
            self.model.free(self.take("backward", MIB))
            self.model.free(kept)
            self.model.free(self.take("communication", 700_000))
            if step == 0:
                self.take("optimizer", 4 * MIB)
            if step == once_in:
                self.take("unknown", 6 * MIB)
            self.model.free(self.take("optimizer", 1000))
            self.model.free(grads.pop())
        return self

    def profile(self, folder: Path, first: int = 0) -> MemoryProfile:
        self.model.frames = []  # of the live blocks
        return read(self.model.snapshot(first), folder)


def read(content: Entry, folder: Path) -> MemoryProfile:
    return make_memory_profile(memory.read(write(content, folder / "theirs.pickle")))


@pytest.fixture(scope="module")
def ours() -> MemoryProfile:
    return make_memory_profile(open_recording(FIXTURE))


# --- By stacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "frames"),
    [
        ("forward", "torch/nn/functional.py:12 softmax\nlab/model.py:30 forward"),
        ("forward", "lab/model.py:30 forward\nlab/train.py:3 main"),
        ("backward", "torch/autograd/graph.py:8 _engine_run_backward\ntorch/_tensor.py:5 backward"),
        ("backward", "lab/kernels.py:3 backward"),
        ("optimizer", "torch/optim/adamw.py:50 step"),
        ("optimizer", "lab/muon_optimizer.py:50 update"),
        ("optimizer", "torch/distributed/optim/zero.py:5 step\ntorch/optim/optimizer.py:5 wrapper"),
        ("communication", "torch/distributed/fsdp/_runtime.py:4 _unshard"),
        ("communication", "torch/distributed/distributed_c10d.py:4 all_gather\ntorch/optim/adamw.py:50 step"),
        ("workspace", "??:0 getCUDABlasLtWorkspace\nlab/model.py:30 forward"),
        ("building", "torch/nn/modules/linear.py:90 __init__\nlab/train.py:3 main"),
        ("building", "torch/nn/modules/module.py:90 _apply\ntorch/nn/modules/module.py:95 to"),
        ("unknown", "lab/train.py:5 load_batch"),
        ("unknown", ""),
    ],
)
def test_stage_of_training_follows_from_the_stack(stage: str, frames: str) -> None:
    assert stage_of_stack(frames) == stage


@pytest.mark.parametrize("threaded", [True, False])
def test_categories_follow_from_stacks(tmp_path: Path, threaded: bool) -> None:
    profile = Training(threaded=threaded).run(3).profile(tmp_path)
    by_size = {
        row["requested_bytes"]: (row["category"], row["phase"]) for row in profile.allocations.iter_rows(named=True)
    }
    assert by_size == {
        2 * MIB: ("gradients", "backward"),
        3 * MIB: ("activations", "forward"),
        512: ("temporaries", "forward"),
        MIB: ("temporaries", "backward"),
        700_000: ("communication", None),
        4 * MIB: ("optimizer state", "optimizer"),
        1000: ("temporaries", "optimizer"),
    }
    assert profile.allocations["category"][0] == "parameters"
    for at in range(-1, profile.num_events):
        assert sum(size for _, size in profile.categories_at(at)) == profile.allocated_at(at)


def test_workspaces_and_unknown_allocations_have_a_category(tmp_path: Path) -> None:
    training = Training()
    training.take("workspace", 8 * MIB)
    training.take("unknown", 9 * MIB)
    assert training.profile(tmp_path).allocations["category"].to_list() == ["workspaces", "other"]


def test_without_any_stack_everything_is_unknown(tmp_path: Path) -> None:
    profile = Training(stacks=False).run(2).profile(tmp_path)
    assert profile.allocations["category"].unique().to_list() == ["unknown"]
    assert profile.allocations["phase"].null_count() == profile.allocations.height
    summary = profile.summary
    assert summary.phases == ()
    assert summary.peak_phase is None
    answers = {one.key: one for one in answer_memory(profile)}
    assert answers["peak"].sentence == "Memory peaks in an unknown phase; 100% of it is unknown."
    assert "no phase markers" in answers["phases"].sentence
    assert memory_page(profile).tables


def test_the_stages_of_a_foreign_snapshot_have_peaks(tmp_path: Path) -> None:
    profile = Training().run(3).profile(tmp_path)
    summary = profile.summary
    peaks = {one.phase: one.peak_bytes for one in summary.phases}
    assert list(peaks) == ["forward", "backward", "optimizer"]
    assert summary.peak_phase == "backward"
    assert peaks["backward"] == profile.peak_bytes == max(profile.totals)
    assert summary.steps == ()
    (note,) = make_part(profile, "phases", top=9).notes
    assert "no step markers" in note


# --- C++ frames, which PyTorch records by default ---------------------------------------------------------------------

UNWIND = [
    frame("??", 0, "torch::unwind::unwind()"),
    frame("??", 0, "torch::CapturedTraceback::gather(bool, bool, bool)"),
    frame(
        "??", 0, "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(signed char, unsigned long)"
    ),
    frame("??", 0, "at::detail::empty_generic(c10::ArrayRef<long>, c10::Allocator*, c10::ScalarType)"),
]
PYTHON = [frame("Objects/call.c", 214, "_PyObject_Call"), frame("Python/ceval.c", 5382, "_PyEval_EvalFrameDefault")]
ENGINE = [
    frame("??", 0, "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
    frame("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    frame("??", 0, "torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
]
FULL = {
    stage: [*UNWIND, *(ENGINE if stage == "backward" else [*stack[:1], *PYTHON, *stack[1:], *PYTHON])]
    for stage, stack in STACKS.items()
}


def test_stages_and_places_are_those_of_python_frames(tmp_path: Path) -> None:
    """The unwinder's own frames come first, autograd's thread has no Python frames, and a line may be unknown."""
    forward = [one | {"line": 2**64 - 1} if one["name"] == "forward" else one for one in FULL["forward"]]
    with patch.dict(STACKS, FULL | {"forward": forward}):
        profile = Training(threaded=False).run(3).profile(tmp_path)
    by_size = {
        row["requested_bytes"]: (row["category"], row["phase"]) for row in profile.allocations.iter_rows(named=True)
    }
    assert by_size[2 * MIB] == ("gradients", "backward")
    assert by_size[3 * MIB] == ("activations", "forward")
    assert by_size[4 * MIB] == ("optimizer state", "optimizer")
    assert profile.allocations["category"][0] == "parameters"
    said = {row[0]: row[2] for row in make_part(profile, "largest", top=9).rows}
    assert said[3 * MIB] == "activations at lab/model.py forward"
    assert said[4 * MIB] == "optimizer state at lab/train.py:11 main"
    assert "at MmBackward0" in {str(text)[-14:] for text in said.values()}
    assert not any(
        "unwind" in str(row[-1]) for row in make_part(profile, "largest", top=9).rows if "lab" in str(row[2])
    )


def test_place_without_python_frames_is_the_first_operator(tmp_path: Path) -> None:
    operator = frame("??", 0, "at::native::structured_mm_out_cuda::impl(at::Tensor const&, c10::ArrayRef<long>)")
    training = Training()
    with patch.dict(STACKS, {"unknown": [*UNWIND, operator, frame("??", 0, "start_thread")]}):
        training.take("unknown", MIB)
    (row,) = make_part(training.profile(tmp_path), "largest", top=9).rows
    assert row[2] == f"other at {operator['name']}"


def test_unknown_memory_is_not_reported_as_zero_parameters(tmp_path: Path) -> None:
    training = Training(stacks=False).run(2)
    began = len(training.model.entries)
    profile = training.run(2).profile(tmp_path, first=began)
    assert [one.category for one in profile.summary.categories] == ["unknown"]
    assert {one.is_from_before for one in profile.summary.largest} == {True, False}
    assert {row[4] for row in make_part(profile, "largest", top=20).rows} == {"before recording", None}
    (note, *_) = make_part(profile, "categories", top=9).notes
    assert "may include parameters, gradients" in note


# --- Leaks ------------------------------------------------------------------------------------------------------------


def test_leaking_call_is_named(tmp_path: Path) -> None:
    profile = Training().run(8, leaking=40_000).profile(tmp_path)
    (row,) = leaks_table(profile).rows
    block = 40_448  # rounded up by the allocator
    assert row[:4] == (block, 5 * block, 5, "lab/train.py:5 load_batch")
    assert leaks_table(profile) in memory_page(profile).tables


@pytest.mark.parametrize("once_in", [0, 1, 3])
def test_one_time_allocation_is_not_a_leak(tmp_path: Path, once_in: int) -> None:
    profile = Training().run(8, once_in=once_in).profile(tmp_path)
    assert leaks_table(profile).rows == ()
    assert leaks_table(profile).title not in [table.title for table in memory_page(profile).tables]


def test_leaks_need_enough_steps(tmp_path: Path) -> None:
    assert leaks_table(Training().run(5, leaking=40_000).profile(tmp_path)).rows == ()
    assert leaks_table(Training().run(6, leaking=40_000).profile(tmp_path)).rows


def test_recomputation_in_backward_does_not_start_a_step(tmp_path: Path) -> None:
    """Otherwise the steps of a checkpointed model would count twice and its leaks half."""
    training = Training(threaded=False)
    for _ in range(8):
        training.take("unknown", 40_000)
        kept = training.take("forward", 3 * MIB)
        training.model.free(training.take("backward", MIB))
        again = training.take("forward", MIB)
        training.model.free(training.take("backward", MIB))
        training.model.free(again)
        training.model.free(kept)
        training.model.free(training.take("optimizer", 1000))
    (row,) = leaks_table(training.profile(tmp_path)).rows
    assert row[2] == 5


def test_our_own_recording_leaks_nothing(ours: MemoryProfile) -> None:
    assert leaks_table(ours).rows == ()


# --- Memory from before the recording, and several devices ------------------------------------------------------------


def test_memory_from_before_the_recording_counts(tmp_path: Path) -> None:
    training = Training().run(2)
    began = len(training.model.entries)
    profile = training.run(2).profile(tmp_path, first=began)
    assert profile.before_bytes == training.model.allocated[began - 1]
    assert profile.totals.tolist() == training.model.allocated[began:]
    assert profile.peak_bytes == max(training.model.allocated[began:])
    before = profile.allocations.filter(pl.col("start_event").is_null())
    assert before["phase"].null_count() == before.height == 2
    assert sorted(before.select("category", "bytes").rows()) == [("parameters", 2 * MIB), ("unknown", 4 * MIB)]


def test_peak_before_the_first_event_is_drawn(tmp_path: Path) -> None:
    model = Model()
    held = [model.malloc(5 * MIB), model.malloc(3 * MIB)]
    began = len(model.entries)
    for address in held:
        model.free(address)
    profile = read(model.snapshot(began), tmp_path)
    assert (profile.peak_event, profile.peak_bytes) == (-1, 8 * MIB)
    summary = profile.summary
    assert (summary.before_bytes, summary.peak_step, summary.peak_phase, summary.peak_module) == (
        8 * MIB,
        None,
        None,
        None,
    )
    assert summary.reserved_bytes is None
    assert {one.bytes for one in summary.largest} == {5 * MIB, 3 * MIB}
    drawn = memory_timeline(profile)
    assert max(heights(drawn)) == 8 * MIB
    assert {piece.size for piece in drawn.pieces} == {5 * MIB, 3 * MIB}
    assert memory_page(profile).tables
    assert answer_memory(profile)


def test_snapshot_without_events_shows_live_memory(tmp_path: Path) -> None:
    model = Model(frames=STACKS["building"])
    model.malloc(5 * MIB)
    profile = read({**model.snapshot(), "device_traces": [[]]}, tmp_path)
    assert (profile.num_events, profile.peak_event, profile.peak_bytes) == (0, -1, 5 * MIB)
    assert dict(profile.categories_at(-1))["parameters"] == 5 * MIB
    assert memory_timeline(profile).times == ()
    assert memory_page(profile).tables


def test_empty_snapshot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="has no memory data"):
        read(empty(), tmp_path)
    with pytest.raises(StepscopeError, match="memory was not recorded"):
        make_memory_profile(Recording(manifest=Manifest(source="pytorch profiler", file="a")))


def test_device_with_the_highest_peak_is_shown(tmp_path: Path) -> None:
    """Not the device with the most allocated bytes in total."""
    holding, busy = Model(), Model()
    holding.malloc(30 * MIB)
    for _ in range(9):
        busy.free(busy.malloc(12 * MIB))
    content = {"segments": [*busy.segments(0), *holding.segments(1)], "device_traces": [busy.entries, holding.entries]}
    profile = read(content, tmp_path)
    assert (profile.device, profile.peak_bytes) == (1, 30 * MIB)
    assert profile.totals.tolist() == holding.allocated
    assert profile.reserved is not None
    assert profile.reserved.tolist() == holding.reserved


def test_segment_events_at_the_end_are_read(tmp_path: Path) -> None:
    giving, other = Model(), Model()
    for address in [giving.malloc(size) for size in (5 * MIB, 30 * MIB, 100)]:
        giving.free(address)
    giving.empty_cache()
    other.malloc(100)
    content = {"segments": other.segments(1), "device_traces": [giving.entries, other.entries]}
    profile = read(content, tmp_path)
    assert profile.device == 0
    assert profile.reserved is not None
    assert profile.reserved.tolist() == giving.reserved
    assert profile.summary.peak_reserved_bytes == max(giving.reserved)


# --- Summary, tables, answers -----------------------------------------------------------------------------------------


def test_the_summary_adds_up(ours: MemoryProfile) -> None:
    summary = ours.summary
    assert sum(one.bytes for one in summary.categories) == summary.peak_bytes
    assert sum(one.bytes for one in summary.modules) == summary.peak_bytes
    sizes = [one.bytes for one in summary.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert [one.step for one in summary.steps] == [0, 1, 2, 3]
    assert max(one.peak_bytes for one in summary.steps) == summary.peak_bytes
    assert {(one.step, one.phase) for one in summary.phases} == {
        (step, phase) for step in (0, 3) for phase in ("forward", "loss", "backward", "optimizer")
    }
    by_phase = {(one.step, one.phase): one for one in summary.phases}
    assert by_phase[0, "forward"].start_bytes == summary.before_bytes
    assert by_phase[3, "optimizer"].end_bytes == summary.steps[-1].end_bytes
    for one in summary.phases:
        assert one.start_bytes is not None
        assert one.end_bytes is not None
        assert one.peak_bytes >= max(one.start_bytes, one.end_bytes)
    assert summary.peak_phase == by_phase[3, "backward"].phase
    assert summary.reserved_bytes is not None
    assert summary.reserved_bytes >= summary.peak_bytes == summary.allocator_peak_bytes


def test_phases_of_an_accumulated_step_name_its_micro_batches(ours: MemoryProfile) -> None:
    def notes(passes: int) -> tuple[str, ...]:
        case = build_case({"batch": 6, "grad_accumulation": passes})
        return make_part(make_memory_profile(ours.recording.with_manifest(case=case)), "phases", top=9).notes

    assert notes(1) == ("forward includes the loss",)
    _, note = notes(3)
    assert "3 micro-batches" in note


@pytest.mark.parametrize("name", [name for name in PARTS if name != "findings"])
def test_every_part_is_a_table(ours: MemoryProfile, name: str) -> None:
    table = make_part(ours, name, top=3)
    assert table.title
    assert bool(table.rows) == (name != "leaks")
    keys = [column.key for column in table.columns]
    if name in ("categories", "modules", "layers"):
        total = [row[keys.index("bytes")] for row in table.rows if row[0] != "total"]
        assert sum(size for size in total if isinstance(size, int)) == ours.peak_bytes
    if name in ("modules", "layers"):
        assert len(table.rows) <= 4
    if name == "largest":
        assert len(table.rows) == 3


def test_trace_table_is_rejected_for_a_memory_snapshot(ours: MemoryProfile) -> None:
    with pytest.raises(StepscopeError, match="memory snapshot has no table `kernels`"):
        make_part(ours, "kernels", top=3)


def test_foreign_snapshot_has_no_saved_activations(tmp_path: Path) -> None:
    with pytest.raises(StepscopeError, match="no saved activations"):
        make_part(Training().run(2).profile(tmp_path), "saved", top=3)


def test_backward_frees_from_the_last_layer_to_the_first(ours: MemoryProfile) -> None:
    table = make_part(ours, "freed", top=9)
    assert [row[0] for row in table.rows if row[0] != "outside layers"] == ["1", "0"]
    span = ours.span(3, "backward")
    assert span is not None
    held = ours.alive_at(span[0] - 1).filter(pl.col("category") == "activations")["bytes"].sum()
    assert sum(row[1] for row in table.rows if isinstance(row[1], int)) == held


def test_headline_has_the_peak_and_warns_about_a_different_allocator_peak(ours: MemoryProfile) -> None:
    said = headline(ours)
    assert f"peak {say_bytes(ours.peak_bytes)} in step " in said
    assert "warning" not in said
    facts = ours.recording.manifest.memory
    assert facts is not None
    other = MemoryFacts(events=facts.events, allocator_peak_bytes=5, estimated_bytes=2048)
    said = headline(make_memory_profile(ours.recording.with_manifest(memory=other, notes=("cut",))))
    assert "warning: the allocator reports a peak of 5 bytes" in said
    assert "note: 2 KiB allocated before the recording is an estimate" in said
    assert "note: cut" in said


def test_every_question_has_an_answer_or_a_command(tmp_path: Path, ours: MemoryProfile) -> None:
    answers = {one.key: one for one in answer_memory(ours)}
    assert answers["peak"].figure == say_bytes(ours.peak_bytes)
    assert "from layer 1 to layer 0" in answers["freed"].sentence
    assert answers["freed"].figure == "from layer 1 to layer 0"
    assert answers["steps"].figure == f"No, {say_bytes(ours.summary.steps[0].peak_bytes)}"
    assert "optimizer state" in answers["steps"].sentence
    assert "cached for the next step" in answers["leftover"].sentence
    parameters = ours.allocations.filter((pl.col("category") == "parameters") & (pl.col("layer") == 0))["bytes"].sum()
    assert answers["gradients"].figure == say_bytes(int(parameters))
    foreign = {one.key: one for one in answer_memory(Training().run(3).profile(tmp_path))}
    assert list(foreign) == list(answers)
    for key in ("steps", "freed", "block", "gradients", "residual", "leftover"):
        assert foreign[key].status == "not in this recording"
        assert foreign[key].command.startswith("stepscope memory")
    assert foreign["largest"].sentence.startswith("The largest allocation at the peak (")


@pytest.mark.parametrize(
    ("size", "said"),
    [(5, "5 bytes"), (2048, "2 KiB"), (3 * MIB, "3 MiB"), (1536 * MIB, "1.5 GiB"), (80 << 30, "80 GiB")],
)
def test_byte_counts(size: int, said: str) -> None:
    assert say_bytes(size) == said


# --- Timeline ---------------------------------------------------------------------------------------------------------


def heights(drawn: Timeline) -> list[int]:
    return [sum(area.values[at] for area in drawn.areas) for at in range(len(drawn.times))]


@pytest.mark.parametrize("by", ["category", "module"])
@pytest.mark.parametrize("step", [None, 0, 3])
def test_timeline_contains_the_peak(ours: MemoryProfile, by: timeline.By, step: int | None) -> None:
    drawn = memory_timeline(ours, by=by, step=step)
    bounds = ours.span(step) if step is not None else (0, ours.num_events)
    assert bounds is not None
    assert max(heights(drawn)) == ours.peak_between(*bounds)[1]
    assert [one.label for one in drawn.stretches] == ["forward", "backward", "optimizer"] * (4 if step is None else 1)
    assert drawn.line is not None
    assert all(held >= taken for held, taken in zip(drawn.line.values, heights(drawn), strict=True))
    assert list(drawn.times) == sorted(drawn.times)
    names = {area.name for area in drawn.areas}
    assert ({"layer 0", "layer 1", "lm_head"} if by == "module" else {"parameters", "activations"}) <= names


def test_timeline_says_whose_time_it_shows_and_why_it_is_not_the_last_step(ours: MemoryProfile) -> None:
    """The CPU allocates ahead of the GPU: a phase takes another time in a picture of the step."""
    drawn = memory_timeline(ours, step=ours.last_plain_step)
    assert drawn.x == Axis(label="CPU time of allocations", unit="ms")
    assert "time is that of the CPU when it allocates and frees, not of kernels" in drawn.notes
    last = ours.steps[-1]
    is_noted = any(f"step {last + 1} was profiled" in note for note in drawn.notes)
    assert is_noted is (ours.last_plain_step != last)


def draw_step(profile: MemoryProfile, step: str) -> Timeline:
    figure = Run([Opened.of(Path("memory"), profile.recording)]).figure(step=step).figure
    assert isinstance(figure, Timeline)
    return figure


def test_steps_are_chosen_by_number_from_one(tmp_path: Path, ours: MemoryProfile) -> None:
    assert draw_step(ours, "1") == memory_timeline(ours, step=0)
    assert draw_step(ours, "all") == memory_timeline(ours)
    for step in ("0", "5", "99", "first", "-1"):
        with pytest.raises(StepscopeError, match=f"step `{step}` not found"):
            draw_step(ours, step)
    foreign = Training().run(2).profile(tmp_path)
    assert draw_step(foreign, "last") == memory_timeline(foreign)
    with pytest.raises(StepscopeError, match="no step markers"):
        draw_step(foreign, "2")


def test_snapshot_without_timestamps_is_drawn_by_event(tmp_path: Path) -> None:
    entries = [event(addr=0x1000 * at, time_us=None) for at in range(1, 5)]
    for entry in entries:
        del entry["time_us"]
    drawn = memory_timeline(read(empty(*entries), tmp_path))
    assert drawn.times == (0.0, 1.0, 2.0, 3.0)


CATEGORY = st.sampled_from(["parameters", "activations", "temporaries", "other"])
MODULE = st.sampled_from([None, "embedding", "blocks.0.ffn", "blocks.1.ffn"])
LIFE = st.tuples(st.integers(-1, 39), st.integers(1, 45), st.integers(1, 10**12), CATEGORY, MODULE)


def make_recording(lives: list[tuple[int, int, int, str, str | None]]) -> Recording:
    """An allocation from -1 on was made before the recording; one beyond the last event is never freed."""
    rows: list[dict[str, Any]] = [
        {
            "start_event": start if start >= 0 else None,
            "end_event": start + length if start + length < 40 else None,
            "start_ns": 1000 * start if start >= 0 else None,
            "bytes": size,
            "category": category,
            "module": module,
        }
        for start, length, size, category, module in lives
    ]
    frame_ = pl.DataFrame(rows, schema={name: tables.SCHEMAS["allocations"][name] for name in rows[0]})
    return Recording(
        manifest=Manifest(source="memory snapshot", memory=MemoryFacts(events=40)),
        allocations=tables.conform("allocations", frame_),
    )


def alive(lives: list[tuple[int, int, int, str, str | None]], at: int) -> int:
    return sum(size for start, length, size, *_ in lives if start <= at < start + length)


@settings(max_examples=150, deadline=None)
@given(
    lives=st.lists(LIFE, min_size=1, max_size=25),
    slices=st.integers(1, 50),
    most=st.integers(1, 30),
    by=st.sampled_from(["category", "module"]),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_areas_add_up_and_contain_their_allocations(
    lives: list[tuple[int, int, int, str, str | None]], slices: int, most: int, by: timeline.By, bounds: tuple[int, int]
) -> None:
    profile = make_memory_profile(make_recording(lives))
    sums = [alive(lives, at) for at in range(-1, 40)]
    assert [profile.before_bytes, *profile.totals.tolist()] == sums
    assert profile.peak_bytes == max(sums)
    start, end = min(bounds), max(bounds)
    assert profile.peak_between(start, end)[1] == max(sums[start : end + 1])
    with patch.object(timeline, "MOST_SLICES", slices), patch.object(timeline, "MOST_PIECES", most):
        drawn = memory_timeline(profile, by=by)
    assert len(drawn.times) == min(slices, 40)
    assert max(heights(drawn)) == max(sums)
    # Each slice shows its highest point; the first starts with what was allocated before.
    edges = [40 * at // len(drawn.times) for at in range(len(drawn.times) + 1)]
    for at, height in enumerate(heights(drawn)):
        assert height == max(sums[edges[at] + (at > 0) : edges[at + 1] + 1])
    assert len(drawn.pieces) <= most
    for number, area in enumerate(drawn.areas):
        for at, height in enumerate(area.values):
            inside = [one.size for one in drawn.pieces if one.area == number and one.start <= at < one.end]
            assert sum(inside) <= height
            assert sum(inside) == height or len(drawn.pieces) == most


def test_areas_of_the_chart_have_memory_in_them() -> None:
    profile = make_memory_profile(make_recording([(1, 5, 100, "gradients", None), (0, 40, 10, "parameters", None)]))
    assert [area.name for area in memory_timeline(profile).areas] == ["parameters", "gradients"]
