"""The breakdown of the kernel time adds up in every dimension, for one run and for two."""

import itertools

import pytest

from stepscope.explain.story.sections import breakdown
from stepscope.explain.story.sections.breakdown import break_down
from stepscope.explain.trace.compare import REST
from stepscope.explain.trace.profile import UNKNOWN, Profile
from stepscope.findings import Breakdown
from tests.unit.question_recordings import EXP, GEMM, Tape, model_profile
from tests.unit.recordings import ADD, GEMM_BF16, Timeline


def times_by(told: Breakdown, key: str, run: int = 0) -> dict[str, float]:
    """The time of each value of a dimension, as shown."""
    place = [one.key for one in told.dimensions].index(key)
    times: dict[str, float] = {}
    for row, time in zip(told.places, told.times_ns[run], strict=True):
        value = told.dimensions[place].values[row[place]]
        times[value] = times.get(value, 0.0) + time
    return times


def expected(profile: Profile, *columns: str) -> dict[tuple[object, ...], float]:
    rows = profile.time_by(*columns).iter_rows(named=True)
    return {tuple(row[column] for column in columns): row["time_ns"] / profile.num_steps for row in rows}


@pytest.mark.parametrize("steps", [1, 3])
def test_every_dimension_adds_up_to_the_kernel_time(steps: int) -> None:
    profile = model_profile(steps=steps)
    told = break_down([profile], [""])
    assert sum(told.times_ns[0]) == pytest.approx(profile.gpu_time_ns / steps, abs=1e-6)
    assert sum(told.counts[0]) == pytest.approx(profile.kernels.height / steps)
    columns = {"class": "class", "phase": "phase", "module": "module", "op": "op", "kernel": "short"}
    assert [one.key for one in told.dimensions] == list(columns)
    for key, column in columns.items():
        assert times_by(told, key) == pytest.approx({name: time for (name,), time in expected(profile, column).items()})


def test_rows_agree_in_all_dimensions() -> None:
    profile = model_profile(steps=2)
    told = break_down([profile], [""])
    assert len(set(told.places)) == len(told.places)
    found = {
        tuple(one.values[place] for one, place in zip(told.dimensions, row, strict=True)): time
        for row, time in zip(told.places, told.times_ns[0], strict=True)
    }
    for values, time in expected(profile, "class", "phase", "module", "op", "short").items():
        assert found.pop(tuple(map(str, values))) == pytest.approx(time)
    assert not found


def test_shortest_and_longest_times_of_single_kernels() -> None:
    tape = Tape()
    with tape.inside("step:0"):
        for ns in (30, 10, 20):
            tape.kernel(GEMM, ns)
        tape.synchronise()
    told = break_down([tape.profile()], [""])
    assert (told.times_ns, told.counts) == (((60.0,),), ((3.0,),))
    assert (told.shortest_ns, told.longest_ns) == (((10.0,),), ((30.0,),))


def test_wall_and_idle_time_are_per_step() -> None:
    profile = model_profile(steps=3)
    told = break_down([profile], [""])
    assert told.walls_ns == (float(profile.step_ns),)
    assert told.walls_ns[0] - told.idles_ns[0] == pytest.approx(profile.clock.busy_ns)
    assert told.what == "kernels"


def test_missing_attribution_is_unknown() -> None:
    tape = Tape()
    tape.kernel(GEMM, 100)
    told = break_down([tape.profile()], [""])
    values = {one.key: one.values for one in told.dimensions}
    assert values["phase"] == values["op"] == values["module"] == (UNKNOWN,)


def test_phases_are_in_the_order_of_a_step() -> None:
    timeline = Timeline()
    with timeline.step():
        for phase, us in (("optimizer", 90), ("forward", 10), ("backward", 50)):
            with timeline.phase(phase):
                timeline.launch(GEMM_BF16, us)
    assert break_down([timeline.profile()], [""]).dimensions[1].values == ("forward", "backward", "optimizer")


def test_tree_has_the_nodes_of_all_modules() -> None:
    timeline = Timeline()
    paths = ("embedding", "blocks.0.ffn", "blocks.0.norm", "blocks.1.ffn", "blocks.1.norm", "head")
    with timeline.step(), timeline.phase("forward"):
        for us, path in enumerate(paths, start=10):
            with timeline.module(path):
                timeline.launch(GEMM_BF16, us)
    told = break_down([timeline.profile()], [""])
    tree = told.tree
    assert tree is not None
    # In the order of the model, not of time.
    assert [tree.names[label] for label in tree.labels] == ["embedding", "blocks.*", "ffn", "norm", "head"]
    assert tree.parents == (-1, -1, 1, 1, -1)
    assert tree.copies == (1, 2, 2, 2, 1)
    singles = {
        module: (tree.names[tree.labels[node]], tuple(tree.names[name] for name in own))
        for module, node, own in zip(told.dimensions[2].values, tree.nodes, tree.singles, strict=True)
    }
    assert singles["blocks.1.norm"] == ("norm", ("blocks.1", "norm"))
    assert singles["head"] == ("head", ("head",))


def test_runs_without_the_same_modules_have_no_tree() -> None:
    tape = Tape()
    with tape.inside("step:0"):
        tape.kernel(GEMM, 100)
        tape.synchronise()
    assert break_down([tape.profile(), model_profile()], ["A", "B"]).tree is None


def test_rows_have_the_line_with_most_of_their_time() -> None:
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for us, line in ((10, "model.py:3 forward"), (50, "model.py:7 forward"), (20, "model.py:3 forward")):
            with timeline.line(line):
                timeline.launch(GEMM_BF16, us)
        timeline.launch(ADD, 5)
    told = break_down([timeline.profile()], [""])
    assert [told.lines[at] if at >= 0 else None for at in told.sources] == ["model.py:7 forward", None]
    assert not break_down([model_profile()], [""]).sources


def test_two_runs_are_joined() -> None:
    a, b = model_profile(steps=2), model_profile(steps=5, fused=True, gemm_ns=70)
    told = break_down([a, b], ["A", "B"])
    assert told.runs == ("A", "B")
    for run, profile in enumerate((a, b)):
        alone = break_down([profile], [""])
        for key in ("class", "phase", "module", "op", "kernel"):
            both = {name: time for name, time in times_by(told, key, run).items() if time}
            assert both == pytest.approx(times_by(alone, key))
    classes = told.dimensions[0].values
    only_b = [place for place, row in enumerate(told.places) if classes[row[0]] == "attention"]
    assert only_b
    for row in only_b:
        assert told.times_ns[0][row] == told.counts[0][row] == 0
        assert told.shortest_ns[0][row] is told.longest_ns[0][row] is None
        assert told.shortest_ns[1][row] == 70


@pytest.mark.parametrize("most", [15, 18, 24])
def test_surplus_rows_lose_layers_before_kernels(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    profiles = [model_profile(steps=2), model_profile(steps=3, fused=True)]
    whole = break_down(profiles, ["A", "B"])
    monkeypatch.setattr(breakdown, "MOST_ROWS", most)
    told = break_down(profiles, ["A", "B"])
    assert len(told.places) <= most < len(whole.places)
    assert len(set(told.places)) == len(told.places)
    for run in (0, 1):
        assert sum(told.times_ns[run]) == pytest.approx(sum(whole.times_ns[run]))
        assert sum(told.counts[run]) == pytest.approx(sum(whole.counts[run]))
        assert times_by(told, "class", run) == pytest.approx(times_by(whole, "class", run))
        if most == 24:
            assert times_by(told, "kernel", run) == pytest.approx(times_by(whole, "kernel", run))
    assert REST in told.dimensions[3].values
    assert f"`{REST}` as their operator" in told.notes[-1]
    assert not any(REST in note for note in whole.notes)


def test_merged_modules_are_nodes_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = break_down([model_profile(), model_profile(fused=True)], ["A", "B"])
    monkeypatch.setattr(breakdown, "MOST_ROWS", 36)
    told = break_down([model_profile(), model_profile(fused=True)], ["A", "B"])
    assert "are merged over alike layers" in told.notes[-1]
    assert REST not in told.notes[-1]
    merged = [module for module in told.dimensions[2].values if module.startswith("blocks.*.")]
    assert merged
    assert whole.tree is not None
    assert told.tree is not None
    # The tree is the same, and a merged module has the node of the single ones.
    assert (told.tree.parents, told.tree.copies) == (whole.tree.parents, whole.tree.copies)
    nodes = dict(zip(told.dimensions[2].values, told.tree.nodes, strict=True))
    for module in merged:
        assert nodes[module] in [node for other, node in nodes.items() if other != module]


def test_merged_rows_keep_shortest_and_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "MOST_ROWS", 3)
    timeline = Timeline()
    with timeline.step(), timeline.phase("forward"):
        for layer in range(9):
            with timeline.module(f"blocks.{layer}.ffn"):
                timeline.launch(GEMM_BF16, 10 + layer)
    told = break_down([timeline.profile()], [""])
    modules = [told.dimensions[2].values[row[2]] for row in told.places]
    assert modules == ["blocks.*.ffn", "blocks.8.ffn", "blocks.7.ffn"]
    assert (told.shortest_ns[0], told.longest_ns[0]) == ((10_000, 18_000, 17_000), (16_000, 18_000, 17_000))
    assert told.counts[0] == (7, 1, 1)


def test_kernels_with_equal_short_names_keep_their_details() -> None:
    timeline = Timeline()
    names = [f"void at::native::vectorized_elementwise_kernel<{n}, at::native::exp_kernel, X>(int)" for n in (2, 4)]
    with timeline.step():
        for name in names:
            timeline.launch(name, 10)
    told = break_down([timeline.profile()], [""])
    details = told.dimensions[-1].details
    assert sorted(detail.splitlines()[0] for detail in details) == names


def test_cpu_operators_and_gpu_kernels() -> None:
    tape = Tape()
    with tape.inside("step:0"):
        tape.kernel("aten::mm", 100, kind="cpu")
        tape.synchronise()
    host = tape.profile()
    assert break_down([host], [""]).what == "operators"
    both = break_down([host, model_profile()], ["A", "B"])
    assert both.what == "kernels"
    details = dict(zip(both.dimensions[-1].values, both.dimensions[-1].details, strict=True))
    assert details["aten::mm"] == "aten::mm"
    assert any(detail.startswith(GEMM) and "library: cuBLAS" in detail for detail in details.values())


def test_largest_rows_come_first() -> None:
    tape = Tape()
    for step, ns in itertools.product(range(10), (5, 5)):
        with tape.inside(f"step:{2 * step + (ns > 5)}"):
            tape.kernel(EXP, ns)
            tape.synchronise()
    single = Tape()
    with single.inside("step:0"):
        single.kernel(GEMM, 90)
        single.synchronise()
    told = break_down([tape.profile(), single.profile()], ["A", "B"])
    assert told.times_ns[1][0] == 90, "by the time of a step, not of the whole recording"


def test_only_so_many_kernels_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "MOST_DESCRIBED", 2)
    timeline = Timeline()
    with timeline.step():
        for number, us in enumerate((10, 30, 20)):
            timeline.launch(f"kernel_{number}", us)
    kernels = break_down([timeline.profile()], [""]).dimensions[-1]
    assert [bool(detail) for detail in kernels.details] == [True, True, False]
    assert kernels.details[0].startswith("kernel_1")
