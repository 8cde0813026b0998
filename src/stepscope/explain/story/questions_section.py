"""The questions people ask of a step and of its memory, answered or not."""

from collections.abc import Sequence

from stepscope.explain.memory.answers import answer_memory
from stepscope.explain.questions import Answer, answer
from stepscope.explain.story.commands import add_settings, find_case
from stepscope.explain.story.missing import explain_absence
from stepscope.explain.story.phrases import shorten
from stepscope.explain.story.sources import Materials
from stepscope.findings import Exhibit, Question, Questions, Section
from stepscope.spec import Case

_EVIDENCE_ROWS = 20
_OF_NO_RUN = ("by-hand",)  # an exercise with sizes of its own


def answer_questions(materials: Materials) -> Section:
    key, title = "questions", "Questions"
    asked: list[tuple[str, str, tuple[Answer, ...]]] = []
    if materials.profile is not None:
        asked.append(("questions-time", "About time", answer([materials.profile])))
    if materials.memory is not None:
        of_this_run = tuple(one for one in answer_memory(materials.memory) if one.key not in _OF_NO_RUN)
        asked.append(("questions-memory", "About memory", of_this_run))
    if not asked:
        return Section(
            key=key,
            title=title,
            missing=(explain_absence(materials, "profile", "answers to what people ask of a step"),),
        )
    answers = [one for _, _, found in asked for one in found]
    answered = sum(one.status == "answered" for one in answers)
    rest = len(answers) - answered
    needs = "1 needs another recording, and names it" if rest == 1 else f"{rest} need another recording, and name it"
    lead = f"{answered} of {len(answers)} questions are answered{f'; {needs}' if rest else ''}."
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
