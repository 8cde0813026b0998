"""One run as a report: the headline, what to do, the measurement quality, and a section per topic.

A section depends on nothing but its `Materials`, so a comparison can put those of two runs side by side.
"""

from collections.abc import Callable, Sequence

import msgspec

from stepscope import __version__
from stepscope.explain.commands import write_command
from stepscope.explain.memory.answers import answer_memory
from stepscope.explain.questions import Answer, answer
from stepscope.explain.rules import RULES, find_once
from stepscope.explain.story.commands import add_settings, find_case, list_commands
from stepscope.explain.story.missing import explain_absence, gather_missing
from stepscope.explain.story.opening import Opening, list_facts, say_run, subtitle_of, title_of
from stepscope.explain.story.phrases import shorten
from stepscope.explain.story.sections.environment_facts import show_environment
from stepscope.explain.story.sections.experiment_results import show_attention, show_precision
from stepscope.explain.story.sections.memory_peak import show_memory, show_saved
from stepscope.explain.story.sections.step_time import show_ranks, show_roofline, show_time, show_timeline
from stepscope.explain.story.soundness import judge
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Advice, Copyable, Exhibit, Finding, Question, Questions, Report, Section
from stepscope.spec import Case, ModelShape
from stepscope.units import count_noun

# --- Questions --------------------------------------------------------------------------------------------------------


_EVIDENCE_ROWS = 20
_OF_NO_RUN = ("by-hand",)  # an exercise with its own sizes


def answer_questions(materials: Materials) -> Section:
    key, title = "questions", "Questions"
    asked: list[tuple[str, str, tuple[Answer, ...]]] = []
    if materials.profile is not None:
        asked.append(("questions-time", "Time", answer([materials.profile])))
    if materials.memory is not None:
        of_this_run = tuple(one for one in answer_memory(materials.memory) if one.key not in _OF_NO_RUN)
        asked.append(("questions-memory", "Memory", of_this_run))
    if not asked:
        return Section(
            key=key,
            title=title,
            missing=(explain_absence(materials, "profile", "questions and answers"),),
        )
    answers = [one for _, _, found in asked for one in found]
    answered = sum(one.status == "answered" for one in answers)
    rest = len(answers) - answered
    needs = f"; {rest} {'needs' if rest == 1 else 'need'} another recording" if rest else ""
    lead = f"{answered} of {count_noun(len(answers), 'question')} answered{needs}."
    case = find_case(materials)
    exhibits = tuple(
        Exhibit(key=name, part=Questions(title=heading, questions=_write(found, case)))
        for name, heading, found in asked
    )
    return Section(key=key, title=title, lead=lead, exhibits=exhibits)


def _write(answers: Sequence[Answer], case: Case | None) -> tuple[Question, ...]:
    return tuple(
        Question(
            question=one.question,
            figure=one.figure,
            answer=one.sentence,
            evidence=shorten(one.evidence, "", _EVIDENCE_ROWS) if one.evidence else None,
            command=add_settings(one.command, case.workload) if case else one.command,
            is_answered=one.status == "answered",
        )
        for one in answers
    )


# --- The page ---------------------------------------------------------------------------------------------------------

# In the order of the page. Only a run with several ranks has `ranks`.
SECTIONS: dict[str, Callable[[Materials], Section]] = {
    "timeline": show_timeline,
    "time": show_time,
    "roofline": show_roofline,
    "memory": show_memory,
    "autograd": show_saved,
    "precision": show_precision,
    "attention": show_attention,
    "ranks": show_ranks,
    "questions": answer_questions,
    "environment": show_environment,
}


def tell(materials: Materials) -> Report:
    opening = Opening(materials)
    shown = [show for key, show in SECTIONS.items() if key != "ranks" or len(materials.ranks) > 1]
    return Report(
        title=title_of(materials),
        subtitle=subtitle_of(materials),
        sentence=say_run(opening),
        facts=list_facts(opening),
        advice=list_advice(materials),
        soundness=judge(opening),
        sections=gather_missing([show(materials) for show in shown]),
        commands=list_commands(materials),
        version=__version__,
        is_partial=materials.is_partial,
    )


def list_advice(materials: Materials) -> tuple[Advice, ...] | None:
    """The largest saving first. Findings that a fix further up already covers come after these, so that the first three
    are three different things to do; remarks come last. None without a profile."""
    profile, step_ns = materials.profile, materials.profile_step_ns
    if profile is None or step_ns is None:
        return None
    first: list[Advice] = []
    repeated: list[Advice] = []
    remarks: list[Advice] = []
    for finding in find_once(profile):
        advice = advise(_share_of(finding, step_ns), profile)
        if finding.is_remark:
            remarks.append(advice)
            continue
        given = {fix.text for above in first for fix in above.fixes}
        (repeated if given.intersection(fix.text for fix in advice.fixes) else first).append(advice)
    return (*first, *repeated, *remarks)


def _share_of(finding: Finding, step_ns: float) -> Finding:
    """The finding with its saving as a share of the page's step; rules use the profile's clock."""
    if finding.saving_ns is None:
        return finding
    return msgspec.structs.replace(finding, share=min(1.0, finding.saving_ns / max(1.0, step_ns)))


def advise(finding: Finding, profile: Profile) -> Advice:
    """A finding with its fixes to copy: the complete command with the fixing setting for a run of stepscope, unless it
    is set already, and the lines to paste for other code. A remark has what to run to learn more, if anything."""
    rule, manifest = RULES[finding.code], profile.recording.manifest
    workload = manifest.case.workload if manifest.case else None
    changes = rule.change(manifest) if rule.change and workload is not None else {}
    fixes = []
    if workload is not None and changes:
        changed = msgspec.structs.replace(workload, **changes)
        fixes.append(Copyable(label="this run with the fix", text=write_command("report", changed)))
    if rule.look_up is not None:
        fixes.append(rule.look_up(profile))
    # Users do not edit the built-in model: code to paste has no place there.
    is_builtin = workload is not None and isinstance(workload.model, ModelShape)
    if rule.paste and not is_builtin:
        fixes.append(Copyable(label="in your own code", text=rule.paste))
    return Advice(finding=finding, fixes=tuple(fixes))
