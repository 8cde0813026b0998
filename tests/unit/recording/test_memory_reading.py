"""Reading labelled snapshots: real ones compared with the allocator, small ones for every kind of damage."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.recording.memory import reader as memory
from stepscope.recording.memory.labels import Mark, MemoryLabels, Operator, TensorFact
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Recording
from stepscope.spec import build_case
from tests.unit.snapshot_files import MIB, Model, frame, write

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ("h200_tiny_train", "h200_tiny_nested_bf16")
START_NS = 1_700_000_000_000_000_000


@pytest.fixture(scope="module", params=NAMES)
def profile(request: pytest.FixtureRequest) -> MemoryProfile:
    return make_memory_profile(open_recording(FIXTURES / f"{request.param}.pickle.gz"))


@pytest.fixture(scope="module")
def plain() -> MemoryProfile:
    return make_memory_profile(open_recording(FIXTURES / "h200_tiny_train.pickle.gz"))


# --- Recorded on a GPU ------------------------------------------------------------------------------------------------


def test_peak_equals_the_allocators_peak(profile: MemoryProfile) -> None:
    facts = profile.recording.manifest.memory
    assert facts is not None
    assert profile.peak_bytes == facts.allocator_peak_bytes
    assert profile.reserved is not None
    assert int(profile.reserved.max()) == facts.allocator_peak_reserved_bytes
    assert facts.estimated_bytes == 0
    assert profile.recording.manifest.notes == ()


def test_categories_add_up_after_every_event(profile: MemoryProfile) -> None:
    for event in range(-1, profile.num_events, 7):
        sizes = dict(profile.categories_at(event))
        assert sum(sizes.values()) == profile.allocated_at(event)
    by_category = [
        _sums(profile.allocations.filter(pl.col("category") == name), profile.num_events)
        for name in profile.allocations["category"].unique()
    ]
    assert [sum(sizes) for sizes in zip(*by_category, strict=True)] == profile.totals.tolist()


def _sums(rows: pl.DataFrame, num_events: int) -> list[int]:
    """Event by event, independent of the code under test."""
    changes = [0] * (num_events + 1)
    for start, end, size in rows.select("start_event", "end_event", "bytes").iter_rows():
        changes[start or 0] += size
        if end is not None:
            changes[end] -= size
    sums, total = [], 0
    for change in changes[:num_events]:
        total += change
        sums.append(total)
    return sums


@pytest.mark.parametrize("column", ["op", "module", "category", "name", "shape", "phase"])
def test_unprofiled_steps_copy_labels_from_the_profiled_one(profile: MemoryProfile, column: str) -> None:
    facts = profile.recording.manifest.memory
    assert facts is not None
    assert facts.watched_steps == (0, 3)
    assert facts.unmatched_steps == ()
    by_step = [
        profile.allocations.filter(pl.col("step") == step).sort("start_event")[column].to_list() for step in (1, 2, 3)
    ]
    assert by_step[0] == by_step[1] == by_step[2]
    assert any(by_step[0])


def test_copied_stacks_lead_to_lines_of_the_model(plain: MemoryProfile) -> None:
    taken = plain.allocations.filter((pl.col("step") == 1) & (pl.col("module") == "lm_head") & (pl.col("op") != ""))
    (forward,) = taken.filter(pl.col("phase") == "forward")["stack"].unique().to_list()
    assert plain.stack_text(forward).startswith("stepscope/nn/functional.py:")
    texts = plain.recording.stacks["frames"].to_list()
    assert not any("stepscope/measure/" in text or "torch/nn/modules/module.py" in text for text in texts)


def test_gradients_are_as_large_as_parameters_and_the_state_is_twice_that(profile: MemoryProfile) -> None:
    parameters = _requested(profile, -1, "parameters")
    shape = build_case({"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab": 200}).workload.model
    assert parameters == 4 * cost.parameters(shape).total  # type: ignore[arg-type]
    for step in profile.steps:
        backward, optimizer = profile.span(step, "backward"), profile.span(step, "optimizer")
        assert backward is not None
        assert optimizer is not None
        assert _requested(profile, backward[1] - 1, "gradients") == parameters
        assert _requested(profile, optimizer[1] - 1, "gradients") == 0
        assert _requested(profile, optimizer[1] - 1, "optimizer state") == 2 * parameters
    assert _requested(profile, profile.num_events - 1, "activations") == 0


def _requested(profile: MemoryProfile, event: int, category: str) -> int:
    return int(profile.alive_at(event).filter(pl.col("category") == category)["requested_bytes"].sum())


def test_library_workspaces_have_their_own_category(profile: MemoryProfile) -> None:
    """cuBLAS has one for the forward thread and one for autograd's."""
    kept = profile.allocations.filter(pl.col("category") == "workspaces")
    assert kept["bytes"].to_list() == [32 * MIB, 32 * MIB]
    assert kept["phase"].to_list() == ["forward", "backward"]
    assert kept["op"].to_list() == ["aten::mm", "aten::mm"]
    assert kept["end_event"].null_count() == 2


def test_recomputed_activations_and_autocast_copies_have_categories(profile: MemoryProfile) -> None:
    nested = "nested" in profile.recording.manifest.file
    in_backward = profile.allocations.filter((pl.col("phase") == "backward") & (pl.col("step") == 1))
    assert ("recomputed" in in_backward["name"].to_list()) == nested
    assert ("autocast copies" in in_backward["category"].to_list()) == nested


def test_spans_cover_the_events_in_order(profile: MemoryProfile) -> None:
    spans = profile.recording.spans
    assert profile.steps == (0, 1, 2, 3)
    assert profile.phases == ("forward", "loss", "backward", "optimizer")
    steps = [profile.span(step) for step in profile.steps]
    assert [bounds[0] for bounds in steps[1:] if bounds] == [bounds[1] for bounds in steps[:-1] if bounds]
    assert steps[0] is not None
    assert steps[-1] is not None
    assert (steps[0][0], steps[-1][1]) == (0, profile.num_events)
    for step in profile.steps:
        bounds = [profile.span(step, phase) for phase in ("forward", "backward", "optimizer")]
        assert [one[1] for one in bounds[:-1] if one] == [one[0] for one in bounds[1:] if one]
        loss, forward = profile.span(step, "loss"), bounds[0]
        assert loss is not None
        assert forward is not None
        assert forward[0] < loss[0] < loss[1] <= forward[1]
    assert spans["start_ns"][0] == 0
    assert (spans["end_ns"] > spans["start_ns"]).all()
    begins = spans.filter(pl.col("phase").is_null())["start_ns"].to_list()
    assert all(one < following for one, following in pairwise(begins))


def test_saved_activations_are_a_table(plain: MemoryProfile) -> None:
    saved = plain.recording.saved
    assert set(saved["kind"].unique()) == {"activation", "parameter", "buffer", "input"}
    assert {"blocks.0.ffn", "blocks.1.attention", "lm_head"} <= set(saved["module"].drop_nulls())


# --- Made by hand -----------------------------------------------------------------------------------------------------


PHASES = ("forward", "backward")
OPERATORS = (
    Operator(name="aten::mul", module="blocks.0"),
    Operator(name="aten::mm", module="lm_head"),
    Operator(name="c10d::allreduce_", module=""),
)


def mark_steps(count: int) -> tuple[Mark, ...]:
    """Six marks per step: starts and ends of step, forward and backward."""
    marks = []
    for step in range(count):
        inside = [(opens, "phase", phase) for phase in PHASES for opens in (True, False)]
        marks += [(True, "step", str(step)), *inside, (False, "step", str(step))]
    return tuple(
        Mark(opens=opens, kind=kind, value=value, time_ns=START_NS + 1000 * at)
        for at, (opens, kind, value) in enumerate(marks)
    )


def label(model: Model, **changes: Any) -> dict[str, Any]:
    """A labelled snapshot with one step; changes are applied unchecked."""
    labels = MemoryLabels(
        device="cuda:0",
        marks=mark_steps(1),
        operators=OPERATORS,
        facts=(),
        watched_steps=(0,),
        segments_at_start=[],
    )
    return {**model.snapshot(), "stepscope": msgspec.to_builtins(labels) | msgspec.to_builtins(changes)}


def run_step(model: Model, step: int = 0, *, size: int = 4000, watched: bool = True) -> None:
    """One allocation from forward into backward, and one in backward. Only a profiled step has operators and stacks."""
    first = 6 * step + 1
    model.frames = [frame("/lab/model.py", 7)] if watched else []
    kept = model.malloc(size, metadata=f"{first}:0" if watched else f"{first}")
    model.frames = [frame("/lab/model.py", 9, "backward")] if watched else []
    model.free(model.malloc(2 * size, metadata=f"{first + 2}:1" if watched else f"{first + 2}"))
    model.free(kept)


def make_step() -> Model:
    model = Model()
    run_step(model)
    return model


def read(content: object, folder: Path) -> Recording:
    return memory.read(write(content, folder / "made.pickle"))


def test_allocation_gets_the_place_in_its_metadata(tmp_path: Path) -> None:
    recording = read(label(make_step()), tmp_path)
    columns = ("step", "phase", "op", "module", "category")
    assert recording.allocations.select(columns).rows() == [
        (0, "forward", "aten::mul", "blocks.0", "temporaries"),
        (0, "backward", "aten::mm", "lm_head", "temporaries"),
    ]
    assert recording.manifest.memory is not None
    assert recording.manifest.memory.device == "cuda:0"


def test_stale_metadata_of_another_thread_is_ignored(tmp_path: Path) -> None:
    """Autograd's thread still has the metadata of the previous step, or none."""
    model = Model()
    for note in ("1:0", "3:1", "1:0", "", "2"):
        model.malloc(4000, metadata=note)
    allocations = read(label(model), tmp_path).allocations
    assert allocations["phase"].to_list() == ["forward", *["backward"] * 4]
    assert allocations["op"].to_list() == ["aten::mul", "aten::mm", None, None, None]


def test_facts_match_memory_by_operator_and_by_mark(tmp_path: Path) -> None:
    model = Model()
    weight = model.malloc(5000)
    before = model.segments()
    began = len(model.entries)
    run_step(model)
    model.free(model.malloc(4000, metadata="3:2"))
    taken = model.entries[began]["addr"]
    facts = [
        TensorFact(
            mark=0, operator=-1, address=weight, category="parameters", name="w", shape=(5, 250), dtype="float32"
        ),
        TensorFact(mark=2, operator=-1, address=weight, category="activations", name="input"),
        TensorFact(mark=2, operator=-1, address=taken, category="temporaries", name="ranks below"),
        TensorFact(mark=2, operator=0, address=taken, category="activations", name="result"),
    ]
    content = label(model, facts=facts, segments_at_start=before)
    content["device_traces"] = [model.entries[began:]]
    recording = read(content, tmp_path)
    found = recording.allocations.select("category", "name", "shape").rows()
    assert found == [
        ("parameters", "w", "[5,250]"),
        ("activations", "result", None),
        ("temporaries", None, None),
        ("communication", None, None),
    ]
    assert recording.allocations["start_event"].to_list()[0] is None


def make_steps(*sizes: int) -> dict[str, Any]:
    """The last step is profiled."""
    model = Model()
    for step, size in enumerate(sizes):
        run_step(model, step, size=size, watched=step == len(sizes) - 1)
    return label(model, marks=mark_steps(len(sizes)), watched_steps=[len(sizes) - 1])


def test_step_like_the_profiled_one_copies_its_labels(tmp_path: Path) -> None:
    recording = read(make_steps(4000, 4000, 4000), tmp_path)
    assert recording.allocations["op"].to_list() == ["aten::mul", "aten::mm"] * 3
    assert recording.allocations["stack"].to_list() == [0, 1] * 3
    assert recording.stacks["frames"].to_list() == ["lab/model.py:7 forward", "lab/model.py:9 backward"]
    assert recording.manifest.notes == ()


@pytest.mark.parametrize(
    ("sizes", "said"), [((4000, 6000, 4000), "1 step differs from"), ((6000, 6000, 4000), "2 steps differ from")]
)
def test_step_that_differs_copies_nothing_and_is_noted(tmp_path: Path, sizes: tuple[int, ...], said: str) -> None:
    recording = read(make_steps(*sizes), tmp_path)
    facts = recording.manifest.memory
    assert facts is not None
    assert facts.unmatched_steps == tuple(step for step, size in enumerate(sizes) if size != 4000)
    (note,) = recording.manifest.notes
    assert said in note
    odd = recording.allocations.filter(pl.col("step").is_in(facts.unmatched_steps))
    assert odd["op"].null_count() == odd.height == 2 * len(facts.unmatched_steps)


def test_events_with_and_without_frames_are_read(tmp_path: Path) -> None:
    content = label(make_step())
    for entry in content["device_traces"][0][2:]:
        del entry["frames"]
    recording = read(content, tmp_path)
    assert recording.allocations["stack"].to_list() == [0, None]
    assert recording.stacks.height == 1


def test_cpu_blocks_have_the_requested_size(tmp_path: Path) -> None:
    model = make_step()
    content = label(model, device="cpu", segments_at_start=[{"address": 64, "total_size": 100}])
    # The address is allocated again: the free was not recorded.
    content["device_traces"][0].append({**model.entries[1], "size": 30, "user_metadata": "5"})
    content["device_traces"][0].append({**model.entries[1], "size": 20, "user_metadata": "5"})
    recording = read(content, tmp_path)
    assert recording.allocations["bytes"].to_list() == [100, 4000, 8000, 30, 20]
    assert recording.allocations["end_event"].is_null().to_list() == [True, False, False, False, True]
    assert recording.allocations["device"].null_count() == 5
    assert not recording.segments.height
    assert make_memory_profile(recording).reserved is None


def test_times_start_at_the_first_step(tmp_path: Path) -> None:
    recording = read(label(make_step()), tmp_path)
    assert recording.spans.select("step", "phase", "start_ns", "end_ns").rows() == [
        (0, None, 0, 5000),
        (0, "forward", 1000, 2000),
        (0, "backward", 3000, 4000),
    ]


DAMAGED: dict[str, dict[str, Any]] = {
    "another schema": {"schema": "stepscope.memory/0"},
    "a schema that is a number": {"schema": 1},
    "no device": {"device": None},
    "marks as text": {"marks": "none"},
    "a short mark": {"marks": [[True, "step"]]},
    "a mark of a time beyond 64 bits": {"marks": [[True, "step", "0", 2**64], *mark_steps(1)[1:]]},
    "a step without a number": {"marks": [[True, "step", "first", 1], *mark_steps(1)[1:]]},
    "a step of a thousand digits": {"marks": [[True, "step", "9" * 5000, 1], *mark_steps(1)[1:]]},
    "fewer marks than notes": {"marks": mark_steps(1)[:1]},
    "fewer operators than notes": {"operators": OPERATORS[:1]},
    "operators as a dict": {"operators": {"aten::mm": 1}},
    "a fact at an address beyond 64 bits": {"facts": [[0, -1, 2**70, "parameters", "w"]]},
    "a fact of an operator beyond 64 bits": {"facts": [[0, 2**70, 5, "parameters", "w"]]},
    "a fact without a category": {"facts": [[0, 0, 5]]},
    "watched steps as text": {"watched_steps": ["0"]},
    "segments that are lists": {"segments_at_start": [[1, 2]]},
    "segments without a size": {"segments_at_start": [{"address": 4096}]},
    "a segment beyond 64 bits": {"device": "cpu", "segments_at_start": [{"address": 2**70, "total_size": 1}]},
    "a saved tensor beyond 64 bits": {
        "saved": [[2**70, "MulBackward0", "self", None, "[]", "float32", 1, 1, 1, "activation", None]]
    },
}


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED)
def test_damaged_labels_are_an_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    read(label(make_step()), tmp_path)
    with pytest.raises(StepscopeError, match=r"damaged|label version|do not match"):
        read(label(make_step(), **changes), tmp_path)


@pytest.mark.parametrize("note", ["6", "1:3", "9" * 5000, "1:" + "9" * 5000])
def test_metadata_that_points_nowhere_is_an_error(tmp_path: Path, note: str) -> None:
    model = Model()
    model.malloc(4000, metadata=note)
    with pytest.raises(StepscopeError, match="labels do not match the events: `"):
        read(label(model), tmp_path)


def test_labels_need_a_dict_one_device_and_events(tmp_path: Path) -> None:
    model = make_step()
    with pytest.raises(StepscopeError, match="expected a dict"):
        read({**model.snapshot(), "stepscope": [1]}, tmp_path)
    several = label(model)
    several["device_traces"].append(list(model.entries))
    with pytest.raises(StepscopeError, match="expected 1 device, got 2"):
        read(several, tmp_path)
    silent = label(model)
    silent["device_traces"], silent["segments"] = [[]], []
    with pytest.raises(StepscopeError, match="labels but no events"):
        read(silent, tmp_path)
