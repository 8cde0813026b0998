"""One truth per page: what is said twice is equal, parts add up, and no saving exceeds what it is a saving of.

Random recordings become a page, a comparison, the output of `explain` with its JSON and its answers, and what `compare`
prints. `statements` gathers every quantity in them. Each example below a test is a contradiction that was on a page.
"""

from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, example, given, settings

from stepscope.api.run import Run
from stepscope.explain.story import Materials, tell, tell_both
from stepscope.explain.trace.compare import ProfileComparison
from stepscope.findings import Report
from tests.unit.explain.story.contradictions import (
    Contradiction,
    check_comparison,
    check_explain,
    check_report,
    check_same,
)
from tests.unit.explain.story.random_recordings import (
    Plan,
    Timed,
    Unprofiled,
    Work,
    build,
    build_loop,
    loop_plans,
    plans,
)
from tests.unit.explain.story.statements import (
    Statement,
    read_answers,
    read_comparison,
    read_explain,
    read_page,
    read_pair,
)
from tests.unit.loop_recordings import LoopPlan

# The same plans in every run: a contradiction found once stays found.
QUICK = settings(
    max_examples=12,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),  # a plan is short enough to read without shrinking it, which takes minutes
    suppress_health_check=list(HealthCheck),
)

GEMMS = (Work(kind="gemm", us=300), Work(kind="add", us=111, in_backward=True), Work(kind="update", us=40))
PAUSED = (*GEMMS, Work(kind="softmax", us=13, pause_us=2_300))
COMMUNICATING = (*GEMMS, Work(kind="all-reduce", us=900), Work(kind="gemm", us=300, in_backward=True))
LATE = (Work(kind="gemm fp32", us=300, pause_us=250), Work(kind="add", us=300, pause_us=250))
LITTLE_FASTER = Unprofiled(factor=0.97)


def read_run(run: Run, materials: Materials, page: Report) -> Iterator[Statement]:
    yield from read_page(page, explains_step=explains_step(materials), has_idle=run.profile.has_gaps)
    yield from read_explain(run)
    yield from read_answers(run.questions())


def read_both(
    pair: Report, comparison: ProfileComparison, place: int, run: Run, materials: Materials
) -> Iterator[Statement]:
    """What two pages and a comparison say about the run at `place`."""
    explains, has_idle = explains_step(materials), run.profile.has_gaps
    yield from read_page(tell(materials), explains_step=explains, has_idle=has_idle)
    yield from read_pair(pair, place, explains_step=explains, has_idle=has_idle)
    yield from read_comparison(comparison, place)


def explains_step(materials: Materials) -> bool:
    return materials.clock is not None or materials.step_ns is None


def say(found: list[Contradiction]) -> str:
    return "\n".join(map(str, found))


@QUICK
@given(plan=plans())
@example(plan=Plan(work=PAUSED, source="stepscope", timed=Timed(factor=0.5)))
@example(plan=Plan(work=PAUSED, source="cpu", timed=Timed(factor=0.8), unprofiled=Unprofiled(factor=0.6)))
@example(plan=Plan(work=LATE, source="stepscope", host_us=30, timed=Timed(factor=1.4), unprofiled=LITTLE_FASTER))
@example(plan=Plan(work=GEMMS, source="stepscope", unprofiled=Unprofiled(factor=5.0)))
@example(plan=Plan(work=PAUSED, source="stepscope", unprofiled=Unprofiled(factor=0.97, spread=0.4)))
@example(plan=Plan(work=COMMUNICATING, early=3, steps=2))
@example(plan=Plan(work=COMMUNICATING, devices=2, early=1))
@example(plan=Plan(work=(Work(kind="add", us=40), Work(kind="all-reduce", us=111)), early=3, waits_at_end=False))
def test_a_page_and_explain_agree(plan: Plan) -> None:
    run, materials = build(plan)
    page = tell(materials)
    statements = read_run(run, materials, page)
    found = [*check_same(statements), *check_report(page, run), *check_explain(run)]
    assert not found, say(found)


@QUICK
@given(plan=loop_plans())
@example(plan=LoopPlan(on_cpu=True, loading_us=250, kernel_us=300, unprofiled=0.3))
def test_a_page_of_a_loop_agrees(plan: LoopPlan) -> None:
    run, materials = build_loop(plan)
    page = tell(materials)
    statements = read_run(run, materials, page)
    found = [*check_same(statements), *check_report(page, run), *check_explain(run)]
    assert not found, say(found)


@QUICK
@given(a=plans(), b=plans())
@example(
    a=Plan(work=PAUSED, source="stepscope", unprofiled=Unprofiled(factor=0.6), timed=Timed(factor=0.8)),
    b=Plan(work=GEMMS, source="stepscope", unprofiled=Unprofiled(factor=0.9), timed=Timed(factor=0.95)),
)
@example(
    a=Plan(work=PAUSED, source="stepscope", unprofiled=Unprofiled(factor=0.6)),
    b=Plan(work=GEMMS, source="stepscope", unprofiled=Unprofiled(factor=0.9)),
)
def test_two_pages_and_their_comparison_agree(a: Plan, b: Plan) -> None:
    runs = [build(a, "a"), build(b, "b")]
    pair = tell_both(runs[0][1], runs[1][1])
    comparison = runs[0][0].compare(runs[1][0]).comparison
    found = [*check_report(pair, runs[1][0]), *check_comparison(comparison)]
    for place, (run, materials) in enumerate(runs):
        found += check_same(read_both(pair, comparison, place, run, materials))
    assert not found, say(found)


def test_sentences_are_still_read() -> None:
    """A sentence with new words would no longer be checked: each quantity is read in all these places."""
    paused = Plan(work=(*PAUSED, *LATE), source="stepscope", host_us=30, ranks=2)
    run, materials = build(paused)
    told = {(one.quantity, one.where.partition(" (")[0]) for one in read_run(run, materials, tell(materials))}
    step = (
        "fact",
        "picture",
        "summary in the terminal",
        "headline",
        "timeline's lead",
        "breakdown",
        "terminal's headline",
        "JSON",
        "table classes",
    )
    assert {("step", where) for where in step} <= told
    idle = ("headline", "breakdown", "terminal's headline", "table classes", "table ranks", "answer `idle`")
    assert {("idle share", where) for where in idle} <= told
    assert {("idle", where) for where in ("breakdown", "table classes", "answer `idle`")} <= told
    assert {("busy share", where) for where in ("fact", "terminal's headline")} <= told
    assert {("launch share", "card SS001"), ("launch share", "card SS001, title")} <= told
    assert {("kernel time", "breakdown's lead"), ("kernels", "timeline's lead")} <= told
    modules = {
        where: {one for one, place in told if one.startswith("time of module") and place == where}
        for where in ("table tree", "tree of breakdown")
    }
    assert {"time of module blocks.*.ffn"} == modules["table tree"] <= modules["tree of breakdown"]

    run, materials = build(Plan(work=(*COMMUNICATING, Work(kind="all-reduce", us=900))))
    told = {(one.quantity, one.where.partition(" (")[0]) for one in read_run(run, materials, tell(materials))}
    assert {("exposed", "card SS011"), ("hidden", "card SS011"), ("exposed share", "headline")} <= told

    run, materials = build_loop(LoopPlan(waits=True))
    told = {(one.quantity, one.where.partition(" (")[0]) for one in read_run(run, materials, tell(materials))}
    loop = ("table loop", "parts of table loop", "loop's table on the page", "loop's chart", "loop's lead")
    assert {("step", where) for where in loop} <= told
    assert {("CPU time of backward", "table loop"), ("CPU time of backward", "loop's table on the page")} <= told
    assert ("waiting for the GPU", "table syncs") in told

    runs = [build(paused, "a"), build(Plan(work=GEMMS, source="stepscope"), "b")]
    pair, comparison = tell_both(runs[0][1], runs[1][1]), runs[0][0].compare(runs[1][0]).comparison
    for place, (run, materials) in enumerate(runs):
        read = read_both(pair, comparison, place, run, materials)
        told = {(one.quantity, one.where.partition(" (")[0]) for one in read}
        changes = ("bars of the changes", "table of the changes", "`compare`, row `wall`", "lead of the changes")
        assert {("step", where) for where in ("pair's fact", "pair's headline", *changes)} <= told
        assert {("idle", where) for where in (*changes[:2], "`compare`, row `idle`")} <= told
