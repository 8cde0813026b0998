"""One run as a report: the headline, what to do, the measurement quality, and a section per topic.

A section depends on nothing but its `Materials`, so a comparison can put those of two runs side by side.
"""

import re
from collections.abc import Callable, Sequence

import msgspec

from stepscope import __version__
from stepscope.explain.commands import write_command
from stepscope.explain.memory.answers import answer_memory
from stepscope.explain.questions import Answer, answer
from stepscope.explain.rules import RULES
from stepscope.explain.rules.out_of_memory import find_fixes
from stepscope.explain.rules.rule import THROUGHPUT
from stepscope.explain.story.commands import list_commands
from stepscope.explain.story.measured import add_measured, find_measured
from stepscope.explain.story.memory_card import drop_larger_batches, make_memory_card
from stepscope.explain.story.missing import explain_absence, gather_missing
from stepscope.explain.story.opening import Opening, list_facts, name_rank, say_run, subtitle_of, title_of
from stepscope.explain.story.phrases import shorten
from stepscope.explain.story.sections.environment_facts import show_environment
from stepscope.explain.story.sections.experiment_results import show_attention, show_optimised, show_precision
from stepscope.explain.story.sections.experts import show_experts
from stepscope.explain.story.sections.loop import show_loop
from stepscope.explain.story.sections.memory_peak import show_memory, show_saved
from stepscope.explain.story.sections.out_of_memory import show_out_of_memory
from stepscope.explain.story.sections.ranks import show_ranks
from stepscope.explain.story.sections.step_picture import draw_steps
from stepscope.explain.story.sections.step_time import show_roofline, show_time, show_timeline
from stepscope.explain.story.soundness import judge
from stepscope.explain.story.sources import Materials, share_peaks
from stepscope.explain.trace.experts import find_expert_kernels
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Advice, Copyable, Exhibit, Finding, Question, Questions, Report, Section
from stepscope.spec import ModelShape
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
        asked += [("questions-memory", "Memory", of_this_run)] if of_this_run else []
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
    exhibits = tuple(
        Exhibit(key=name, part=Questions(title=heading, questions=_write(found))) for name, heading, found in asked
    )
    return Section(key=key, title=title, lead=lead, exhibits=exhibits)


def _write(answers: Sequence[Answer]) -> tuple[Question, ...]:
    return tuple(
        Question(
            question=one.question,
            figure=one.figure,
            answer=one.sentence,
            evidence=shorten(one.evidence, "", _EVIDENCE_ROWS) if one.evidence else None,
            command=one.command,
            is_answered=one.status == "answered",
        )
        for one in answers
    )


# --- The page ---------------------------------------------------------------------------------------------------------

# In the order of the page. `is_shown` knows which of them a run has.
SECTIONS: dict[str, Callable[[Materials], Section]] = {
    "oom": show_out_of_memory,
    "ranks": show_ranks,
    "loop": show_loop,
    "timeline": show_timeline,
    "time": show_time,
    "experts": show_experts,
    "roofline": show_roofline,
    "memory": show_memory,
    "autograd": show_saved,
    "precision": show_precision,
    "attention": show_attention,
    "optimise": show_optimised,
    "questions": answer_questions,
    "environment": show_environment,
}


def is_shown(key: str, materials: Materials) -> bool:
    """Whether a run has a section: `ranks` only with several, `loop` only if it is that of a training loop,
    `experts` only if the model has some, `oom` only if it ran out of memory, and `optimise` only on request."""
    match key:
        case "oom":
            return materials.out_of_memory is not None
        case "ranks":
            return len(materials.ranks) > 1
        case "loop":
            return materials.loop is not None
        case "experts":
            return materials.profile is not None and bool(find_expert_kernels(materials.profile).height)
        case "optimise":
            return materials.optimisation is not None or "optimise" in materials.absent
        case _:
            return True


def tell(materials: Materials) -> Report:
    materials = share_peaks(materials)
    opening = Opening(materials)
    shown = [show for key, show in SECTIONS.items() if is_shown(key, materials)]
    advice = list_advice(materials)
    return Report(
        title=title_of(materials),
        subtitle=subtitle_of(materials),
        sentence=say_run(opening),
        facts=list_facts(opening),
        picture=draw_steps([materials.profile], [name_rank(materials)]),
        advice=advice,
        memory_card=make_memory_card(opening, advice or ()),
        soundness=judge(opening),
        sections=gather_missing([show(materials) for show in shown]),
        commands=list_commands(materials),
        version=__version__,
        is_partial=materials.is_partial,
    )


_SHELL = re.compile(r"(?:[A-Z_]+=\S+ )*(?:stepscope|torchrun|nvidia-smi|lscpu) ")


def list_advice(materials: Materials) -> tuple[Advice, ...] | None:
    """The findings with what to copy: what would have fit if memory ran out, what this page measured, and what the
    profile shows. None without any of them."""
    profile, measured, oom = materials.profile, find_measured(materials), materials.out_of_memory
    if profile is None and not measured and oom is None:
        return None
    fitting = () if oom is None else tuple(map(_advise_on_memory, find_fixes(oom)))
    found = [advise(finding, profile) for finding in add_measured(materials.findings, measured)]
    return (*fitting, *(drop_larger_batches(one, materials.plan) for one in found))


def _advise_on_memory(finding: Finding) -> Advice:
    fixes = (Copyable(label="in your own code", text=finding.fix),) if finding.fix else ()
    return Advice(finding=finding, fixes=fixes)


def advise(finding: Finding, profile: Profile | None) -> Advice:
    """A finding with its fixes to copy, and those of the findings that are part of it: the complete command with the
    fixing setting for a run of stepscope, unless it is set already, and the lines to paste for other code. A remark has
    what to run to learn more, if anything."""
    fixes = [fix for one in (finding, *finding.also) for fix in _list_fixes(one, profile)]
    return Advice(finding=finding, fixes=tuple({fix.text: fix for fix in reversed(fixes)}.values())[::-1])


def _list_fixes(finding: Finding, profile: Profile | None) -> list[Copyable]:
    if finding.is_measured or profile is None:
        label = "this run with the fix" if _SHELL.match(finding.fix) else "in your own code"
        return [Copyable(label=label, text=finding.fix)]
    rule, manifest = RULES[finding.code], profile.recording.manifest
    workload = manifest.case.workload if manifest.case else None
    changes = rule.change(manifest) if rule.change and workload is not None and not finding.is_remark else {}
    is_builtin = workload is not None and isinstance(workload.model, ModelShape)
    fixes = []
    if workload is not None and changes and (is_builtin or _is_said(finding, changes)):
        changed = msgspec.structs.replace(workload, **changes)
        fixes.append(Copyable(label="this run with the fix", text=write_command("report", changed)))
    if rule.look_up is not None and (command := rule.look_up(profile)) is not None:
        fixes.append(command)
    # Users do not edit the built-in model: code to paste has no place there.
    if finding.fix and not is_builtin:
        label = "in a shell" if _SHELL.match(finding.fix) else "in your own code"
        fixes.append(Copyable(label=label, text=finding.fix))
    return fixes


def _is_said(finding: Finding, changes: dict[str, object]) -> bool:
    """Whether the settings do what the finding advises: a rule may advise several things, by what the run does already,
    and a larger batch, compilation or CUDA graphs are only one of them."""
    said = {"batch": THROUGHPUT, "compile": "Compile the model", "graph": "CUDA graphs"}
    return all(said[name] in finding.action for name in changes if name in said)
