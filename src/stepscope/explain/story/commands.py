"""The commands that made a page, and the cases of its parts."""

from stepscope.explain.story.sources import Materials, is_same_run
from stepscope.findings import Copyable
from stepscope.spec import Case, Timing


def find_case(materials: Materials) -> Case | None:
    """The case that ran, from the first part of the run that has one."""
    if materials.bench:
        return materials.bench[0].case
    for one in (materials.profile, materials.memory):
        if one is not None and one.recording.manifest.case is not None:
            return one.recording.manifest.case
    documents = (materials.precision, materials.optimisation)
    if found := next((one.case for one in documents if one is not None), None):
        return found
    return None if materials.plan is None else Case(workload=materials.plan.start.workload, timing=Timing())


def find_strangers(materials: Materials) -> dict[str, Case]:
    """The cases of recordings that do not belong to the run, by kind: users can combine any files."""
    run = find_case(materials)
    cases = {
        name: one.recording.manifest.case
        for name, one in (("profile", materials.profile), ("memory", materials.memory))
        if one is not None
    }
    return {name: case for name, case in cases.items() if case and run and not is_same_run(case, run)}


def list_commands(materials: Materials) -> tuple[Copyable, ...]:
    """The commands that made the report, each once: that of the whole report first, then those of its parts."""
    manifests = [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]
    typed = [("this report", materials.command)]
    typed += [("timing", row.command) for row in materials.bench[:1]]
    typed += [("recording" if one.loop else "memory" if one.memory else "profile", one.command) for one in manifests]
    typed += [("precision", materials.precision.command)] if materials.precision else []
    typed += [("attention", row.command) for row in materials.attention[:1]]
    typed += [("optimization", materials.optimisation.command)] if materials.optimisation else []
    texts: dict[str, str] = {}
    for label, text in typed:
        if text:
            texts.setdefault(text, label)
    return tuple(Copyable(label=label, text=text) for text, label in texts.items())
