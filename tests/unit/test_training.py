"""A training that cannot be says what to change, and what makes two runs the same run."""

import msgspec
import pytest

from stepscope.spec import SIZES, Factory, SpecError, Training, Workload

NANO = Workload(model=SIZES["nano"], batch=8)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"ranks": 3, "strategy": "flat"}, "batch `8` cannot be shared out to 3 ranks", "--batch 9"),
        ({"ranks": 2, "strategy": "flat", "accumulate": 3}, "2 ranks of 3 passes each", "--batch 12"),
        ({"ranks": 2}, "strategy `single` with `2` ranks", "--strategy bucketed"),
        ({"strategy": "magic"}, "unknown strategy: `magic`", ""),
        ({"ranks": 0}, "ranks `0` is not positive", "--ranks 1"),
        ({"steps": -1}, "steps `-1` is not positive", "--steps 1"),
        ({"learning_rate": float("nan")}, "learning_rate `nan` is not positive", "--lr 0.001"),
        ({"bucket_mb": 0.0}, "bucket_mb `0` is not positive", "--bucket-mb 25"),
        ({"shard_optimizer": True}, "a sharded optimizer with strategy `single`", "--strategy bucketed"),
        ({"strategy": "fsdp", "shard_optimizer": True}, "strategy `fsdp`", "--shard-optimizer"),
        ({"warmup_steps": -2}, "warmup_steps `-2` is negative", "--lr-warmup 0"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        Training(workload=NANO, **settings)  # type: ignore[arg-type]
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp16"}, "precision `fp16` is not trained here"),
        ({"mode": "forward"}, "mode `forward` does not train"),
        ({"model": Factory(target="mine:build")}, "cannot be trained by this verb"),
    ],
)
def test_workloads_that_cannot_be_trained_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Training(workload=msgspec.structs.replace(NANO, **change))


def test_a_text_needs_room_for_bytes() -> None:
    small = msgspec.structs.replace(NANO, model=msgspec.structs.replace(SIZES["nano"], vocab=100))
    with pytest.raises(SpecError, match="too small for a file of bytes"):
        Training(workload=small, data="text.txt")


def test_ranks_and_strategy_do_not_make_another_run_and_the_seed_does() -> None:
    plain = Training(workload=NANO)
    other = Training(
        workload=msgspec.structs.replace(NANO, device="cpu"),
        ranks=4,
        strategy="fsdp",
        accumulate=2,
        steps=7,
        save_every=3,
    )
    assert plain.identity == other.identity
    assert plain.identity != Training(workload=msgspec.structs.replace(NANO, seed=1)).identity
    assert plain.identity != Training(workload=NANO, learning_rate=1e-2).identity
