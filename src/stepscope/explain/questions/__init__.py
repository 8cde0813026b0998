"""The questions people ask of a step, answered from recordings: what a person would otherwise look up by hand in a
timeline, with the evidence beside each answer. What a recording does not hold is said, never guessed."""

from collections.abc import Sequence

from stepscope.explain.questions.answers import Answer, answers_table, answers_text, evidence_tables
from stepscope.explain.questions.copies import copies_in_backward
from stepscope.explain.questions.forward import forward_time, top_kernel, what_else_matters
from stepscope.explain.questions.idle_gaps import idle_time
from stepscope.explain.questions.product_roles import products_by_role
from stepscope.explain.questions.sizes import share_of_products, small_against_large
from stepscope.explain.questions.softmax import softmax_against_products
from stepscope.explain.trace.profile import Profile

__all__ = ["Answer", "answer", "answers_table", "answers_text", "evidence_tables"]


def answer(profiles: Sequence[Profile]) -> tuple[Answer, ...]:
    """All questions, in the order in which people ask them. Of several recordings, the first that trains (else the
    first) answers what is asked of one; the comparing questions take all."""
    if not profiles:
        raise ValueError("no recording to ask")
    main = next((one for one in profiles if (one.kernels["phase"] == "backward").any()), profiles[0])
    return (
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
