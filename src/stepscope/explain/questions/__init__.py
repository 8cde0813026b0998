"""The questions people ask about a step, answered from recordings instead of by hand from a timeline, each with its
evidence. If a recording does not have the answer, it says so and never guesses."""

from collections.abc import Callable, Sequence

import msgspec

from stepscope.explain.questions.answers import Answer, answers_table, answers_text, evidence_tables, fit_commands
from stepscope.explain.questions.copies import copies_in_backward
from stepscope.explain.questions.forward import forward_time, top_kernel, what_else_matters
from stepscope.explain.questions.idle_gaps import idle_time
from stepscope.explain.questions.product_roles import products_by_role
from stepscope.explain.questions.sizes import share_of_products, small_against_large
from stepscope.explain.questions.softmax import softmax_against_products
from stepscope.explain.trace.profile import Profile

__all__ = ["Answer", "answer", "answers_table", "answers_text", "evidence_tables"]


def answer(profiles: Sequence[Profile]) -> tuple[Answer, ...]:
    """All questions, in the order in which people ask them. Questions about one recording use the first one that
    trains, or else the first; comparing questions use all of them."""
    if not profiles:
        raise ValueError("expected at least one profile")
    main = next((one for one in profiles if (one.kernels["phase"] == "backward").any()), profiles[0])
    answers = (
        forward_time(main),
        top_kernel(main),
        what_else_matters(main),
        share_of_products(main, profiles),
        softmax_against_products(main),
        products_by_role(main),
        copies_in_backward(main),
        small_against_large(profiles),
        idle_time(main),
    )
    reworded = answers if main.clock.has_steps else tuple(_reword(one, main.clock.reword) for one in answers)
    return fit_commands(reworded, main.recording.manifest)


def _reword(one: Answer, reword: Callable[[str], str]) -> Answer:
    """The answer with other words, also in its evidence."""
    table = one.evidence
    if table is not None:
        columns = tuple(msgspec.structs.replace(column, label=reword(column.label)) for column in table.columns)
        notes = tuple(map(reword, table.notes))
        table = msgspec.structs.replace(table, title=reword(table.title), columns=columns, notes=notes)
    return msgspec.structs.replace(one, figure=reword(one.figure), sentence=reword(one.sentence), evidence=table)
