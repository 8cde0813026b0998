"""The task of a nonce: documented, within its limits, and bound to them."""

import hashlib
import hmac

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.recover.reports.challenge import Challenge, count_passing, derive_challenge

NONCES = [f"{number:x}" for number in range(200)]


def derive_as_documented(nonce: str, max_tokens: int, max_context: int) -> tuple[int, int]:
    """As docs/verify.md describes it, independently of the implementation."""
    longest = min(max_tokens, max_context)
    shapes = []
    for context in range(1, longest + 1):
        if context % 8 or context < longest / 4:
            continue
        most = max_tokens // context
        shapes += [(context, batch) for batch in range(1, most + 1) if batch >= most / 2]
    message = f"stepscope.challenge/1 max_tokens={max_tokens} max_context={max_context}"
    digest = hmac.new(nonce.encode(), message.encode(), hashlib.sha256).hexdigest()
    return sorted(shapes)[int(digest, 16) % len(shapes)]


@pytest.mark.parametrize(("max_tokens", "max_context"), [(8192, 1024), (8192, 2048), (1000, 4096), (32, 32)])
def test_batch_and_context_follow_from_the_documentation(max_tokens: int, max_context: int) -> None:
    for nonce in NONCES[:20]:
        task = derive_challenge(nonce, max_tokens=max_tokens, max_context=max_context)
        assert (task.context, task.batch) == derive_as_documented(nonce, max_tokens, max_context)
        assert task.batch * task.context <= max_tokens
        assert task.context <= max_context


def test_the_derivation_never_changes() -> None:
    """Both sides may have different versions of stepscope."""
    task = derive_challenge("5f0c21", max_tokens=8192)
    assert (task.scheme, task.batch, task.context, task.shapes) == ("stepscope.challenge/1", 8, 960, 773)


def test_nonces_use_all_shapes_and_limits_are_part_of_the_task() -> None:
    tasks = {derive_challenge(nonce, max_tokens=8192) for nonce in NONCES}
    assert len({(one.batch, one.context) for one in tasks}) > 150
    others = {derive_challenge(nonce, max_tokens=8200) for nonce in NONCES}
    same = {(one.nonce, one.batch, one.context) for one in tasks} & {
        (one.nonce, one.batch, one.context) for one in others
    }
    assert len(same) < 10


@pytest.mark.parametrize(
    ("nonce", "max_tokens", "max_context", "says"),
    [
        ("two words", 8192, 1024, "invalid nonce"),
        ("", 8192, 1024, "invalid nonce"),
        ("a", 31, 1024, "`--max-tokens 31` is out of range"),
        ("a", 8192, 0, "`--max-context 0` is out of range"),
        ("a", 1 << 40, 1024, "is out of range"),
    ],
)
def test_invalid_limits_and_nonces_are_rejected(nonce: str, max_tokens: int, max_context: int, says: str) -> None:
    with pytest.raises(StepscopeError, match=says):
        derive_challenge(nonce, max_tokens=max_tokens, max_context=max_context)


def test_other_tasks_that_pass_are_counted() -> None:
    task = Challenge(nonce="a", max_tokens=8192, max_context=1024, batch=8, context=960, shapes=773)
    assert count_passing(task, batches=(), contexts=()) == 0
    # 944, 952 and 968 to 1,024 are multiples of 8; at all of them, 8 sequences fit.
    assert count_passing(task, batches=(), contexts=((940, 959), (961, None))) == 2 + 8
    assert count_passing(task, batches=((4, 7),), contexts=()) == 4  # at most 8 sequences of 960, at least 4


def test_a_statement_answers_only_its_own_challenge() -> None:
    task = derive_challenge("5f0c21", max_tokens=8192)
    assert task.find_problem({"challenge": msgspec.to_builtins(task)}) == ""
    assert "does not answer a challenge" in task.find_problem({"verdict": "consistent"})
    other = derive_challenge("5f0c21", max_tokens=4096)
    assert "other limits" in task.find_problem({"challenge": msgspec.to_builtins(other)})
