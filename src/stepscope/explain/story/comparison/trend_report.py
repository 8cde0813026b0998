"""Many runs as one report: the fastest and the slowest, a table, a trend, and what each step consists of."""

import shlex
from collections import Counter
from collections.abc import Iterator

from stepscope import __version__
from stepscope.explain.model_names import name_model
from stepscope.explain.story.comparison.changes import DECIDES_WORK
from stepscope.explain.story.comparison.run_charts import (
    draw_memory_trend,
    draw_step_trend,
    draw_throughput_trend,
    stack_parts,
)
from stepscope.explain.story.comparison.run_figures import RunFigures
from stepscope.explain.story.comparison.run_series import (
    CasePoint,
    RunSeries,
    tabulate_cases,
    tabulate_runs,
    tabulate_settings,
)
from stepscope.explain.story.comparison.step_verdict import say_change_of
from stepscope.explain.story.opening import MOST_HEADLINE, SEPARATOR
from stepscope.explain.story.phrases import say_started
from stepscope.findings import CHANGES, Copyable, Exhibit, Fact, Part, Report, Section, Soundness
from stepscope.units import clip, count_noun, say_list, say_size, say_time

_MS = 1e6
_MOST_NAMED = 3  # runs in a sentence
_VERDICTS = {"faster": "faster", "slower": "slower", "noise": "within noise", "same": "the same"}
_LINKS = {"faster": "than", "slower": "than", "noise": "of", "same": "as"}  # to what a run is compared with


def tell_many(series: RunSeries, command: str = "") -> Report:
    """`command` repeats the report."""
    parts: dict[str, Part | None] = {
        "trend-cases": tabulate_cases(series),
        "trend-step": draw_step_trend(series),
        "trend-runs": tabulate_runs(series),
        "trend-settings": tabulate_settings(series),
        "trend-throughput": draw_throughput_trend(series),
        "trend-memory": draw_memory_trend(series),
        **{f"trend-{key}": bars for key, bars in stack_parts(series)},
    }
    exhibits = [Exhibit(key=key, part=part) for key, part in parts.items() if part is not None]
    section = Section(key=CHANGES, title="Runs compared", lead=_say_lead(series), exhibits=tuple(exhibits))
    return Report(
        title=_title(series),
        subtitle=_say_where(series),
        runs=series.labels,
        sentence=say_series(series),
        facts=tuple(_list_facts(series)),
        advice=None,
        soundness=_judge_all(series),
        sections=(section,),
        commands=tuple(_list_commands(series, command)),
        version=__version__,
    )


def _title(series: RunSeries) -> str:
    """The number of runs, and the model if all runs have the same one."""
    cases = [point.figures.identity.case for point in series.points]
    models = {name_model(case.workload.model) if case is not None else "" for case in cases}
    runs = count_noun(len(series.labels), "run")
    runs += "" if series.is_of_runs else f", {count_noun(len(series.cases), 'case')}"
    return f"{model}: {runs}" if len(models) == 1 and (model := models.pop()) else runs


def _say_where(series: RunSeries) -> str:
    """What all runs share, and when the first and the last were recorded."""
    figures = [point.figures for point in series.points]
    devices = {one.identity.device for one in figures}
    versions = {one.identity.torch for one in figures}
    started = sorted(one.started for one in figures if one.started)
    span = [say_started(one) for one in dict.fromkeys((started[0], started[-1]))] if started else []
    words = [
        devices.pop() if len(devices) == 1 else f"{len(devices)} devices",
        f"PyTorch {version}" if len(versions) == 1 and (version := next(iter(versions))) else "",
        " to ".join(span),
    ]
    return SEPARATOR.join(word for word in words if word)


# --- The headline -----------------------------------------------------------------------------------------------------


def say_series(series: RunSeries) -> str:
    """The fastest run compared with the baseline; with several cases, how many changed from the baseline to the last
    run."""
    runs = count_noun(len(series.labels), "run")
    said = _say_runs(series) if series.is_of_runs else _say_cases(series)
    return f"{clip(f'{runs}{said}', MOST_HEADLINE - 1)}."


def _say_cases(series: RunSeries) -> str:
    counted = _count_verdicts(series, series.last) or "no case in common"
    sides = f"{series.labels[series.last]} vs {series.labels[series.baseline]}"
    return f", {count_noun(len(series.cases), 'case')}: {sides}: {counted}"


def _say_runs(series: RunSeries) -> str:
    timed = [point for point in series.points if point.figures.step is not None]
    if len(timed) < 2:
        sizes = [point.figures.peak_bytes for point in series.points if point.figures.peak_bytes is not None]
        return f": peak memory {say_size(min(sizes))} to {say_size(max(sizes))}" if sizes else ": nothing to compare"
    what = "per step" if series.is_step else "in the trace"
    fastest, slowest = min(timed, key=_step_ns), max(timed, key=_step_ns)
    if len({point.figures.work for point in timed}) > 1:
        work = [name for name in series.differing if name in DECIDES_WORK and name != "device"]
        span = f"{say_time(_step_ns(fastest))} to {say_time(_step_ns(slowest))}"
        return f": {span} {what}; the work of a step differs ({', '.join(work)})"
    took = f"{series.labels[fastest.run]} is the fastest, {say_time(_step_ns(fastest))} {what}"
    if fastest.verdict == "baseline":
        slower = sum(point.verdict == "slower" for point in timed)
        return f": {took}; {slower} of {len(timed) - 1} others are slower by more than noise"
    if fastest.base is None or fastest.base.step is None:
        return f": {took}"
    change = f"{say_change_of(fastest.base.step.step_ns, _step_ns(fastest))} than"
    change = {"noise": "within noise of", "same": "the same as"}.get(fastest.verdict, change)
    return f": {took}, {change} {series.labels[series.baseline]}"


def _step_ns(point: CasePoint) -> float:
    assert point.figures.step is not None, "a timed run"
    return point.figures.step.step_ns


def _count_verdicts(series: RunSeries, run: int) -> str:
    counts = Counter(point.verdict for point in series.points if point.run == run)
    words = [f"{counts[verdict]} {said}" for verdict, said in _VERDICTS.items() if counts[verdict]]
    words += [f"{counts['cannot tell']} undecided"] if counts["cannot tell"] else []
    return say_list(words) if words else ""


def _say_lead(series: RunSeries) -> str:
    """What the verdicts say, run by run or for all cases."""
    base = series.labels[series.baseline]
    if not series.is_of_runs:
        told = [
            f"{label}: {counted}"
            for run, label in enumerate(series.labels)
            if run != series.baseline and (counted := _count_verdicts(series, run))
        ]
        return f"Compared with {base}, case by case. " + "; ".join(told[-_MOST_NAMED:]) + "." if told else ""
    with_what = base if series.is_single else "the first run of the same work"
    words: list[str] = []
    for verdict, said in _VERDICTS.items():
        labels = [series.labels[point.run] for point in series.points if point.verdict == verdict]
        named = say_list(labels) if len(labels) <= _MOST_NAMED else f"{len(labels)} runs"
        words += [f"{said}{'' if words else f' {_LINKS[verdict]} {with_what}'}: {named}"] if labels else []
    verdicts = "; ".join(words)
    return f"{verdicts[0].upper()}{verdicts[1:]}." if verdicts else ""


# --- Facts and measurement quality ------------------------------------------------------------------------------------


def _list_facts(series: RunSeries) -> Iterator[Fact]:
    yield Fact(key="runs", label="runs", value=len(series.labels), kind="count")
    if not series.is_of_runs:
        shared = sum(all(one is not None for one in case.figures) for case in series.cases)
        note = f"{shared} in all runs"
        yield Fact(key="cases", label="cases", value=len(series.cases), kind="count", note=note)
        for verdict in ("slower", "faster"):
            count = sum(point.verdict == verdict for point in series.points if point.run == series.last)
            note = f"in {series.labels[series.last]}"
            yield Fact(key=verdict, label=f"cases {verdict}", value=count, kind="count", note=note)
        return
    timed = [point for point in series.points if point.figures.step is not None]
    what = "step" if series.is_step else "trace"
    if timed:
        for key, label, chosen in (
            ("fastest", f"shortest {what}", min(timed, key=_step_ns)),
            ("slowest", f"longest {what}", max(timed, key=_step_ns)),
        ):
            name = series.labels[chosen.run]
            yield Fact(key=key, label=label, value=_step_ns(chosen) / _MS, kind="ms", note=name)
    known = [point for point in series.points if point.figures.peak_bytes is not None]
    if known and len({point.figures.is_of_process for point in known}) == 1:
        sizes = [(point.figures.peak_bytes or 0, series.labels[point.run]) for point in known]
        if min(sizes)[0] == max(sizes)[0]:
            yield Fact(key="memory", label="peak memory", value=min(sizes)[0], kind="bytes", note="in all of them")
            return
        yield Fact(key="least", label="lowest peak memory", value=min(sizes)[0], kind="bytes", note=min(sizes)[1])
        yield Fact(key="most", label="highest peak memory", value=max(sizes)[0], kind="bytes", note=max(sizes)[1])


def _judge_all(series: RunSeries) -> Soundness:
    """The worst verdict of all runs, and the reasons of each that is not sound."""
    runs: dict[int, list[RunFigures]] = {}
    for point in series.points:
        runs.setdefault(point.run, []).append(point.figures)
    doubtful = [run for run, some in runs.items() if any(one.soundness.verdict == "doubtful" for one in some)]
    unknown = [run for run, some in runs.items() if any(one.soundness.verdict == "unknown" for one in some)]
    details = tuple(
        dict.fromkeys(
            f"{series.labels[point.run]}{f', {point.case.name}' if point.case.name else ''}: "
            f"{point.figures.soundness.sentence}"
            for point in series.points
            if point.figures.soundness.verdict != "sound"
        )
    )
    devices = {point.figures.identity.device for point in series.points if point.figures.identity.device}
    if len(devices) > 1:
        said = f"The runs used different devices: {say_list(sorted(devices))}."
        return Soundness(verdict="doubtful", sentence=said, details=details)
    if doubtful:
        named = say_list(series.labels[run] for run in doubtful[:_MOST_NAMED])
        who = named if len(doubtful) <= _MOST_NAMED else f"{len(doubtful)} of {len(runs)} runs"
        are = "is" if len(doubtful) == 1 else "are"
        return Soundness(verdict="doubtful", sentence=f"{who} {are} unreliable.", details=details)
    if unknown:
        said = f"{count_noun(len(unknown), 'run')} without a record of other processes or clock throttling."
        return Soundness(verdict="unknown", sentence=said, details=details)
    return Soundness(verdict="sound", sentence=f"No disturbance detected in {count_noun(len(runs), 'run')}.")


def _list_commands(series: RunSeries, command: str) -> Iterator[Copyable]:
    """The command that repeats the report, and one that compares two of its runs in depth."""
    if command:
        yield Copyable(label="this report", text=command)
    judged = [point for point in series.points if point.ratio is not None and point.verdict != "baseline"]
    if series.is_of_runs and judged:
        changed = max(judged, key=lambda point: abs((point.ratio or 1.0) - 1.0))
        assert changed.base is not None, "a ratio has a baseline"
        words = ["stepscope", "report", changed.base.path, changed.figures.path, "--out", "both.html"]
        names = f"{series.labels[changed.run]} and its baseline in detail"
        yield Copyable(label=names, text=shlex.join(words))
