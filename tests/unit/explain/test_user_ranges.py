"""Ranges that users put around their code: their time on the device, and what their names say."""

from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.questions import answer
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.ranges_table import ranges_table, short_ranges
from stepscope.recording.readers import kineto
from tests.unit.kineto_files import AUTOGRAD, event, kernel, launch, op, training_step, write_trace
from tests.unit.question_recordings import GEMM, SOFTMAX, Tape


def by_range(profile: Profile) -> dict[str, dict[str, object]]:
    table = ranges_table(profile)
    keys = [column.key for column in table.columns]
    return {str(row[0]): dict(zip(keys, row, strict=True)) for row in table.rows}


def facts(profile: Profile, *columns: str) -> dict[str, tuple[object, ...]]:
    return {row[0]: row[1:] for row in profile.kernels.select("name", *columns).iter_rows()}


def launched(name: str, start: int, number: int, *, thread: int = 100, took: str = "5.000") -> list[str]:
    return [
        op("aten::mm", f"{start}.000", "8.000", thread=thread),
        launch(f"{start + 1}.000", "2.000", number, thread=thread),
        kernel(name, f"{5000 + 10 * number}.000", took, number),
    ]


def read(tmp_path: Path, events: list[str]) -> Profile:
    return make_profile(kineto.read(write_trace(tmp_path / "t.json", events)))


def test_nested_ranges_have_total_and_own_time(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "outer", "0.000", "100.000"),
        event("user_annotation", "inner", "10.000", "50.000"),
        event("user_annotation", "nccl:all_reduce", "0.000", "200.000"),
        event("user_annotation", "## Call CompiledFxGraph fabc ##", "0.000", "200.000"),
        *launched("ampere_sgemm_128x64_tn", 20, 1, took="30.000"),
        *launched("ampere_sgemm_128x64_nn", 70, 2, took="10.000"),
        *launched("ampere_sgemm_128x64_nt", 150, 3, took="60.000"),
    ]
    found = by_range(read(tmp_path, events))
    assert list(found) == ["outer", "inner"]  # the longest first, and only the user's own
    times = {name: (row["inside"], row["kernel_ms"], row["own_ms"], row["share"]) for name, row in found.items()}
    assert times == {"outer": ("", 0.04, 0.01, 0.4), "inner": ("outer", 0.03, 0.03, 0.3)}
    assert found["outer"]["mostly"] == "GEMM 100%"
    assert "ranges contain each other" in ranges_table(read(tmp_path, events)).notes[0]
    assert "contain" not in ranges_table(read(tmp_path, [events[0], *events[4:]])).notes[0]


def test_backward_belongs_to_the_range_that_waits_for_it_and_to_that_of_its_forward(tmp_path: Path) -> None:
    ranges = [("my forward code", "1015.000", "40.000"), ("my other code", "1250.000", "200.000")]
    before = training_step()[-1]  # the only kernel that was launched before
    events = [one for one in training_step() if one != before]
    found = by_range(read(tmp_path, [*events, *(event("user_annotation", *one) for one in ranges)]))
    assert (found["my forward code"]["kernel_ms"], found["my forward code"]["backward_ms"]) == (0.040_125, 0.08)
    # On autograd's thread, inside two nodes: the gradient, and its accumulation.
    assert (found["my other code"]["kernel_ms"], found["my other code"]["backward_ms"]) == (0.0815, None)


def test_a_page_shows_the_table_if_it_is_short(tmp_path: Path) -> None:
    assert short_ranges(read(tmp_path, training_step())) == []
    few, many = (
        [
            one
            for i in range(count)
            for one in (
                event("user_annotation", f"range {i:c<3}", f"{100 * i}.000", "50.000"),
                *launched("gemm", 100 * i + 5, i),
            )
        ]
        for count in (12, 13)
    )
    assert len(short_ranges(read(tmp_path, few))) == 1
    assert short_ranges(read(tmp_path, many)) == []


def test_pipeline_codes_name_phases_and_modules(tmp_path: Path) -> None:
    """`mlp(F)`, `mlp(B)` and `mlp(W)`: forward, gradients of inputs, gradients of weights."""
    node = {"Sequence number": 3, "Fwd thread id": 1}
    events = [
        event("user_annotation", "layer 1", "0.000", "60.000"),
        event("user_annotation", "mlp(F)", "10.000", "40.000"),
        op("aten::mm", "20.000", "10.000", **{"Sequence number": 3}),
        launch("21.000", "2.000", 1),
        op("autograd::engine::evaluate_function: MmBackward0", "200.000", "60.000", thread=AUTOGRAD, **node),
        event("user_annotation", "mlp(B)", "205.000", "50.000", tid=AUTOGRAD),
        op("aten::mm", "210.000", "10.000", thread=AUTOGRAD),
        launch("211.000", "2.000", 2, thread=AUTOGRAD),
        event("user_annotation", "attn(W)", "300.000", "50.000"),
        op("aten::mm", "310.000", "10.000"),
        launch("311.000", "2.000", 3),
        *(kernel(f"gemm_{i}", f"{500 + 10 * i}.000", "5.000", i) for i in (1, 2, 3)),
    ]
    profile = read(tmp_path, events)
    assert facts(profile, "phase", "module", "layer", "recomputed") == {
        "gemm_1": ("forward", "layer.1.mlp", 1, False),
        "gemm_2": ("backward", "layer.1.mlp", 1, False),
        "gemm_3": ("backward", "attn", None, False),
    }
    assert profile.coverage()["module"] == 1


def test_modules_that_were_recorded_come_before_names_of_ranges(tmp_path: Path) -> None:
    profile = read(tmp_path, [*training_step(), event("user_annotation", "mlp(F)", "1000.000", "500.000")])
    assert facts(profile, "module")["ampere_sgemm_128x64_tn"] == ("Block_0.Linear_0",)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("forward_step", "forward"),
        ("model_forward", "forward"),
        ("loss.backward", "backward"),
        ("bwd_pass", "backward"),
        ("optimizer_step", "optimizer"),
        ("forward_backward", None),
        ("forward-backward", None),
        ("straightforward", None),
    ],
)
def test_phases_in_names(tmp_path: Path, name: str, phase: str | None) -> None:
    backward = op("autograd::engine::evaluate_function: X", "900.000", "50.000", thread=AUTOGRAD)  # trains
    other = [launch("910.000", "2.000", 2, thread=AUTOGRAD), kernel("other", "990.000", "5.000", 2)]
    events = [event("user_annotation", name, "0.000", "100.000"), *launched("gemm", 10, 1), backward, *other]
    assert facts(read(tmp_path, events), "phase")["gemm"] == (phase,)


def attention_tape(*names: str) -> Tape:
    """Attention by hand, with a range around each of its three parts."""
    tape = Tape()
    kernels = [("aten::mm", GEMM, 300), ("aten::softmax", SOFTMAX, 900), ("aten::mm", GEMM, 100)]
    with tape.inside("step:0"), tape.inside("forward"):
        tape.forward("aten::mm", GEMM, 5_000)  # a projection
        for name, work in zip(names, kernels, strict=True):
            with tape.inside(name):
                tape.forward(*work)
    return tape


def test_softmax_is_compared_with_the_two_gemms_by_the_ranges_around_them() -> None:
    profile = attention_tape("computing attention scores", "computing softmax", "final matmul").profile()
    parts = profile.kernels.filter(pl.col("part").is_not_null())["part"].to_list()
    assert parts == ["scores", "softmax", "values"]
    found = next(one for one in answer([profile]) if one.key == "softmax")
    assert found.figure.startswith("2.25×")


def test_a_softmax_alone_is_not_a_part_of_attention() -> None:
    profile = attention_tape("gate", "computing softmax", "experts").profile()
    assert profile.kernels["part"].null_count() == profile.kernels.height
