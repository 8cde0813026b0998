"""The batch of a step follows from the seed and the step number, and can be learned."""

import itertools
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.spec import ModelShape, Training, Workload
from stepscope.step.tokens import Tokens

SHAPE = ModelShape(d_model=16, d_ff=16, num_layers=1, num_heads=1, num_kv_heads=1, vocab=256)
MADE = Training(workload=Workload(model=SHAPE, batch=4, context=32))


def test_step_has_one_batch_and_steps_differ() -> None:
    first, again = Tokens(MADE), Tokens(MADE)
    assert torch.equal(first.batch(3), again.batch(3))
    assert not torch.equal(first.batch(3), first.batch(4))
    other = Tokens(msgspec.structs.replace(MADE, workload=msgspec.structs.replace(MADE.workload, seed=1)))
    assert not torch.equal(first.batch(3), other.batch(3))
    assert first.batch(1).shape == (4, 33)


def test_most_generated_tokens_follow_from_the_previous_one() -> None:
    follows: dict[int, list[int]] = {}
    tokens = Tokens(MADE)
    for step in range(1, 30):
        for row in tokens.batch(step).tolist():
            for token, following in itertools.pairwise(row):
                follows.setdefault(token, []).append(following)
    often = [max(map(after.count, set(after))) / len(after) for after in follows.values() if len(after) > 8]
    assert 0.8 < sum(often) / len(often) < 0.97


def test_text_is_read_in_windows(tmp_path: Path) -> None:
    text = bytes(range(256)) * 3
    (tmp_path / "text").write_bytes(text)
    tokens = Tokens(msgspec.structs.replace(MADE, data=str(tmp_path / "text")))
    for row in tokens.batch(1):
        assert bytes(row.tolist()) in text
    starts = {int(row[0]) for step in range(20) for row in tokens.batch(step)}
    assert len(starts) > 40


def test_text_shorter_than_a_sequence_raises(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 33)
    assert Tokens(msgspec.structs.replace(MADE, data=str(tmp_path / "text"))).batch(1).shape == (4, 33)
    (tmp_path / "text").write_bytes(b"x" * 32)
    with pytest.raises(StepscopeError, match="32 bytes, and a sequence needs 33"):
        Tokens(msgspec.structs.replace(MADE, data=str(tmp_path / "text")))
