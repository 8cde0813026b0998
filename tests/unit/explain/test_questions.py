"""Questions get the right figures, or no answer if the recording does not have them."""

from dataclasses import replace

import msgspec
import polars as pl
import pytest

from stepscope.explain.questions import Answer, answer, answers_table, answers_text, evidence_tables
from stepscope.explain.questions.copies import explain_copy
from stepscope.explain.questions.idle_gaps import AFTER, BEFORE, find_gaps
from stepscope.explain.questions.product_roles import Extent, extent, find_products, role_of_module
from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.profile_tables import kernels_table, phases_table, steps_table
from stepscope.explain.trace.ranges_table import ranges_table
from stepscope.findings import Cell
from stepscope.recording import tables
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.store import Overhead
from stepscope.render.formats import Format
from stepscope.render.tables import render
from stepscope.spec import HuggingFace, build_case
from stepscope.units import say_share
from tests.unit.question_recordings import AUTOGRAD, EXP, GEMM, SMALL_GEMM, SOFTMAX, Tape, model_profile
from tests.unit.recordings import Timeline, add_unprofiled_steps


def ask(key: str, *profiles: Profile) -> Answer:
    return next(one for one in answer(profiles) if one.key == key)


def evidence(of: Answer) -> list[dict[str, Cell]]:
    assert of.evidence is not None
    keys = [column.key for column in of.evidence.columns]
    return [dict(zip(keys, row, strict=True)) for row in of.evidence.rows]


def with_plain_forward(profile: Profile, *durations: int) -> Profile:
    rows = [
        {"phase": "forward", "step": n, "duration_ns": ns, "clock": "cuda events"} for n, ns in enumerate(durations)
    ]
    # Steps are longer while profiled, so the unprofiled ones are the clock.
    step_ns = round(1.1 * profile.clock.busy_ns)
    rows += [{**row, "phase": "backward", "duration_ns": max(1, step_ns - durations[0])} for row in rows]
    marked = pl.col("name").str.starts_with("step:")
    ranges = profile.recording.ranges.with_columns(end_ns=pl.col("end_ns") + pl.when(marked).then(20_000).otherwise(0))
    recording = profile.recording.with_manifest(overhead=Overhead(plain_ns=step_ns))
    return make_profile(replace(recording, steps=tables.conform("steps", pl.DataFrame(rows)), ranges=ranges))


def test_nine_questions_each_with_a_sentence() -> None:
    answers = answer([model_profile()])
    assert len({one.key for one in answers}) == len(answers) == 9
    for one in answers:
        assert one.sentence
        assert bool(one.figure) is (one.status == "answered")
        assert one.status == "answered" or one.command
    assert [one.key for one in answers if one.status != "answered"] == ["small-and-large"]


def test_empty_list_of_profiles_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one profile"):
        answer([])


def test_forward_time_is_compared_with_unprofiled_steps() -> None:
    profile = model_profile()
    clocks = {row["clock"]: row["per_step_ms"] for row in evidence(ask("forward-time", profile))}
    assert clocks["kernels"] == (19 * 100 + 2 * 50) / 1e6  # per step: 19 GEMMs and two softmaxes
    assert "plain" not in clocks
    span = clocks["span"]
    assert isinstance(span, float)
    same = ask("forward-time", with_plain_forward(profile, *[round(span * 1e6)] * 3))
    assert "which agrees with the profiled span" in same.sentence
    slower = ask("forward-time", with_plain_forward(profile, *[round(span * 0.5e6)] * 3))
    assert "the profiled span is 2× as long" in slower.sentence
    assert "in doubt" not in slower.sentence
    doubt = Doubt(code="shared", text="others were using the CPU")
    doubted = with_plain_forward(model_profile(doubts=(doubt,)), 10)
    assert "The unprofiled time is unreliable: others were using the CPU." in ask("forward-time", doubted).sentence
    assert slower.figure == "2 µs"  # as in the table of phases, by whatever clock
    ignored = add_unprofiled_steps(profile, *[round(2 * profile.clock.profiled_ns)] * 3)
    assert ignored.clock.kind == "profiled"
    assert "nprofiled" not in ask("forward-time", ignored).sentence


@pytest.mark.parametrize("marked", [True, False])
def test_span_of_forward_has_only_forward_passes(marked: bool) -> None:
    """Micro-batches of one step, or steps that are not marked: backward between them is not part of the span."""
    tape = Tape()
    with tape.inside("ProfilerStep#1" if marked else "part"):
        for _ in range(3):
            number = tape.forward("aten::mm", GEMM, 100)
            tape.forward("aten::mm", GEMM, 100)
            tape.backward("MmBackward0", number, [("aten::mm", GEMM, 10_000)])
            tape.synchronise()
    found = ask("forward-time", make_profile(tape.recording()))
    clocks = {row["clock"]: row["per_step_ms"] for row in evidence(found)}
    assert clocks["kernels"] == clocks["span"] == 600 / 1e6
    assert "to the last of each pass" in found.sentence


def test_top_kernel_is_counted_per_step() -> None:
    found = ask("top-kernel", model_profile(steps=3))
    assert found.sentence.startswith("`sgemm 128×64 tn (cuBLAS)` in forward: 19 calls per step, 1.9 µs, 95.0%")
    assert "also in forward and backward together" in found.sentence
    forward = evidence(found)[0]
    assert (forward["scope"], forward["per_step"]) == ("forward", 19)


def test_top_kernel_of_the_whole_step_may_differ() -> None:
    tape = Tape()
    with tape.inside("step:0"):
        with tape.inside("phase:forward"):
            number = tape.forward("aten::mm", GEMM, 100)
        tape.backward("MmBackward0", number, [("aten::mm", SMALL_GEMM, 500)])
    sentence = ask("top-kernel", tape.profile()).sentence
    assert "in forward and backward together it is `sgemm 64×32 tn (cuBLAS)`" in sentence


def test_other_classes_in_forward() -> None:
    found = ask("besides-products", model_profile())
    assert found.figure == "5%"
    assert [(row["scope"], row["share"]) for row in evidence(found)] == [("class", 0.05), ("kernel", 0.05)]


def test_share_changes_from_forward_or_inference_to_the_whole_step() -> None:
    train, inference = model_profile(), model_profile(mode="inference", gemm_ns=50)
    within = ask("share-of-products", train)
    # Forward 1900 of 2000; the step 1900 + 3800 of 2000 + 3800 + 50 + 300.
    assert within.figure == "95.0% → 92.7%"
    # A difference of shares is in points, not in percent.
    assert {row["class"]: row["change_points"] for row in evidence(within)}["optimizer"] == pytest.approx(4.9, abs=0.05)
    assert "optimizer +4.9 points" in within.sentence
    both = ask("share-of-products", inference, train)
    assert both.figure == "90.5% → 92.7%"
    assert both.command == ""
    alone = ask("share-of-products", inference)
    assert alone.status == "not in this recording"


def test_softmax_compared_with_scores_and_values() -> None:
    found = ask("softmax", model_profile())
    rows = {str(row["part"]): row for row in evidence(found)}
    flops = 2 * 2 * (2 * 4 * 16 * 32 * 16)  # two layers, two GEMMs
    elements = 2 * 4 * 16 * 16
    assert rows["the two GEMMs"]["flops"] == flops
    assert rows["the two GEMMs"]["per_step_ms"] == 4 * 100 / 1e6
    softmax = rows["softmax (2 kernels)"]
    assert (softmax["per_step_ms"], softmax["flops"], softmax["flops_by_hand"]) == (1e-4, 5 * elements, 3 * elements)
    assert found.figure == f"0.25× the time, 1/{flops / (5 * elements):.3g} of the FLOPs"
    assert "memory-bound" in found.sentence
    assert "H200" in found.sentence


def test_softmax_without_shapes_takes_them_from_the_case() -> None:
    profile = model_profile()
    bare = profile.recording.ops.with_columns(shapes=pl.lit(None, pl.String))
    assert ask("softmax", make_profile(replace(profile.recording, ops=bare))).figure == ask("softmax", profile).figure


def test_bf16_moves_half_the_bytes_of_fp32_softmax() -> None:
    profile = model_profile()
    of = pl.when(pl.col("name") == "aten::bmm").then(pl.lit('["c10::BFloat16", "c10::BFloat16"]'))
    ops = profile.recording.ops.with_columns(dtypes=of.otherwise(pl.lit('["float"]')))
    rows = evidence(ask("softmax", make_profile(replace(profile.recording, ops=ops))))
    flops, moved = 2 * (16 * 32 * 16), 16 * 32 + 32 * 16 + 16 * 16
    assert [row["flop_per_byte"] for row in rows[:2]] == [flops / (2 * moved), 5 / (2 * 4)]


def test_compiled_recording_suggests_an_uncompiled_one() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        tape.forward("aten::bmm", GEMM, 30, "[[2, 8, 4], [2, 4, 8]]")
    assert "--compile no" in ask("softmax", tape.profile(compiled=True)).command
    assert "--compile" not in ask("softmax", tape.profile()).command


def test_fused_attention_is_one_kernel() -> None:
    found = ask("softmax", model_profile(fused=True))
    assert found.figure.startswith("one kernel")
    assert found.evidence is None


def test_foreign_attention_is_found_around_the_softmax() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        tape.forward("aten::bmm", GEMM, 30, "[[2, 8, 4], [2, 4, 8]]")
        tape.forward("aten::_softmax", SOFTMAX, 60, "[[2, 8, 8]]")
        tape.forward("aten::bmm", GEMM, 30, "[[2, 8, 8], [2, 8, 4]]")
        tape.forward("aten::bmm", GEMM, 30)
    profile = tape.profile()
    assert find_products(profile)["role"].to_list() == ["scores", "values", "unknown"]
    assert ask("softmax", profile).figure.startswith("1× the time")


def test_nine_roles_per_layer_and_the_head() -> None:
    found = ask("products", model_profile(steps=3))
    assert "2 × 9 and the head = 19 per forward pass" in found.sentence
    assert "Yes. Found 19 in forward and 38 in backward" in found.sentence
    assert found.figure == "Yes, 19 in forward"
    counted = {(row["stage"], row["role"]): (row["expected"], row["counted"]) for row in evidence(found)}
    assert counted["forward", "query"] == (2, 2)
    assert counted["backward", "gate"] == (4, 4)
    assert counted["backward", "scores"] == (4, 4)
    assert counted["forward", "head"] == (1, 1)
    shapes = {row["role"]: row["shape"] for row in evidence(found) if row["stage"] == "forward"}
    assert shapes["down"] == "(32×256)·(256×64)"
    assert shapes["scores"] == "4× (16×32)·(32×16)"


def test_missing_roles_are_reported() -> None:
    profile = model_profile()
    ops = profile.recording.ops
    row = ops.with_row_index().filter((pl.col("name") == "aten::mm") & (pl.col("thread") == 1))["index"][0]
    start, end = ops["start_ns"][row], ops["end_ns"][row]
    launch = profile.recording.launches.filter(pl.col("start_ns").is_between(start, end))["correlation"][0]
    kernels = profile.recording.kernels.filter(pl.col("correlation") != launch)
    found = ask("products", make_profile(replace(profile.recording, kernels=kernels)))
    assert "No: 18.5 instead of 19 in forward" in found.sentence
    assert found.figure == "No, 18.5 in forward"


def test_unknown_roles_do_not_count_as_missing() -> None:
    profile = model_profile()
    bare = profile.recording.ranges.filter(~pl.col("name").str.contains("module:|part:"))
    rows = evidence(ask("products", make_profile(replace(profile.recording, ranges=bare))))
    assert {row["role"] for row in rows} == {"unknown"}
    assert sum(float(row["counted"] or 0) for row in rows if row["stage"] == "forward") == 19


def test_operator_in_two_kernels_counts_once() -> None:
    tape = Tape()
    with tape.inside("phase:forward"), tape.inside("module:blocks.0.ffn.up"), tape.operator("aten::mm"):
        tape.kernel(GEMM, 10)
        tape.kernel(SMALL_GEMM, 10)
    products = find_products(tape.profile())
    assert products.select("role", "time_ns").rows() == [("up", 20)]


@pytest.mark.parametrize(
    ("op", "shapes", "expected"),
    [
        ("aten::mm", "[[2, 3], [3, 5]]", Extent(1, 2, 3, 5)),
        ("aten::addmm", "[[5], [2, 3], [3, 5], [], []]", Extent(1, 2, 3, 5)),
        ("aten::addmm", "[[2, 5], [2, 3], [3, 5], [], []]", Extent(1, 2, 3, 5)),
        ("aten::baddbmm", "[[7, 2, 5], [7, 2, 3], [7, 3, 5]]", Extent(7, 2, 3, 5)),
        ("aten::linear", "[[4, 2, 3], [5, 3], []]", Extent(1, 8, 3, 5)),
        # Compiled code passes `out`, which must not count as an operand even if its shape fits.
        ("aten::mm", "[[3, 2], [2, 5], [3, 5]]", Extent(1, 3, 2, 5)),
        ("aten::mm", "[[5, 2], [2, 5], [5, 5]]", Extent(1, 5, 2, 5)),
        ("aten::bmm", "[[7, 5, 2], [7, 2, 5], [7, 5, 5]]", Extent(7, 5, 2, 5)),
        ("aten::addmm", "[[5], [2, 3], [3, 5], [], [], [2, 5]]", Extent(1, 2, 3, 5)),
        ("aten::mm", "[[2, 3], [4, 5]]", None),
        ("aten::mm", "not json", None),
        ("aten::mm", None, None),
    ],
)
def test_extents(op: str, shapes: str | None, expected: Extent | None) -> None:
    assert extent(op, shapes) == expected


@pytest.mark.parametrize(
    ("module", "role"),
    [
        ("blocks.3.attention.q_proj", "query"),
        ("model.layers.0.mlp.gate_proj", "gate"),
        ("transformer.h.0.attn.c_attn", "query, key, value"),
        ("bert.encoder.layer.0.attention.self.query", "query"),
        ("lm_head", "head"),
        ("blocks.0.attention", None),
        ("Linear_3", None),
    ],
)
def test_roles(module: str, role: str | None) -> None:
    assert role_of_module(module) == role


def test_copies_in_backward_have_reasons() -> None:
    found = ask("copies", model_profile())
    assert found.figure == "1.3% of backward"  # 50 of 3850
    assert [(row["reason"], row["per_step_ms"]) for row in evidence(found)] == [
        ("layout", 4e-5),
        ("accumulation", 1e-5),
    ]
    assert ask("copies", model_profile(mode="inference")).status == "not in this recording"


def test_unexplained_copy_stays_unknown() -> None:
    assert explain_copy(name="copy", node="FancyBackward0", op="aten::copy_").startswith("unknown")
    assert explain_copy(name="copy", launched="graph").startswith("unknown: launched by a CUDA graph")
    assert explain_copy(name="copy", node="MmBackward0", cast=True).startswith("cast")
    assert explain_copy(name="copy", node="MmBackward0", cast=True, recomputed=True).startswith("recomputation")


def test_small_and_large() -> None:
    small = model_profile(parameters=10)
    large = model_profile(parameters=1000, gemm_ns=1000)
    for profiles in ((small, large), (large, small)):
        found = ask("small-and-large", *profiles)
        assert found.figure == "GEMMs 92.7% → 99.2%"
    assert ask("small-and-large", small, small).status == "not in this recording"
    assert ask("small-and-large", small, model_profile(mode="inference")).status == "not in this recording"


def test_idle_of_small_and_large_uses_unprofiled_steps() -> None:
    small, large = (model_profile(parameters=parameters) for parameters in (10, 1000))
    small = add_unprofiled_steps(small, round(1.001 * small.clock.busy_ns))
    assert small.clock.kind == "unprofiled"
    assert f"idle {say_share(small.idle_share)} → {say_share(large.idle_share)}" in (
        ask("small-and-large", small, large).sentence
    )
    assert small.idle_share < 0.5 * large.idle_share


def test_tiles_of_small_and_large() -> None:
    tapes = Tape(), Tape()
    for tape, kernel in zip(tapes, (SMALL_GEMM, GEMM), strict=True):
        with tape.inside("phase:forward"), tape.operator("aten::mm"):
            tape.kernel(kernel, 10)
            tape.kernel("ampere_sgemm_32x128_tn", 4)  # the tile with the most time counts
    found = ask("small-and-large", *(tape.profile() for tape in tapes))
    assert "64×32 → 128×64" in found.sentence
    assert "in the order given" in found.sentence


def test_gaps_add_up_to_the_idle_time() -> None:
    profile = model_profile(steps=3)
    assert find_gaps(profile)["time_ns"].sum() == sum(device.whole.idle_ns for device in profile.devices)


def gap_causes(tape: Tape) -> list[tuple[int, str]]:
    gaps = find_gaps(tape.profile())
    return [row for row in gaps.select("time_ns", "cause").iter_rows() if row[1] not in (BEFORE, AFTER)]


def test_late_launch() -> None:
    tape = Tape(launch_ns=10)
    tape.kernel(EXP, 5)
    tape.now += 100
    tape.kernel(EXP, 5)
    assert gap_causes(tape) == [(105, "late launch")]


def test_launch_after_a_synchronizing_call() -> None:
    tape = Tape(launch_ns=10)
    tape.kernel(EXP, 50)
    tape.synchronise()
    tape.kernel(EXP, 5)
    assert gap_causes(tape) == [(15, "CPU synchronizing")]


def test_earlier_synchronizing_call_is_not_the_cause() -> None:
    tape = Tape(launch_ns=10)
    tape.synchronise()
    tape.kernel(EXP, 50)
    tape.now += 100
    tape.kernel(EXP, 5)
    assert gap_causes(tape) == [(60, "late launch")]


def test_kernel_launched_in_time_waits_for_another_stream() -> None:
    tape = Tape(launch_ns=10)
    tape.kernel(EXP, 100, stream=7)
    tape.free[8] = 1500  # an event delays it
    tape.kernel(EXP, 5, stream=8)
    assert gap_causes(tape) == [(390, "waiting for another stream")]


def test_gaps_between_steps_and_between_kernels() -> None:
    tape = Tape(launch_ns=10)
    for step in range(2):
        with tape.inside(f"step:{step}"):
            tape.kernel(EXP, 100)
            tape.free[7] += 3
            tape.kernel(EXP, 5)
            tape.synchronise()
    found = find_gaps(tape.profile()).filter(pl.col("before").is_not_null() & pl.col("after").is_not_null())
    assert found["cause"].to_list() == ["kernel start", "between steps", "kernel start"]
    assert found["time_ns"].to_list()[0] == 3


def test_longest_gap_names_the_cpu_operator() -> None:
    tape = Tape(launch_ns=10)
    with tape.operator("aten::a"):
        tape.kernel(EXP, 5)
    with tape.operator("aten::nonzero", thread=AUTOGRAD):
        tape.now += 1000
    with tape.operator("aten::index"):
        tape.now += 500
        tape.kernel(EXP, 5)
    longest = next(row for row in evidence(ask("idle", tape.profile())) if row["kind"] == "gap")
    assert longest["before"] == longest["after"] == "exponential, vectorized ×4"
    assert longest["host_op"] is None  # the launching thread was in no operator when the device went idle


def test_operators_of_a_cpu_are_not_called_kernels() -> None:
    """In answers and their evidence, and in the tables that the page and the terminal share."""
    timeline = Timeline()
    for _ in range(3):
        with timeline.step():
            timeline.host(30)
            with timeline.phase("forward"), timeline.range("mine"):
                timeline.compute("aten::mm", 100)
                timeline.compute("aten::softmax", 50)
            with timeline.phase("backward"):
                timeline.compute("aten::mm", 200)
    profile = timeline.profile()
    assert "The largest other operator is `aten::softmax`" in ask("besides-products", profile).sentence
    idle = ask("idle", profile)
    assert "before the first operator" in idle.sentence
    assert idle.evidence is not None
    made = (phases_table(profile), kernels_table(profile, top=1), steps_table(profile), ranges_table(profile))
    for table in (idle.evidence, *made):
        for text in (table.title, *(column.label for column in table.columns), *table.notes):
            assert "kernel" not in text.lower().replace("--table kernels", ""), table.title


def test_unknown_phases_have_no_answers() -> None:
    tape = Tape()
    tape.kernel(GEMM, 10)
    recording = replace(tape.recording(source="nsight compute"), launches=tables.empty("launches"))
    answers = answer([make_profile(recording)])
    assert [one.key for one in answers if one.status == "answered"] == ["products"]
    assert "inference:" not in " ".join(one.sentence for one in answers)
    assert ask("products", make_profile(recording)).figure == "1 in the trace"


def test_answers_render_in_every_format_and_as_paragraphs() -> None:
    answers = answer([model_profile()])
    text = answers_text(answers, 72)
    assert max(map(len, text.splitlines())) <= 72
    assert text.count("\n\n") == 8
    for form in Format:
        assert render(answers_table(answers), form)
        for table in evidence_tables(answers):
            assert render(table, form, width=100)
    assert [table.title[0] for table in evidence_tables(answers)] == [*"1234567", "9"]


def test_questions_about_a_mostly_unknown_phase_are_not_answered() -> None:
    """A forward of 1 µs, and 10 µs whose phase was not recorded: nothing is known about forward."""
    tape = Tape()
    with tape.inside("step:0"):
        with tape.inside("phase:forward"):
            number = tape.forward("aten::exp", EXP, 1_000)
        tape.backward("ExpBackward0", number, [("aten::mm", GEMM, 20_000)])
        with tape.operator("aten::mm"):
            tape.kernel(GEMM, 10_000)
    profile = tape.profile()
    for key in ("forward-time", "top-kernel", "besides-products", "share-of-products", "softmax"):
        found = ask(key, profile)
        assert found.status == "not in this recording", key
        assert "of 32.3% of kernel time is unknown, and only 3.23% is known to be forward" in found.sentence
    assert ask("copies", profile).status == "answered"  # backward is known
    tape = Tape()
    with tape.inside("step:0"):
        tape.kernel(GEMM, 10_000)
    assert ask("forward-time", tape.profile()).sentence == "The phase of 100.0% of kernel time is unknown."


def test_phases_take_the_same_time_in_questions_and_tables() -> None:
    """Kernels launched before the recording began count in neither."""
    profile = model_profile(steps=4)
    first = profile.recording.launches["start_ns"].sort()[25]
    launches = profile.recording.launches.filter(pl.col("start_ns") >= first)
    cut = make_profile(replace(profile.recording, launches=launches))
    assert cut.gpu_time_ns < profile.gpu_time_ns
    rows = phases_table(cut).rows
    forward = sum(float(row[1] or 0) for row in rows if row[0] in ("forward", "loss"))
    clocks = {row["clock"]: row["per_step_ms"] for row in evidence(ask("forward-time", cut))}
    assert clocks["kernels"] == pytest.approx(forward)


def test_kernels_launched_before_the_recording_do_not_end_a_forward_pass() -> None:
    """They run while the CPU already launches the next step: here the GPU is 2 µs behind."""
    profile = model_profile(steps=4)
    first = profile.recording.launches["start_ns"].sort()[62]
    launches = profile.recording.launches.filter(pl.col("start_ns") >= first)
    cut = attribute_kernels(replace(profile.recording, launches=launches))
    timed = cut.with_columns(pl.col("start_ns", "end_ns") + 2_000, time_ns=pl.col("end_ns") - pl.col("start_ns"))
    late = replace(profile, kernels=timed.with_columns(count=pl.lit(1, pl.Int64)))
    assert (late.kernels.filter(pl.col("launched") == "before")["phase"] == "backward").sum() == 40
    assert "of each pass" not in ask("forward-time", late).sentence


def test_commands_record_both_runs_instead_of_naming_a_file() -> None:
    """A page does not know the directory of its recording."""
    command = ask("share-of-products", model_profile(file="raw.json.gz")).command
    assert "raw.json.gz" not in command
    train, inference, compared = command.split(" && ")
    assert train.startswith("stepscope profile --d-model ")
    assert train.endswith(" --out runs/train")
    assert inference.endswith(" --mode inference --out runs/inference")
    assert compared == "stepscope explain runs/train runs/inference --questions"


@pytest.mark.parametrize(
    ("settings", "larger"),
    [
        ({"hf": "gpt2", "n_layer": 2}, "stepscope profile --hf gpt2 --set n_layer=24 "),
        ({"hf": "llama"}, "stepscope profile --hf llama --set num_hidden_layers=24 "),
        ({"size": "small"}, "stepscope profile --size large "),
    ],
)
def test_larger_model_sets_an_argument_that_exists(settings: dict[str, str | int], larger: str) -> None:
    sizes = {name: value for name, value in settings.items() if name not in ("hf", "size")}
    case = build_case({"size": "small", "device": "cuda:0"})
    if "hf" in settings:
        model = HuggingFace(config=str(settings["hf"]), arguments=tuple(sizes.items()))
        case = msgspec.structs.replace(case, workload=msgspec.structs.replace(case.workload, model=model))
    command = ask("small-and-large", model_profile(case=case)).command
    assert command.split(" && ")[1].startswith(larger)


def test_gemms_of_convolutions_are_not_counted_among_those_of_layers() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        for op in ("aten::cudnn_convolution", "aten::mm"):
            tape.forward(op, GEMM, 10_000)
    found = ask("products", tape.profile())
    assert "Found per step: 1 in forward, without those of convolutions; layers were not recorded" in found.sentence


def test_a_forward_pass_alone_is_recorded_without_training() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        number = tape.forward("aten::exp", EXP, 10_000)
    assert "--mode inference" in ask("forward-time", tape.profile()).command
    with tape.inside("step:0"):
        tape.backward("ExpBackward0", number, [("aten::mm", GEMM, 1_000)])
    assert "--mode train" in ask("forward-time", tape.profile()).command
