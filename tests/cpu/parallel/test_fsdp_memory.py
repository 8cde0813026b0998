"""What is gathered when: never more than two layers, and each before it is needed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.parallel import FSDP, Communicator
from stepscope.parallel.communicator import Pending
from tests.cpu.parallel.fsdp_cases import build, loss_of, make_adamw, train_sharded
from tests.cpu.parallel.ranks import run_ranks


class _Watching(Communicator):
    """A communicator that records what is gathered, and how much memory is gathered when it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.model: FSDP | None = None
        self.events: list[str] = []
        self.seen_bytes: list[int] = []

    def all_gather(self, whole: Tensor, shard: Tensor, name: str) -> Pending:
        self.events.append(name.removeprefix("parameters of "))
        # The storage that is about to be filled is allocated already, so this is the peak.
        self.seen_bytes.append(_storage_bytes(self.model) if self.model else 0)
        return super().all_gather(whole, shard, name)


def _storage_bytes(model: FSDP) -> int:
    """Bytes of gathered parameters, from the storages themselves."""
    return sum(flat.storage_bytes for unit in model._units for flat in unit.flats)


def _wrap(module: nn.Module, compute_dtype: torch.dtype | None = None) -> tuple[FSDP, _Watching]:
    watching = _Watching()
    model = FSDP(module, compute_dtype, communicator=watching)
    watching.model = model
    return model, watching


def _measure_memory(rank: int, world: int) -> None:
    for kind in ("built-in", "tied"):
        for compute_dtype in (None, torch.bfloat16):
            _check_memory(rank, world, *_wrap(build(kind), compute_dtype))
    model, _ = _wrap(nn.Sequential(nn.LayerNorm(4), nn.ReLU()))
    model(torch.ones(2, 4)).sum().backward()
    model.finish_gradient_synchronization()
    assert model.ledger.peak_bytes == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def _check_memory(rank: int, world: int, model: FSDP, watching: _Watching) -> None:
    optimizer = make_adamw(model.parameters())
    at_head_bytes: list[int] = []
    head = model.module.get_submodule("lm_head")
    head.register_forward_hook(lambda *_: at_head_bytes.append(_storage_bytes(model)))
    train_sharded(model, optimizer, rank, world, last=2)
    watching.events.clear()
    train_sharded(model, optimizer, rank, world, first=2, last=3)
    with torch.no_grad():
        loss_of(model, 0, rank, world)
    largest = sorted((unit.gathered_bytes for unit in model._units), reverse=True)
    assert max(watching.seen_bytes) == model.ledger.peak_bytes == largest[0] + largest[1]
    # No layer comes after the head, and those before it are freed.
    assert set(at_head_bytes) == {model._units[0].gathered_bytes}
    assert _storage_bytes(model) == 0 == model.ledger.live_bytes
    names = [unit.name for unit in model._units]
    assert watching.events == _expected_gathers(names) + _forward_gathers(names)
    assert _shard_bytes(model) <= _full_bytes(model) / world + _padding_bytes(model, world)


def _forward_gathers(units: list[str]) -> list[str]:
    """A tied embedding is gathered once more, for the head."""
    return units if "lm_head" in units else [*units, units[0]]


def _expected_gathers(units: list[str]) -> list[str]:
    """In backward, without the last layer of forward, which is still gathered, and the embedding, which is not
    needed.
    """
    forward = _forward_gathers(units)
    return forward + forward[-2:0:-1]


def _shard_bytes(model: FSDP) -> int:
    """What this rank keeps of matrices, from the storages of its shards."""
    storages = {piece.untyped_storage()._cdata: piece for piece in model.parameters() if piece.dim() == 1}
    vectors = {member.parameter.untyped_storage()._cdata for member in model._vectors}
    return sum(piece.untyped_storage().nbytes() for key, piece in storages.items() if key not in vectors)


def _full_bytes(model: FSDP) -> int:
    matrices = {id(tensor): tensor for tensor in model.gather_full_params().values() if tensor.dim() > 1}
    return sum(tensor.nbytes for tensor in matrices.values())


def _padding_bytes(model: FSDP, world: int) -> float:
    """At most 31 elements after each matrix, of which a rank has its part, and as many after each slice."""
    flats = [flat for unit in model._units for flat in unit.flats]
    return 4 * 31 * sum(len(flat.places) / world + 1 for flat in flats)


def test_at_most_two_layers_are_gathered_and_none_stays() -> None:
    run_ranks(_measure_memory, 2)


def _overlap(rank: int, world: int) -> None:
    """Each gather but the first starts before the previous layer computes."""
    model, watching = _wrap(build("built-in"))
    train_sharded(model, make_adamw(model.parameters()), rank, world, last=1)
    events = watching.events = []
    for number in range(4):
        inner = model.module.get_submodule(f"blocks.{number}.ffn")
        inner.register_forward_hook(partial(_note, events, f"computes {number}"))
        inner.register_full_backward_hook(partial(_note, events, f"goes back {number}"))
    loss_of(model, 0, rank, world).backward()  # type: ignore[no-untyped-call]
    model.finish_gradient_synchronization()
    for number in range(3):
        assert events.index(f"blocks.{number + 1}") < events.index(f"computes {number}"), events
        last_gathered = len(events) - 1 - events[::-1].index(f"blocks.{number}")
        assert last_gathered < events.index(f"goes back {number + 1}"), events


def _note(events: list[str], event: str, *_: Any) -> None:
    events.append(event)


def test_next_layer_is_gathered_before_this_one_computes() -> None:
    run_ranks(_overlap, 2)
