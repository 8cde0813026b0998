"""Challenges: the batch and context of a run that follow from a nonce.

A verifier chooses a nonce, and both sides derive the same task from it. A recording that was made before the nonce was
known then has the wrong shape. The derivation is part of the protocol and never changes; another one would get another
number in `SCHEME`. It needs no stepscope:

    digest = HMAC-SHA256(key: nonce, message: "stepscope.challenge/1 max_tokens=8192 max_context=1024")
    shapes = every (context, batch), sorted, where
             context is a multiple of 8, at most both limits and at least a quarter of the smaller limit, and
             batch is at most max_tokens / context and at least half of that, rounded down and up
    task   = the shape at the index digest, as a big-endian integer, modulo the number of shapes

Contexts are multiples of 8 because others make libraries choose kernels that nobody runs in production. Large batches
keep the GPU busy: a run of a few tokens shows less in its counters.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

import msgspec

from stepscope.errors import StepscopeError
from stepscope.findings import Column, Table
from stepscope.recover.claims.verdict import Interval
from stepscope.recover.reports.signed_report import check_nonce

SCHEME = "stepscope.challenge/1"
MAX_CONTEXT = 1024  # the positions of GPT-2, which has the fewest of the models that a claim can name
_STEP = 8
_FEWEST = 32  # tokens; fewer leave no choice
_MOST = 1 << 20


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a nonce. `shapes` is the number of tasks that other nonces could have given."""

    scheme: str = SCHEME
    nonce: str
    max_tokens: int
    max_context: int
    batch: int
    context: int
    shapes: int

    def find_problem(self, statement: Mapping[str, object]) -> str:
        """Return why a signed statement does not answer this challenge, or an empty string if it does."""
        answered = statement.get("challenge")
        if answered is None:
            return "the report does not answer a challenge"
        if answered != msgspec.to_builtins(self):
            return "the report answers a challenge with other limits"
        return ""


def derive_challenge(nonce: str, *, max_tokens: int, max_context: int = MAX_CONTEXT) -> Challenge:
    """Return the task that follows from a nonce. Raises StepscopeError for an invalid nonce, and for limits that leave
    no choice."""
    check_nonce(nonce)
    for flag, value in (("--max-tokens", max_tokens), ("--max-context", max_context)):
        if not _FEWEST <= value <= _MOST:
            raise StepscopeError(
                f"`{flag} {value}` is out of range", detail=f"expected {_FEWEST} to {_MOST:,}", hint=f"{flag} 1024"
            )
    message = f"{SCHEME} max_tokens={max_tokens} max_context={max_context}"
    digest = hmac.digest(nonce.encode(), message.encode(), hashlib.sha256)
    shapes = _list_shapes(max_tokens, max_context)
    context, batch = shapes[int.from_bytes(digest) % len(shapes)]
    return Challenge(
        nonce=nonce,
        max_tokens=max_tokens,
        max_context=max_context,
        batch=batch,
        context=context,
        shapes=len(shapes),
    )


def count_passing(challenge: Challenge, *, batches: Sequence[Interval], contexts: Sequence[Interval]) -> int:
    """Return how many other tasks the evidence would answer as well, given the other values of each size that pass."""
    return sum(
        (batch == challenge.batch and _is_in(context, contexts))
        or (context == challenge.context and _is_in(batch, batches))
        for context, batch in _list_shapes(challenge.max_tokens, challenge.max_context)
    )


def _is_in(value: int, intervals: Sequence[Interval]) -> bool:
    return any(low <= value <= (value if high is None else high) for low, high in intervals)


def challenge_table(challenge: Challenge) -> Table:
    columns = (Column(key="what", label="challenge"), Column(key="value", label="value"))
    names = ("nonce", "max_tokens", "max_context", "batch", "context", "shapes")
    rows = tuple((name, str(getattr(challenge, name))) for name in names)
    note = "a recording of another shape does not answer this challenge; the limits belong to it"
    return Table(title="Challenge", columns=columns, rows=rows, notes=(note,))


def _list_shapes(max_tokens: int, max_context: int) -> list[tuple[int, int]]:
    longest = min(max_tokens, max_context)
    contexts = range(_STEP, longest + 1, _STEP)
    return [
        (context, batch)
        for context in contexts
        if 4 * context >= longest
        for most in (max_tokens // context,)
        for batch in range(-(-most // 2), most + 1)
    ]
