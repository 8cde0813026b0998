"""Whole parameters and optimizer state, gathered from some ranks and loaded on another number of them."""

import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import Optimizer

from stepscope.parallel import FSDP
from tests.cpu.parallel.fsdp_cases import (
    MakeOptimizer,
    build,
    differing,
    make_adamw,
    make_momentum,
    params_of,
    train_alone,
    train_sharded,
)
from tests.cpu.parallel.ranks import run_ranks

KINDS = ("tied", "own")


def _make_torch_adamw(params: Iterable[Any]) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)


OPTIMIZERS: dict[str, MakeOptimizer] = {"ours": make_adamw, "torch": _make_torch_adamw, "momentum": make_momentum}


def _continue_training(rank: int, world: int, saved: bytes | None, first: int, last: int) -> bytes:
    """Train from a checkpoint, if given, to the next. All of it from and to one rank's memory, as with a file."""
    loaded = torch.load(io.BytesIO(saved)) if saved else {}
    kept = {}
    for kind in KINDS:
        for name, make_optimizer in OPTIMIZERS.items():
            # Without a checkpoint rank 0's values are used; with one, they do not matter.
            model = FSDP(build(kind, seed=first))
            optimizer = make_optimizer(model.parameters())
            if loaded:
                params, state = loaded[kind, name]
                model.load_full_params(params)
                model.load_full_state(optimizer, state)
            train_sharded(model, optimizer, rank, world, first=first, last=last)
            kept[kind, name] = model.gather_full_params(to=0), model.gather_full_state(optimizer, to=0)
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    return buffer.getvalue()


def _load(saved: bytes) -> dict[tuple[str, str], Any]:
    loaded: dict[tuple[str, str], Any] = torch.load(io.BytesIO(saved))
    return loaded


def test_checkpoint_moves_from_two_ranks_to_four_to_one() -> None:
    saved = run_ranks(_continue_training, 2, None, 0, 2)[0]
    moved = run_ranks(_continue_training, 4, saved, 2, 2)[0]
    # Four ranks that train nothing return bitwise what they loaded.
    for case, (params, state) in _load(saved).items():
        moved_params, moved_state = _load(moved)[case]
        assert differing(params, moved_params) == []
        assert _describe(state) == _describe(moved_state)
    ended = _load(run_ranks(_continue_training, 1, moved, 2, 4)[0])
    for (kind, name), (params, state) in ended.items():
        model = build(kind)
        optimizer = OPTIMIZERS[name](model.parameters())
        train_alone(model, 2, optimizer, last=2)
        alone = train_alone(model, 1, optimizer, first=2, last=4)
        assert differing(alone, params) == [], (kind, name)
        named = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
        assert _describe({name: values for name, values in named.items() if values}) == _describe(state), (kind, name)


def _describe(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Comparable with ==, bit by bit."""
    return {
        name: {
            key: (value.shape, value.dtype, value.flatten().tolist()) if isinstance(value, torch.Tensor) else value
            for key, value in sorted(values.items())
        }
        for name, values in sorted(state.items())
    }


def _refuse_wrong_names(rank: int, world: int) -> None:
    model = FSDP(build("tied"))
    params = model.gather_full_params()
    assert params.keys() == params_of(build("tied")).keys()
    assert params["lm_head.weight"] is params["embedding.weight"]
    # Either name of a tied parameter suffices.
    model.load_full_params({name: tensor for name, tensor in params.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"missing key in `params`: `final_norm\.weight`"):
        model.load_full_params({name: tensor for name, tensor in params.items() if name != "final_norm.weight"})
    with pytest.raises(ValueError, match="`other`"):
        model.load_full_params(params | {"other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"`final_norm\.weight` in `params`: expected \(24,\)"):
        model.load_full_params(params | {"final_norm.weight": torch.ones(5)})
    with pytest.raises(ValueError, match="`to` must be None or a rank below 1"):
        model.gather_full_params(to=1)
    with pytest.raises(ValueError, match="`other`"):
        model.load_full_state(make_adamw(model.parameters()), {"other": {}})


def test_names_and_shapes_must_match_the_model() -> None:
    run_ranks(_refuse_wrong_names, 1)
