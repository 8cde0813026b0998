"""What a user may do between wrapping and stepping: accumulate, evaluate, fail, clip, freeze, compute in bf16."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stepscope.errors import StepscopeError
from stepscope.nn import clip_grad_norm
from stepscope.parallel import FSDP
from tests.cpu.parallel.fsdp_cases import (
    KINDS,
    Params,
    build,
    differing,
    loss_of,
    make_adamw,
    train_alone,
    train_sharded,
)
from tests.cpu.parallel.ranks import run_ranks


def _gradients(model: FSDP) -> dict[str, Tensor | None]:
    """Gradients of this rank's shards and vectors."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _gradients_after(passes: Callable[[FSDP], None]) -> dict[str, Tensor | None]:
    """Two steps: leftovers of the first one would show in the second."""
    model = FSDP(build("built-in"))
    found: dict[str, Tensor | None] = {}
    for step in range(2):
        model.zero_grad()
        passes(model)
        model.finish_gradient_synchronization()
        found |= {f"{name}, step {step}": gradient for name, gradient in _gradients(model).items()}
    return found


def _accumulate_in_many_ways(rank: int, world: int) -> None:
    def one_pass(model: FSDP) -> None:
        (loss_of(model, 0, rank, world) + loss_of(model, 1, rank, world)).backward()  # type: ignore[no-untyped-call]

    def two_passes(model: FSDP) -> None:
        for step in (1, 0):
            loss_of(model, step, rank, world).backward()  # type: ignore[no-untyped-call]

    def one_not_sent(model: FSDP) -> None:
        with model.no_sync():
            loss_of(model, 1, rank, world).backward()  # type: ignore[no-untyped-call]
        loss_of(model, 0, rank, world).backward()  # type: ignore[no-untyped-call]

    def last_not_sent(model: FSDP) -> None:
        loss_of(model, 1, rank, world).backward()  # type: ignore[no-untyped-call]
        with model.no_sync():
            loss_of(model, 0, rank, world).backward()  # type: ignore[no-untyped-call]

    def both_not_sent(model: FSDP) -> None:
        with model.no_sync():
            two_passes(model)

    def delivered_twice(model: FSDP) -> None:
        for step in (1, 0):
            loss_of(model, step, rank, world).backward()  # type: ignore[no-untyped-call]
            model.finish_gradient_synchronization()

    def disturbed(model: FSDP) -> None:
        unused_loss = loss_of(model, 3, rank, world)
        with torch.no_grad():
            loss_of(model, 4, rank, world)
        one_not_sent(model)
        del unused_loss
        # A part of the model called directly: its units are gathered for that.
        model.module.get_submodule("blocks.0")(torch.zeros(1, 2, 24), *torch.ones(2, 2, 6))

    ways: list[Callable[[FSDP], None]] = [
        one_pass,
        two_passes,
        one_not_sent,
        last_not_sent,
        both_not_sent,
        delivered_twice,
        disturbed,
    ]
    found = [_gradients_after(way) for way in ways]
    for way, gradients in zip(ways[1:], found[1:], strict=True):
        for name, gradient in gradients.items():
            expected = found[0][name]
            assert (gradient is None) == (expected is None), f"{way.__name__}: {name}"
            if gradient is not None:
                torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7, msg=f"{way.__name__}: {name}")


def test_gradients_of_several_passes_add_up_with_or_without_sync() -> None:
    run_ranks(_accumulate_in_many_ways, 2)


class _Either(nn.Module):
    """One of two layers, by rank, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        chosen: Tensor = (self.first, self.second)[which](x)
        return chosen


def _use_one_each(rank: int, world: int) -> None:
    model = FSDP(_Either())
    for rank_0_alone in (False, True, False):
        model.zero_grad()
        output = model(torch.ones(2, 8, requires_grad=True), 0 if rank_0_alone else rank)
        if rank == 0 or not rank_0_alone:
            output.sum().backward()
        model.finish_gradient_synchronization()
        unused = {"third", "second"} if rank_0_alone else {"third"}
        for name, gradient in _gradients(model).items():
            assert (gradient is None) == (name.split(".")[1] in unused), name
            # One of two ranks had this gradient: ones, summed over two rows and halved.
            assert gradient is None or torch.equal(gradient, torch.ones_like(gradient)), name


def test_used_on_one_rank_is_averaged_and_unused_has_no_gradient() -> None:
    run_ranks(_use_one_each, 2)


def _compute_in_bf16(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    for kind in KINDS:
        model = FSDP(build(kind), torch.bfloat16)
        dtypes: list[torch.dtype] = []
        model.module.register_forward_hook(lambda _module, _inputs, output, seen=dtypes: seen.append(output.dtype))
        train_sharded(model, make_adamw(model.parameters()), rank, world, last=4)
        assert set(dtypes) == {torch.bfloat16}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        found[kind] = differing(model.gather_full_params(), _train_rounded(build(kind), world))
    return found


def _train_rounded(model: nn.Module, parts: int) -> Params:
    """One process whose weights are rounded for each pass, and whose gradients are accumulated in fp32."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids_BL: Tensor) -> Tensor:
            rounded = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
            output: Tensor = functional_call(model, rounded, (ids_BL,))
            return output

    trained = train_alone(Rounded(), parts, last=4)
    return {name.removeprefix("inner."): tensor for name, tensor in trained.items()}


def test_bf16_matches_one_process_with_rounded_weights() -> None:
    for found in run_ranks(_compute_in_bf16, 2):
        # The two gradients of a vector that is read twice are summed in fp32 here, and in bf16 by one process.
        assert found == {kind: [] for kind in KINDS} | {"own": ["experts.3.up.bias"]}


def _recover_and_refuse(rank: int, world: int) -> None:
    model = FSDP(build("built-in"))
    optimizer = make_adamw(model.parameters())
    for _ in range(2):
        _require_raises(lambda: model(torch.full((1, 4), 10**6)), IndexError)
        assert model.ledger.live_bytes == 0
        train_sharded(model, optimizer, rank, world, last=1)
        assert model.ledger.live_bytes == 0
    with model.no_sync():
        _require_raises(model.finish_gradient_synchronization, StepscopeError)
    loss = loss_of(model, 0, rank, world)
    model.load_full_params({name: 2 * tensor for name, tensor in model.gather_full_params().items()})
    _require_raises(loss.backward, StepscopeError)
    model.finish_gradient_synchronization()
    _require_raises(model.half, StepscopeError)
    _require_raises(lambda: FSDP(nn.LSTM(4, 4)), TypeError)
    _require_raises(lambda: FSDP(model), ValueError)
    _require_raises(lambda: FSDP(nn.Linear(2, 2), torch.int32), TypeError)
    _require_raises(lambda: FSDP(nn.Linear(2 + rank, 2)), StepscopeError)


def _require_raises(call: Callable[[], object], kind: type[BaseException]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def test_failed_pass_leaves_nothing_gathered_and_misuse_raises() -> None:
    run_ranks(_recover_and_refuse, 2)


def _clip_and_freeze(rank: int, world: int) -> None:
    alone, model = build("own"), FSDP(build("own"))
    for part in range(world):
        (loss_of(alone, 0, part, world) / world).backward()  # type: ignore[no-untyped-call]
    loss_of(model, 0, rank, world).backward()  # type: ignore[no-untyped-call]
    model.finish_gradient_synchronization()
    for max_norm in (0.05, 10.0):
        norm = clip_grad_norm(alone.parameters(), max_norm)
        torch.testing.assert_close(model.clip_grad_norm_(max_norm), norm, rtol=1e-6, atol=0)
    whole = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, gradient in _gradients(model).items():
        expected = whole[name.removeprefix("module.")]
        if gradient is not None and expected is not None and gradient.shape == expected.shape:
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)

    # Unfrozen after wrapping, then frozen again.
    model = FSDP(build("frozen"))
    for trained in (True, False):
        for parameter in model.module.get_submodule("blocks.1").parameters():
            parameter.requires_grad = trained
        model.zero_grad()
        loss_of(model, 0, rank, world).backward()  # type: ignore[no-untyped-call]
        model.finish_gradient_synchronization()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == (parameter.requires_grad and parameter.numel() > 0), name


def test_norms_cover_all_ranks_and_frozen_parameters_can_be_unfrozen() -> None:
    run_ranks(_clip_and_freeze, 2)
