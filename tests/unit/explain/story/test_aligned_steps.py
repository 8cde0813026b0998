"""Two steps cut at the same places: places that belong together, times that add up, and labels for large changes."""

from collections.abc import Sequence
from dataclasses import replace

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.explain.alignment import align
from stepscope.explain.story.comparison.aligned_steps import align_steps, tabulate_phases, tabulate_places
from stepscope.explain.story.comparison.places import find_places, order_places
from stepscope.explain.trace.compare import IDLE, compare
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.findings.compared import AlignedSteps
from stepscope.recording.readers.formats import open_recording
from tests.unit.explain.story.random_recordings import Plan, build, plans
from tests.unit.explain.story.story_materials import FIXTURES, traced
from tests.unit.question_recordings import COPY, EXP, GEMM, Tape, model_profile
from tests.unit.recordings import add_unprofiled_steps

AB = ("A", "B")
SLOW_LAYER = 2


@pytest.fixture(scope="module")
def eager() -> Profile:
    return make_profile(open_recording(FIXTURES / "h200_nano_sdpa_bf16.json.gz"))


@pytest.fixture(scope="module")
def compiled() -> Profile:
    return make_profile(open_recording(FIXTURES / "h200_nano_compiled.json.gz"))


def without_modules(profile: Profile) -> Profile:
    """The same kernels as a recording without modules has them."""
    nothing = [pl.lit(None, profile.kernels.schema[name]).alias(name) for name in ("module", "layer")]
    return replace(profile, kernels=profile.kernels.with_columns(nothing))


def layered(
    *, slow: int | None = None, copies: int = 0, num_layers: int = 4, steps: int = 3, launch_ns: int = 10
) -> Profile:
    """A model whose layers each run a GEMM and an exponential; one layer may be slow, and copies may be added."""
    tape = Tape(launch_ns=launch_ns)
    for step in range(steps):
        with tape.inside(f"step:{step}"), tape.inside("phase:forward"):
            for layer in range(num_layers):
                with tape.inside(f"module:blocks.{layer}.attention"), tape.operator("aten::mm"):
                    tape.kernel(GEMM, 10_000 + (20_000 if layer == slow else 0))
                with tape.inside(f"module:blocks.{layer}.ffn"), tape.operator("aten::exp"):
                    tape.kernel(EXP, 5_000)
            for _ in range(copies):
                with tape.operator("aten::copy_"):
                    tape.kernel(COPY, 2_000)
            tape.synchronise()
    return tape.profile()


def require_sums(steps: AlignedSteps, a: Profile, b: Profile) -> None:
    """The places add up to what `compare` says, in both runs and for the idle time."""
    found = compare(a, b, by="phase")
    assert steps.steps_ns == (found.wall.a_ns, found.wall.b_ns)
    assert sum(place.change_ns for place in steps.places) == found.wall.difference_ns
    idle = next((row for row in found.parts if row.name == IDLE), None)
    for run, expected in enumerate((idle.a_ns, idle.b_ns) if idle else (0, 0)):
        assert sum(place.sides[run].idle_ns for place in steps.places) == expected
    assert all(time >= 0 for place in steps.places for side in place.sides for time in (*side.times_ns, side.idle_ns))
    places = tabulate_places(steps)
    for key, total in (("a_ns", steps.steps_ns[0]), ("b_ns", steps.steps_ns[1])):
        column = [one.key for one in places.columns].index(key)
        assert sum(int(str(row[column])) for row in places.rows) == total
    if (phases := tabulate_phases(steps)) is not None:
        column = [one.key for one in phases.columns].index("a_ns")
        assert sum(int(str(row[column])) for row in phases.rows) == steps.steps_ns[0]


# --- Sequences --------------------------------------------------------------------------------------------------------


def count_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of a longest common subsequence, by the textbook."""
    row = [0] * (len(b) + 1)
    for one in a:
        before = row[:]
        for place, other in enumerate(b, start=1):
            row[place] = before[place - 1] + 1 if one == other else max(before[place], row[place - 1])
    return row[-1]


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=100, deadline=None)
def test_alignment_is_as_long_as_possible_and_in_order(a: list[int], b: list[int]) -> None:
    pairs = align(a, b)
    assert len(pairs) == count_common(a, b)
    assert all(a[one] == b[other] for one, other in pairs)
    assert pairs == sorted(set(pairs))
    assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs)


def test_sequences_that_are_too_long_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.explain.alignment.MOST_ITEMS", 3)
    assert align("abc", "abc") == [(0, 0), (1, 1), (2, 2)]
    assert align("abcd", "abcd") == []


# --- Sums -------------------------------------------------------------------------------------------------------------


def test_places_add_up_to_the_nanosecond() -> None:
    a, b = model_profile(steps=3), model_profile(steps=7, fused=True, gemm_ns=133)
    require_sums(align_steps(a, b, AB), a, b)


def test_places_of_recorded_steps_add_up(eager: Profile, compiled: Profile) -> None:
    require_sums(align_steps(eager, compiled, AB), eager, compiled)
    require_sums(align_steps(compiled, traced(), AB), compiled, traced())


def test_unprofiled_idle_time_is_spread_over_the_places() -> None:
    a, b = (add_unprofiled_steps(layered(launch_ns=30_000), *[ns] * 3) for ns in (100_000, 70_000))
    steps = align_steps(a, b, AB)
    require_sums(steps, a, b)
    assert steps.steps_ns == (100_000, 70_000)
    assert all(side.idle_ns for place in steps.places for side in place.sides)


def uneven(times: Sequence[tuple[int, int]]) -> Profile:
    """One step per pair: a kernel, and a pause before the next one."""
    tape = Tape()
    for step, (ns, pause) in enumerate(times):
        with tape.inside(f"step:{step}"), tape.inside("phase:forward"):
            for part in ("attention", "ffn"):
                with tape.inside(f"module:blocks.0.{part}"), tape.operator("aten::mm"):
                    tape.kernel(GEMM, ns)
                tape.now += pause
            tape.synchronise()
    return tape.profile()


@given(st.lists(st.tuples(st.integers(40, 60), st.integers(0, 60)), min_size=2, max_size=3))
@settings(max_examples=20, deadline=None)
def test_fractions_of_nanoseconds_add_up(times: list[tuple[int, int]]) -> None:
    """Means over two or three steps have halves and thirds, and busy and idle time are rounded apart."""
    a, b = uneven(times), uneven([(50, 20), (51, 20)])
    require_sums(align_steps(a, b, AB), a, b)


@given(plans(), plans())
@settings(max_examples=10, deadline=None)
def test_places_of_random_recordings_add_up(one: Plan, other: Plan) -> None:
    profiles = [build(plan)[0].profile for plan in (one, other)]
    if not any(profile.is_serialized for profile in profiles):
        require_sums(align_steps(profiles[0], profiles[1], AB), *profiles)


# --- Places -----------------------------------------------------------------------------------------------------------


def test_modules_name_the_places_in_the_order_of_the_step() -> None:
    steps = align_steps(layered(), layered(), AB)
    names = [place.name for place in steps.places]
    assert names == [f"layer {layer} {part}" for layer in range(4) for part in ("attention", "ffn")]
    assert {place.verdict for place in steps.places} == {"same"}
    assert steps.changes == ()
    assert steps.notes == ()


def test_order_of_products_finds_the_places_without_modules(eager: Profile) -> None:
    """Of kernels whose modules are hidden, nearly all get the place that their module says."""
    true, found = find_places(eager, without_modules(eager))
    assert order_places(true, found) == order_places(true, true)
    together = true.select("phase", "layer", "part", "own_ns").hstack(
        found.select(found_layer="layer", found_part="part")
    )
    same = (pl.col("layer") == pl.col("found_layer")) & (pl.col("part") == pl.col("found_part"))
    known_ns, all_ns = (float(one["own_ns"].sum()) for one in (together.filter(same), together))
    assert known_ns > 0.9 * all_ns
    products = together.hstack(true.select("class")).filter(pl.col("class").is_in(["GEMM", "attention"]))
    assert products.filter(same).height == products.height > 100


def test_compiled_code_has_the_layers_of_the_run_next_to_it(eager: Profile, compiled: Profile) -> None:
    steps = align_steps(eager, compiled, AB)
    layers = {place.layer for place in steps.places if place.sides[1].total_ns}
    assert {"layer 0", "layer 1", "layer 2", "layer 3"} <= layers
    for place in steps.places:
        if place.part == "ffn":
            assert all("GEMM" in side.classes for side in place.sides), place.name
    assert [note.partition(";")[0] for note in steps.notes[:1]] == ["modules: not recorded in B"]
    backwards = align_steps(compiled, eager, AB)
    assert sorted(place.name for place in backwards.places) == sorted(place.name for place in steps.places)


def test_products_are_numbered_if_no_run_has_modules(eager: Profile) -> None:
    bare = without_modules(eager)
    steps = align_steps(bare, bare, AB)
    forward = [place.name for place in steps.places if place.phase == "forward"]
    assert forward[:3] == ["", "GEMM 1", "GEMM 2"]
    assert any(name.startswith("attention ") for name in forward)
    assert all(place.verdict == "same" for place in steps.places)
    assert any("in order" in note for note in steps.notes)


def test_other_sizes_are_joined_by_the_order_of_classes(eager: Profile) -> None:
    """A larger batch changes the operations of every product, and not their order."""
    shapes = eager.recording.ops["shapes"].str.replace_all("512", "1024")
    larger = replace(eager, recording=replace(eager.recording, ops=eager.recording.ops.with_columns(shapes)))
    true, found = find_places(eager, without_modules(larger))
    products = found.filter(pl.col("class") == "GEMM")
    assert products["layer"].to_list() == true.filter(pl.col("class") == "GEMM")["layer"].to_list()


def test_a_layer_that_one_run_lacks_is_new_or_gone() -> None:
    steps = align_steps(layered(num_layers=3), layered(num_layers=4), AB)
    verdicts = {place.name: place.verdict for place in steps.places}
    assert verdicts["layer 3 attention"] == verdicts["layer 3 ffn"] == "new"
    back = align_steps(layered(num_layers=4), layered(num_layers=3), AB)
    assert {place.name for place in back.places if place.verdict == "gone"} == {"layer 3 attention", "layer 3 ffn"}


def test_lists_of_layers_are_distinguished() -> None:
    tape = Tape()
    with tape.inside("step:0"), tape.inside("phase:forward"):
        for side in ("encoder", "decoder"):
            for layer in range(2):
                with tape.inside(f"module:{side}.layers.{layer}.ffn"), tape.operator("aten::mm"):
                    tape.kernel(GEMM, 1000)
    names = [place.name for place in align_steps(tape.profile(), tape.profile(), AB).places]
    assert names[0] == "encoder.layers.0 ffn"
    assert names[-1] == "decoder.layers.1 ffn"


# --- Labels -----------------------------------------------------------------------------------------------------------


def test_a_slow_layer_is_named_alone() -> None:
    (change,) = align_steps(layered(), layered(slow=SLOW_LAYER), AB).changes
    assert (change.text, change.change_ns) == ("layer 2 attention", 20_000)


def test_a_change_of_all_layers_is_named_once() -> None:
    a, b = model_profile(steps=3), model_profile(steps=3, gemm_ns=200)
    texts = [change.text for change in align_steps(a, b, AB).changes]
    assert "attention in 2 layers" in texts
    assert "ffn in 2 layers" in texts
    assert not any(text.startswith("layer 0") for text in texts)


def test_new_and_gone_kernels_have_their_number() -> None:
    found = {one.text: one.change_ns for one in align_steps(layered(), layered(copies=3), AB).changes}
    assert found["new: 3 × copy between layouts"] >= 6_000
    gone = [one.text for one in align_steps(layered(copies=3), layered(), AB).changes]
    assert "gone: 3 × copy between layouts" in gone


def test_new_kernels_are_said_to_be_part_of_the_changes_of_their_places() -> None:
    (note,) = align_steps(layered(), layered(slow=SLOW_LAYER, copies=3), AB).notes
    assert note == "the time of new and gone kernels is also included in the changes of their places"
    assert align_steps(layered(), layered(slow=SLOW_LAYER), AB).notes == ()


def test_parts_of_repeated_kernels_have_no_numbers() -> None:
    """Layers that are known from repetition have names with numbers like those of classes."""
    repeated = pl.format("GPT_0.repeat of 2 kernels_{}.norm_0", "layer")
    profile = layered(num_layers=3)
    profile = replace(profile, kernels=profile.kernels.with_columns(module=repeated))
    assert [place.name for place in align_steps(profile, profile, AB).places] == [
        f"layer {layer} norm" for layer in range(3)
    ]


def test_noise_has_no_label() -> None:
    steady, noisy = Tape(), Tape()
    for tape, times in ((steady, (100, 900, 500)), (noisy, (200, 1000, 400))):
        for step, us in enumerate(times):
            with tape.inside(f"step:{step}"), tape.inside("phase:forward"):
                for part in ("attention", "ffn"):
                    with tape.inside(f"module:blocks.0.{part}"), tape.operator("aten::mm"):
                        tape.kernel(GEMM, us * 1000)
                tape.synchronise()
    steps = align_steps(steady.profile(), noisy.profile(), AB)
    assert {place.verdict for place in steps.places} == {"noise"}
    assert steps.changes == ()
