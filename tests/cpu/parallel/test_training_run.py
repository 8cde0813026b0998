"""Training runs on several ranks: the same under every strategy, resumed bit for bit, and intact after any kill."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stepscope.parallel import Communicator
from stepscope.parallel.journal import FOLDER_VARIABLE
from stepscope.recording.rows.checkpoints import FOLDER_NAME, newest
from stepscope.recording.rows.training_log import LOG_NAME, TrainMemory, TrainRow, read_log, read_memory
from stepscope.spec import ModelShape, SpecError, Training, Workload
from tests.cli.warm import measure_briefly
from tests.cpu.parallel.ranks import run_ranks, start_ranks

SHAPE = ModelShape(d_model=32, d_ff=64, num_layers=2, num_heads=2, num_kv_heads=2, vocab=64)
PLAIN = Training(
    workload=Workload(model=SHAPE, batch=4, context=16, device="cpu"), steps=8, save_every=4, learning_rate=1e-2
)


def with_ranks(ranks: int, strategy: str, **more: object) -> Training:
    return msgspec.structs.replace(PLAIN, ranks=ranks, strategy=strategy, **more)


class Silence:
    def resumed(self, step: int) -> None: ...

    def stepped(self, row: TrainRow) -> None: ...

    def saved(self, step: int) -> None: ...

    def accounted(self, memory: tuple[TrainMemory, ...]) -> None: ...


def train_here(rank: int, world: int, training: Training, folder: Path) -> None:
    from stepscope.measure.training import train

    os.environ[FOLDER_VARIABLE] = str(folder / "journal")
    os.environ["OMP_NUM_THREADS"] = "1"
    train(training, folder, Communicator(), device="cpu", command="test", listener=Silence())


def train_quickly(rank: int, world: int, training: Training, folder: Path) -> None:
    measure_briefly()
    train_here(rank, world, training, folder)


def train_on(training: Training, folder: Path) -> None:
    run_ranks(train_quickly, training.ranks, training, folder)


def state_of(folder: Path) -> dict[str, Any]:
    found = newest(folder / FOLDER_NAME)
    assert found is not None
    state: dict[str, Any] = torch.load(found.path, weights_only=True)
    return state


def assert_same_bits(ours: object, theirs: object) -> None:
    if isinstance(ours, dict):
        assert isinstance(theirs, dict)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same_bits(ours[key], theirs[key])
    elif isinstance(ours, torch.Tensor):
        assert isinstance(theirs, torch.Tensor)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


def losses(folder: Path) -> list[float]:
    return [row.loss for row in read_log(folder / LOG_NAME)[0]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, bucketed, from the first step to the last."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_on(with_ranks(2, "bucketed"), folder)
    return folder


def test_every_strategy_is_bitwise_equal_on_two_ranks(undisturbed: Path, tmp_path: Path) -> None:
    """A sum of two has one order. The last one is one process that accumulates the two halves of the batch."""
    ways = [with_ranks(2, "naive"), with_ranks(2, "flat", shard_optimizer=True), with_ranks(2, "fsdp")]
    ways += [with_ranks(1, "single", accumulate=2)]
    for number, training in enumerate(ways):
        folder = tmp_path / str(number)
        train_on(training, folder)
        assert_same_bits(state_of(folder), state_of(undisturbed))
        assert losses(folder) == losses(undisturbed)


def test_micro_batches_train_the_same_under_every_strategy(tmp_path: Path) -> None:
    """With SGD, whose updates scale with the gradients, unlike AdamW's."""
    whole = msgspec.structs.replace(PLAIN.workload, optimizer="sgd")
    split = msgspec.structs.replace(whole, grad_accumulation=2)
    train_on(with_ranks(1, "single", workload=whole, learning_rate=0.5), tmp_path / "whole")
    expected = losses(tmp_path / "whole")
    assert expected[-1] < 0.99 * expected[0]
    for strategy in ("naive", "overlap", "bucketed", "fsdp"):
        train_on(with_ranks(2, strategy, workload=split, learning_rate=0.5), tmp_path / strategy)
        assert losses(tmp_path / strategy) == pytest.approx(expected, rel=1e-5), strategy


def test_the_loss_falls(undisturbed: Path) -> None:
    curve = losses(undisturbed)
    assert len(curve) == PLAIN.steps
    assert curve[-1] < 0.97 * curve[0]


@pytest.mark.parametrize("change", [{}, {"strategy": "fsdp"}, {"shard_optimizer": True}])
def test_extended_run_resumes_bit_for_bit(undisturbed: Path, tmp_path: Path, change: dict[str, object]) -> None:
    """Half of the steps with one strategy, the rest with another."""
    half = with_ranks(2, "bucketed", steps=4)
    train_on(half, tmp_path)
    train_on(msgspec.structs.replace(half, steps=PLAIN.steps, **change), tmp_path)
    assert_same_bits(state_of(tmp_path), state_of(undisturbed))
    assert losses(tmp_path) == losses(undisturbed)


def test_another_number_of_ranks_resumes_from_the_same_bits(tmp_path: Path) -> None:
    """The state that four ranks and one start with is what two had saved; after that the sums have a different
    order.
    """
    train_on(with_ranks(2, "bucketed", steps=4), tmp_path)
    before = state_of(tmp_path)
    for ranks, strategy in ((4, "fsdp"), (1, "single"), (4, "naive")):
        (loaded,) = {repr(one) for one in run_ranks(_load_and_digest, ranks, with_ranks(ranks, strategy), tmp_path)}
        assert loaded == repr(_digest(before))
    train_on(with_ranks(4, "bucketed"), tmp_path)
    assert [row.step for row in read_log(tmp_path / LOG_NAME)[0]] == list(range(1, PLAIN.steps + 1))


def _load_and_digest(rank: int, world: int, training: Training, folder: Path) -> list[tuple[str, float]]:
    from stepscope.step.learner import Learner

    learner = Learner(training, Communicator(), torch.device("cpu"))
    learner.load_full_state(state_of(folder))  # type: ignore[arg-type]
    shared = Communicator().share_objects(learner.full_state(4), "what was loaded")
    assert shared[0] is not None
    return _digest(dict(shared[0]))


def _digest(state: dict[str, Any]) -> list[tuple[str, float]]:
    flat = [(f"model {name}", value) for name, value in state["model"].items()]
    for name, values in state["optimizer"].items():
        flat += [(f"{name} {key}", torch.as_tensor(value)) for key, value in values.items()]
    weights = [(name, value.double().flatten() @ torch.arange(1.0, value.numel() + 1).double()) for name, value in flat]
    return sorted((name, float(value)) for name, value in weights)


def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    """A random rank is killed at a random moment, twenty times; the other stops on its own each time."""
    training = with_ranks(2, "bucketed", shard_optimizer=True, steps=120, save_every=2)
    train_on(training, tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    chance = random.Random(6)
    kills = 0
    while True:
        for old in (folder / "journal").glob("*"):
            old.unlink()
        with start_ranks(train_here, 2, training, folder) as (processes, _):
            if kills == 20:
                for process in processes:
                    process.join()
                    assert process.exitcode == 0
                break
            _wait_until_joined(folder)
            time.sleep(chance.uniform(0, 0.3))
            victim = chance.randrange(2)
            os.kill(processes[victim].pid, signal.SIGKILL)
            kills += 1
            for process in processes:
                process.join(240)
                assert process.exitcode is not None, "a rank waits for a dead one"
            assert processes[victim].exitcode == -signal.SIGKILL, "the run ended before it could be killed"
            assert processes[1 - victim].exitcode != 0
    assert_same_bits(state_of(folder), state_of(tmp_path / "undisturbed"))
    assert losses(folder) == losses(tmp_path / "undisturbed")
    assert not list((folder / FOLDER_NAME).glob("*.part"))


def _wait_until_joined(folder: Path) -> None:
    """Before that, gloo has timeouts of its own, and the parent ends the ranks."""
    deadline = time.monotonic() + 240
    while len(list((folder / "journal").glob("*.journal"))) < 2:
        assert time.monotonic() < deadline, "the ranks did not meet"
        time.sleep(0.002)


def test_memory_is_counted_per_rank(undisturbed: Path, tmp_path: Path) -> None:
    train_on(with_ranks(2, "bucketed", shard_optimizer=True, steps=1), tmp_path / "sharded")
    train_on(with_ranks(2, "fsdp", steps=1), tmp_path / "fsdp")
    plain = {(row.rank, row.moment): row for row in read_memory(undisturbed)}
    sharded = {(row.rank, row.moment): row for row in read_memory(tmp_path / "sharded")}
    fsdp = {(row.rank, row.moment): row for row in read_memory(tmp_path / "fsdp")}
    parameters = plain[0, "model built"].parameters
    largest = SHAPE.vocab * SHAPE.d_model * 4
    for rank in (0, 1):
        assert plain[rank, "model built"].gradients == 0
        assert plain[rank, "before the update"].optimizer == 0
        assert plain[rank, "after the update"].optimizer >= 2 * parameters
        assert sharded[rank, "after the update"].optimizer <= parameters + 2 * largest + 1024
        assert fsdp[rank, "after the update"].parameters < 0.6 * parameters
        assert fsdp[rank, "after the update"].gathered > 0


def test_learning_rate_rises_and_then_stays_constant(tmp_path: Path) -> None:
    train_on(with_ranks(1, "single", warmup_steps=4, steps=6), tmp_path)
    rates = [row.learning_rate for row in read_log(tmp_path / LOG_NAME)[0]]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


FAST = {
    "precision": "bf16",
    "attention": "sdpa",
    "optimizer": "adamw-onelaunch",
    "fuse": True,
    "merge": True,
    "working_weights": True,
    "graph": True,
}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_whole_step_trains_as_separate_passes_do(tmp_path: Path, accumulate: int) -> None:
    for name, settings in (("plain", {"precision": "bf16", "attention": "sdpa"}), ("fast", FAST)):
        workload = msgspec.structs.replace(PLAIN.workload, **settings)
        train_on(with_ranks(1, "single", workload=workload, accumulate=accumulate, warmup_steps=3), tmp_path / name)
    plain, fast = (losses(tmp_path / name) for name in ("plain", "fast"))
    assert plain[0] - plain[-1] > 0.5
    assert fast == pytest.approx(plain, abs=0.02)


def test_whole_step_resumes_bit_for_bit(tmp_path: Path) -> None:
    training = with_ranks(1, "single", workload=msgspec.structs.replace(PLAIN.workload, **FAST))
    train_on(training, tmp_path / "undisturbed")
    train_on(msgspec.structs.replace(training, steps=4), tmp_path / "resumed")
    train_on(training, tmp_path / "resumed")
    assert_same_bits(state_of(tmp_path / "resumed"), state_of(tmp_path / "undisturbed"))
    state = state_of(tmp_path / "resumed")["optimizer"]
    assert {float(one["step"]) for one in state.values()} == {PLAIN.steps}


@pytest.mark.parametrize("name", ["graph", "fuse"])
def test_whole_step_is_for_one_rank_without_communication(name: str) -> None:
    workload = msgspec.structs.replace(PLAIN.workload, **{name: True})
    with pytest.raises(SpecError, match=f"{name} cannot be used with strategy `bucketed`"):
        with_ranks(2, "bucketed", workload=workload)


def _count_messages(rank: int, world: int) -> list[int]:
    from stepscope.step.learner import Learner

    counts = []
    for accumulate in (1, 2):
        communicator = Communicator()
        learner = Learner(with_ranks(2, "flat", accumulate=accumulate), communicator, torch.device("cpu"))
        for _ in range(2):  # the first step also compares inputs
            communicator.take_time()
            for number in range(accumulate):
                learner.add_gradients(torch.zeros(1, 9, dtype=torch.long), is_last=number == accumulate - 1)
            learner.finish_gradients()
            learner.forget_gradients()
        counts.append(communicator.take_time().issued)
    return counts


def test_accumulating_passes_send_nothing() -> None:
    assert run_ranks(_count_messages, 2) == [[1, 1], [1, 1]]


def _train_with_other_settings(rank: int, world: int, folder: Path) -> str:
    from stepscope.errors import StepscopeError

    try:
        train_here(rank, world, with_ranks(2, "flat", learning_rate=0.1 * (rank + 1)), folder)
    except StepscopeError as error:
        return str(error)
    return ""


def test_mismatched_settings_raise_at_the_start(tmp_path: Path) -> None:
    for said in run_ranks(_train_with_other_settings, 2, tmp_path):
        assert "training mismatch: rank `1` differs from rank `0`" in said
        assert "learning_rate: 0.2" in said
    assert not (tmp_path / LOG_NAME).exists()
