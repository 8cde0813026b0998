"""A request for memory that failed: read from any snapshot, with sums that add up, and what would have fit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stepscope
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.memory.memory_tables import make_part, memory_page
from stepscope.explain.memory.out_of_memory import (
    MemoryFailure,
    find_out_of_memory,
    lines_table,
    say_failure,
    say_rest_of_step,
    stack_table,
)
from stepscope.explain.rules.out_of_memory import RULES, find_fixes
from stepscope.explain.story.run import tell
from stepscope.explain.story.sources import Materials
from stepscope.findings import Finding
from stepscope.recording.memory import reader
from stepscope.recording.memory.labels import KEY, Mark, MemoryLabels, OutOfMemoryFacts, SavedRow, TensorFact
from stepscope.recording.store import load, save
from tests.unit.snapshot_files import MIB, Entry, Model, frame, write

GIB = 1 << 30
FORWARD = "torch/nn/modules/module.py:1 _call_impl\nlab/model.py:30 forward\nlab/train.py:42 main"
BACKWARD = "torch/autograd/graph.py:8 _engine_run_backward\nlab/train.py:43 main"
UPDATE = "torch/optim/adamw.py:5 _multi_tensor_adamw\ntorch/optim/adamw.py:50 step\nlab/train.py:44 main"
LOSS = f"torch/nn/functional.py:9 cross_entropy\n{FORWARD}"
# Sizes in MiB. A tensor has a category and, as far as they are known, a name, a module, a shape and a dtype.
Tensor = tuple[float, str, dict[str, Any]]


def fail(
    folder: Path,
    tensors: Sequence[Tensor],
    saved: Sequence[SavedRow] = (),
    free_blocks: Sequence[float] = (),
    **facts: Any,
) -> MemoryFailure:
    """A process that held these tensors when a request failed. Free blocks lie between two of them."""
    model = Model()
    addresses = [model.malloc(round(size * MIB)) for size, _, _ in tensors]
    holes = [(model.malloc(round(size * MIB)), model.malloc(512)) for size in free_blocks]
    for hole, _ in holes:
        model.free(hole)
    reserved = model.reserved[-1] if model.reserved else 0
    asked = {"asked_bytes": 2 * GIB, "free_bytes": GIB, "stack": FORWARD, **facts}
    total = {"total_bytes": reserved + asked["free_bytes"] + 500 * MIB, "line": "train.py:42", **asked}
    model.run_out(asked["asked_bytes"])
    content = model.snapshot()
    labels = MemoryLabels(
        device="cuda:0",
        marks=(Mark(opens=True, kind="phase", value="out of memory", time_ns=1),),
        operators=(),
        facts=tuple(
            TensorFact(mark=0, operator=-1, address=address, category=category, **{"name": "tensor", **more})
            for address, (_, category, more) in zip(addresses, tensors, strict=True)
        ),
        watched_steps=(),
        segments_at_start=None,
        saved=tuple(saved),
        oom=OutOfMemoryFacts(**total),
    )
    content[KEY] = msgspec.to_builtins(labels)
    return read(content, folder)


def read(content: Entry, folder: Path) -> MemoryFailure:
    found = find_out_of_memory(make_memory_profile(reader.read(write(content, folder / "oom.pickle"))))
    assert found is not None
    return found


def layers(count: int, reached: int, mib: float, *, dtype: str = "float32") -> list[Tensor]:
    """A model of `count` layers with 100 MiB of weights each, of which the first have saved activations."""
    weights = [(100.0, "parameters", {"name": f"blocks.{at}.up.weight", "dtype": "float32"}) for at in range(count)]
    kept = [
        (
            mib,
            "activations",
            {"name": "AddmmBackward0.mat1", "module": f"blocks.{at}.up", "shape": (8, 9), "dtype": dtype},
        )
        for at in range(reached)
    ]
    return [*weights, *kept]


def finding(found: MemoryFailure, code: str) -> Finding | None:
    return next((one for one in find_fixes(found) if one.code == code), None)


def require(found: MemoryFailure, code: str) -> Finding:
    one = finding(found, code)
    assert one is not None, [other.code for other in find_fixes(found)]
    return one


# --- Reading ----------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_another_tool_with_an_oom_event_is_explained(tmp_path: Path) -> None:
    model = Model()
    model.frames = [frame("/lab/train.py", 42, "main")]
    model.malloc(64 * MIB)
    kept = model.malloc(32 * MIB)
    model.run_out(3 * GIB)
    model.free(kept)  # what unwinding frees does not count
    found = read(model.snapshot(), tmp_path)
    assert (found.facts.asked_bytes, found.facts.free_bytes) == (3 * GIB, 4096)
    assert found.held_bytes == 96 * MIB
    assert found.place == "lab/train.py:42"
    assert found.facts.largest_free_bytes is None
    assert say_failure(found).startswith(
        "CUDA ran out of memory at lab/train.py:42: asked for 3 GiB, 4 KiB free; 96 MiB"
    )


def test_the_last_of_several_failures_counts(tmp_path: Path) -> None:
    model = Model()
    model.malloc(8 * MIB)
    model.run_out(GIB)
    model.malloc(8 * MIB)
    model.run_out(2 * GIB)
    found = read(model.snapshot(), tmp_path)
    assert (found.facts.asked_bytes, found.held_bytes) == (2 * GIB, 16 * MIB)


def test_a_snapshot_without_a_failure_is_not_one(tmp_path: Path) -> None:
    model = Model()
    model.malloc(8 * MIB)
    profile = make_memory_profile(reader.read(write(model.snapshot(), tmp_path / "a.pickle")))
    assert find_out_of_memory(profile) is None
    assert tell(Materials(name="a", memory=profile)).sections[0].key != "oom"


def test_a_recording_on_disk_says_the_same(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(4, 4, 300), old_graph_bytes=50 * MIB, num_old_graphs=4)
    save(found.profile.recording, tmp_path / "oom")
    again = find_out_of_memory(make_memory_profile(load(tmp_path / "oom")))
    assert again is not None
    assert again.facts == found.facts
    assert find_fixes(again) == find_fixes(found)


def test_stacks_of_blocks_name_lines_when_events_have_none(tmp_path: Path) -> None:
    model = Model()
    model.malloc(8 * MIB)
    model.frames = [frame("/lab/data.py", 5, "load")]
    model.run_out(GIB)
    found = read(model.snapshot(), tmp_path)
    assert [row[:2] for row in lines_table(found, top=5).rows] == [("lab/data.py:5 load", 8 * MIB)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40 * MIB), st.sampled_from(("parameters", "activations", "temporaries", "")), st.booleans()
        ),
        max_size=30,
    ),
    st.integers(0, 20),
)
def test_categories_add_up_to_what_the_allocator_held(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[int, str, bool]], lost: int
) -> None:
    """With any part of the history missing."""
    model = Model()
    facts = []
    for size, category, is_freed in tensors:
        address = model.malloc(size)
        if category:
            facts.append(TensorFact(mark=0, operator=-1, address=address, category=category, name="x"))
        if is_freed:
            model.free(address)
    model.run_out(GIB)
    held, reserved = model.allocated[-1], model.reserved[-1]
    content = model.snapshot(first=min(lost, len(model.entries)))
    labels = MemoryLabels(
        device="cuda:0",
        marks=(Mark(opens=True, kind="phase", value="x", time_ns=1),),
        operators=(),
        facts=tuple(facts),
        watched_steps=(),
        segments_at_start=None,
        oom=OutOfMemoryFacts(asked_bytes=GIB, free_bytes=0, total_bytes=reserved),
    )
    content[KEY] = msgspec.to_builtins(labels)
    found = read(content, tmp_path_factory.mktemp("oom"))
    assert found.held_bytes == sum(found.categories.values()) == held
    assert (found.reserved_bytes or 0) == reserved
    assert sum(size for _, size in found.profile.share_at(found.event, "module")) == held


def test_a_process_that_held_nothing_has_a_page(tmp_path: Path) -> None:
    found = fail(tmp_path, [], asked_bytes=200 * GIB)
    assert "PyTorch held nothing" in say_failure(found)
    report = tell(Materials(name="a", memory=found.profile))
    assert report.sections[0].key == "oom"
    assert memory_page(found.profile).headline.startswith("CUDA ran out of memory")


# --- The whole step ---------------------------------------------------------------------------------------------------


def test_later_layers_and_missing_states_count(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(10, 3, 100), missing_state_bytes=2000 * MIB, optimizers=("AdamW",))
    assert found.phase == "forward"
    assert found.layer_bytes == 300 * MIB / 2.5
    assert found.activation_bytes == pytest.approx(10 * 120 * MIB)
    assert found.fixed_bytes == 1000 * MIB + 2000 * MIB
    assert "about 900 MiB of activations were still to come; AdamW had not created 1.95 GiB" in say_rest_of_step(found)
    usable = 0.95 * (1300 * MIB + GIB)
    assert found.need_bytes == pytest.approx(max(1200 * MIB + 3000 * MIB - usable, GIB), rel=0.01)


def test_backward_is_not_extrapolated(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(10, 3, 100), stack=BACKWARD)
    assert found.phase == "backward"
    assert found.activation_bytes == 300 * MIB
    assert say_rest_of_step(found) == ""


def test_a_limit_of_the_process_is_the_limit(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(2, 2, 100), free_bytes=50 * GIB, limit_bytes=500 * MIB)
    assert found.room_bytes == max(0, 500 * MIB - (found.reserved_bytes or 0))
    assert "free of 500 MiB allowed" in say_failure(found)


# --- What would fit ---------------------------------------------------------------------------------------------------


def test_old_graphs_are_a_leak(tmp_path: Path) -> None:
    one = require(fail(tmp_path, layers(2, 2, 900), num_old_graphs=5, old_graph_bytes=1700 * MIB), "SS101")
    assert one.title == "5 older graphs of scalars such as losses hold 1.66 GiB of activations"
    assert one.saving_bytes == 1700 * MIB
    assert finding(fail(tmp_path, layers(2, 2, 900), num_old_graphs=5, old_graph_bytes=1), "SS101") is None


def test_fragmentation_that_expandable_segments_would_solve(tmp_path: Path) -> None:
    tensors = layers(2, 2, 100)
    request: dict[str, Any] = {"asked_bytes": 150 * MIB, "free_bytes": 30 * MIB, "stack": BACKWARD}
    found = fail(tmp_path, tensors, free_blocks=(85, 85), **request)
    one = require(found, "SS102")
    assert one.is_enough
    assert one.saving_bytes == 160 * MIB  # whole pieces of 20 MiB
    assert 85 * MIB <= (found.facts.largest_free_bytes or 0) < 87 * MIB  # with what rounding leaves
    assert find_fixes(found)[0] == one
    assert finding(fail(tmp_path, tensors, **request), "SS102") is None


def test_gradients_in_forward_can_be_freed(tmp_path: Path) -> None:
    tensors: list[Tensor] = [*layers(2, 2, 100), (3000, "gradients", {"name": "blocks.0.up.weight"})]
    assert require(fail(tmp_path, tensors), "SS103").is_enough
    assert finding(fail(tmp_path, tensors, stack=BACKWARD), "SS103") is None


def test_an_update_with_temporaries_can_be_fused(tmp_path: Path) -> None:
    tensors: list[Tensor] = [*layers(2, 0, 0), (700, "temporaries", {})]
    one = require(fail(tmp_path, tensors, stack=UPDATE), "SS104")
    assert one.saving_bytes == 700 * MIB + 2 * GIB
    assert "fused=True" in one.fix
    assert finding(fail(tmp_path, tensors), "SS104") is None


def test_logits_and_their_copies(tmp_path: Path) -> None:
    shape = {"shape": (8192, 50304), "dtype": "float32"}
    tensors: list[Tensor] = [
        *layers(2, 2, 100),
        (1572, "activations", {"name": "LogSoftmaxBackward0.result", **shape}),
        (1572, "temporaries", {"name": "logits in forward", **shape}),
        (500, "other", {"name": "x", "shape": (10, 7)}),
    ]
    one = require(fail(tmp_path, tensors, stack=BACKWARD), "SS105")
    assert one.title == "Logits and their copies in the loss take 3.07 GiB"
    assert one.saving_bytes == pytest.approx(2 * 1572 * MIB * 7 / 8)
    # The failed request is one of them while the loss is computed.
    asked = require(fail(tmp_path, tensors[:-1], stack=LOSS), "SS105")
    assert asked.saving_bytes == pytest.approx((2 * 1572 * MIB + 2 * GIB) * 7 / 8)
    assert finding(fail(tmp_path, [*layers(2, 2, 100), tensors[-1]], stack=LOSS), "SS105") is None


def test_the_number_of_micro_batches_is_solved_from_the_sizes(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(4, 4, 2000), asked_bytes=4000 * MIB, free_bytes=1000 * MIB)
    one = require(found, "SS106")
    # 12,000 MiB grow with the batch, 400 do not, and 95% of 9,400 are usable: 71% of the batch fits.
    assert one.title == "2 micro-batches with accumulated gradients would fit"
    assert one.is_enough
    assert "71% of the batch fits at a time" in one.evidence
    tight: list[Tensor] = [*layers(4, 4, 2000), (20000, "optimizer state", {"name": "a.b.exp_avg"})]
    eight = require(fail(tmp_path, tight, missing_state_bytes=7000 * MIB, free_bytes=1000 * MIB), "SS106")
    # 10,000 MiB grow, 27,400 do not, and 95% of 29,400 are usable: 5.3% of the batch fits.
    assert eight.title == "19 micro-batches with accumulated gradients would fit"
    assert ".chunk(19)" in eight.fix


def test_no_batch_is_small_enough_if_the_rest_does_not_fit(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(4, 1, 100), missing_state_bytes=20 * GIB, optimizers=("AdamW",))
    assert finding(found, "SS106") is None
    one = require(found, "SS109")
    assert one.saving_bytes == 15 * GIB
    assert one.is_enough is (found.need_bytes <= 15 * GIB)


def test_float32_activations_could_be_half(tmp_path: Path) -> None:
    one = require(fail(tmp_path, layers(4, 4, 1000), stack=BACKWARD), "SS107")
    assert one.saving_bytes == 2000 * MIB - 200 * MIB
    assert finding(fail(tmp_path, layers(4, 4, 1000, dtype="bfloat16")), "SS107") is None


def saved_rows(count: int, mib: float) -> list[SavedRow]:
    return [
        SavedRow(
            node=10 * layer + at,
            op="AddmmBackward0",
            argument="mat1",
            module=f"blocks.{layer}.up",
            shape="[8]",
            dtype="float32",
            bytes=8,
            storage=10 * layer + at,
            storage_bytes=round(size * MIB),
            kind="activation",
            name=None,
        )
        for layer in range(count)
        for at, size in enumerate((mib, 20 * mib))
    ]


def test_checkpointing_keeps_the_inputs_and_one_layer(tmp_path: Path) -> None:
    tensors = layers(4, 4, 1000)
    one = require(fail(tmp_path, tensors, saved_rows(4, 50)), "SS108")
    assert one.saving_bytes == 3 * 1000 * MIB - 4 * 50 * MIB
    unknown = require(fail(tmp_path, tensors), "SS108")
    assert unknown.saving_bytes is None
    assert unknown.is_enough is None
    used: list[Tensor] = [*tensors, (10, "activations", {"name": "checkpoint.input[0]", "module": "blocks.0.up"})]
    assert finding(fail(tmp_path, used), "SS108") is None


def test_ranks_can_share_the_state(tmp_path: Path) -> None:
    tensors: list[Tensor] = [*layers(2, 2, 100), (4000, "optimizer state", {"name": "a.b.exp_avg", "dtype": "float32"})]
    one = require(fail(tmp_path, tensors, world_size=8), "SS109")
    assert one.saving_bytes == 3500 * MIB
    assert "ZeroRedundancyOptimizer" in one.fix
    assert require(fail(tmp_path, tensors), "SS109").saving_bytes == 3000 * MIB


def test_memory_of_others_is_a_remark(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(2, 2, 100), total_bytes=80 * GIB)
    one = require(found, "SS110")
    assert one.is_remark
    assert finding(fail(tmp_path, layers(2, 2, 100)), "SS110") is None


def test_a_fix_that_is_not_enough_says_what_is_lacking(tmp_path: Path) -> None:
    tensors: list[Tensor] = [*layers(2, 2, 100), (300, "gradients", {"name": "blocks.0.up.weight"})]
    one = require(fail(tmp_path, tensors, asked_bytes=8 * GIB), "SS103")
    assert not one.is_enough
    assert "short of what a step needs" in one.evidence


def test_empty_cache_is_never_advised() -> None:
    assert not any("empty_cache" in text for rule in RULES for text in (rule.paste, rule.action, *rule.own))


# --- The page ---------------------------------------------------------------------------------------------------------


def test_the_page_opens_with_the_failure(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(4, 4, 1000), script="train.py", device_name="NVIDIA H200")
    report = tell(Materials(name="oom.pickle", memory=found.profile))
    assert report.title == "train.py: out of memory"
    assert report.sentence == (
        "CUDA ran out of memory at train.py:42: asked for 2 GiB, 1 GiB free of 5.79 GiB; 4.3 GiB held, 91% of it "
        "activations."
    )
    assert [fact.key for fact in report.facts][:3] == ["asked", "free", "held"]
    assert report.sections[0].key == "oom"
    keys = [exhibit.key for exhibit in report.sections[0].exhibits]
    assert keys == ["oom-request", "oom-categories", "oom-modules", "oom-layers", "oom-largest", "oom-stack"]
    assert report.soundness.verdict == "sound"
    assert report.advice is not None
    assert report.advice[0].finding.is_enough
    assert report.advice[0].fixes[0].label == "in your own code"


def test_a_failure_next_to_another_memory_recording_is_shown(tmp_path: Path) -> None:
    found = fail(tmp_path, layers(4, 4, 1000))
    model = Model()
    model.malloc(8 * MIB)
    other = make_memory_profile(reader.read(write(model.snapshot(), tmp_path / "b.pickle")))
    report = tell(Materials(name="a", memory=other, oom=found.profile))
    assert report.sections[0].key == "oom"
    assert "CUDA ran out of memory" in report.sentence


def test_a_report_of_a_file_writes_the_page(tmp_path: Path) -> None:
    found = fail(tmp_path, [*layers(4, 4, 1000), (10, "gradients", {"name": "blocks.0.up.weight"})])
    page = stepscope.report(tmp_path / "oom.pickle", tmp_path / "page.html")
    assert page.report.sections[0].key == "oom"
    text = (tmp_path / "page.html").read_text()
    assert "enough for a whole step" in text
    assert "not enough alone" in text
    assert make_part(found.profile, "findings", top=5).rows
    assert len(stack_table(found).rows) == 3
