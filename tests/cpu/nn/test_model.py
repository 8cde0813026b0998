"""The reference model against a second one, written with PyTorch's own operations on the same parameters."""

# B batch, L length, M model width, H query heads, G key/value heads, D head dim, P rotated pairs.

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepscope.nn import REFERENCE, AdamW, Operations, TransformerLM, clip_grad_norm
from stepscope.nn.model import Block, CausalAttention, Embedding, Linear, RMSNorm, SwiGLU
from tests.cpu.accuracy import assert_as_accurate, error, typical_error

VOCAB, HEADS, GROUPS, LAYERS, THETA = 37, 4, 2, 2, 50.0
IDS_BL = torch.tensor([[1, 5, 9, 36, 0, 5, 7], [2, 2, 30, 11, 8, 20, 3]])
TARGETS_BL = torch.tensor([[5, 9, 36, 0, 5, 7, 1], [2, 30, 11, 8, 20, 3, 4]])
LOW_DTYPES = (torch.bfloat16, torch.float16)


def _build(
    *,
    seed: int = 0,
    num_kv_heads: int | None = GROUPS,
    tie_embeddings: bool = False,
    ops: Operations = REFERENCE,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    **changes: int,
) -> TransformerLM:
    torch.manual_seed(seed)
    counts = {
        "vocab": VOCAB,
        "d_model": 24,
        "d_ff": 40,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "max_context": 16,
    }
    return TransformerLM(
        **(counts | changes),
        num_kv_heads=num_kv_heads,
        rope_theta=THETA,
        tie_embeddings=tie_embeddings,
        ops=ops,
        device=device,
        dtype=dtype,
    )


def _plain_rotate(x_BLHD: Tensor) -> Tensor:
    length, head_dim = x_BLHD.shape[1], x_BLHD.shape[3]
    frequency_P = THETA ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle_LP = torch.arange(length, dtype=torch.float64)[:, None] * frequency_P
    turn_L1P = torch.polar(torch.ones_like(angle_LP), angle_LP)[:, None]
    wide = x_BLHD.to(torch.promote_types(x_BLHD.dtype, torch.float32))
    turn_L1P = turn_L1P.to(torch.complex128 if wide.dtype == torch.float64 else torch.complex64)
    turned = torch.view_as_complex(wide.reshape(*x_BLHD.shape[:3], -1, 2)) * turn_L1P
    return torch.view_as_real(turned).flatten(3).to(x_BLHD.dtype)


def _plain_attention(x_BLM: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    batch, length, width = x_BLM.shape

    def project(name: str) -> Tensor:
        projected = F.linear(x_BLM, weights[f"{prefix}.{name}_proj.weight"])
        return projected.reshape(batch, length, -1, width // HEADS)

    q_BHLD = _plain_rotate(project("q")).transpose(1, 2)
    k_BGLD, v_BGLD = _plain_rotate(project("k")).transpose(1, 2), project("v").transpose(1, 2)
    repeats = HEADS // k_BGLD.shape[1]
    scores = q_BHLD @ k_BGLD.repeat_interleave(repeats, 1).mT / math.sqrt(width // HEADS)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = torch.softmax(scores.masked_fill(future, -math.inf), -1) @ v_BGLD.repeat_interleave(repeats, 1)
    return F.linear(mixed.transpose(1, 2).reshape(batch, length, width), weights[f"{prefix}.output_proj.weight"])


def _plain_loss(weights: dict[str, Tensor], *, tied: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and loss of the whole model, from its parameters by name."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], 1e-5)

    x = F.embedding(IDS_BL, weights["embedding.weight"])
    for layer in range(LAYERS):
        block = f"blocks.{layer}"
        x = x + _plain_attention(norm(x, f"{block}.attention_norm"), weights, f"{block}.attention")
        y = norm(x, f"{block}.ffn_norm")
        gate, up, down = (weights[f"{block}.ffn.{name}.weight"] for name in ("gate", "up", "down"))
        x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
    head = weights["embedding.weight" if tied else "lm_head.weight"]
    logits = F.linear(norm(x, "final_norm"), head)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, F.cross_entropy(wide.flatten(0, 1), TARGETS_BL.flatten())


def _plain_gradients(model: TransformerLM, dtype: torch.dtype, *, tied: bool = False) -> list[Tensor]:
    """Logits, loss and every parameter's gradient, in the order of model.named_parameters()."""
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    logits, loss = _plain_loss(weights, tied=tied)
    return [logits, loss, *torch.autograd.grad(loss, list(weights.values()))]


def _gradients(model: TransformerLM) -> list[Tensor]:
    logits = model(IDS_BL)
    loss = model.ops.cross_entropy(logits, TARGETS_BL)
    return [logits, loss, *torch.autograd.grad(loss, list(model.parameters()))]


def _stack(runs: list[list[Tensor]]) -> list[Tensor]:
    """Compare each value over all runs as one tensor: the error of a single scalar or small tensor is luck."""
    return [torch.stack(values) for values in zip(*runs, strict=True)]


def _assert_model_as_accurate(
    ours: list[Tensor], plain: list[Tensor], truth: list[Tensor], computed_in: torch.dtype
) -> None:
    for index, (a, b, c) in enumerate(zip(ours, plain, truth, strict=True)):
        assert_as_accurate(a, b, c, name=f"value {index}", computed_in=computed_in, measure=typical_error)


def _vary_norms(model: TransformerLM) -> TransformerLM:
    """Gains of one would hide a norm that is skipped or uses the wrong weight."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits_loss_and_every_gradient_match_the_float64_twin(num_kv_heads: int | None, tied: bool) -> None:
    models = [_vary_norms(_build(seed=seed, num_kv_heads=num_kv_heads, tie_embeddings=tied)) for seed in range(4)]
    truth = _stack([_plain_gradients(model, torch.float64, tied=tied) for model in models])
    plain = _stack([_plain_gradients(model, torch.float32, tied=tied) for model in models])
    _assert_model_as_accurate(_stack([_gradients(model) for model in models]), plain, truth, torch.float32)


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_autocast_is_as_accurate_as_torch_and_keeps_fp32_gradients(dtype: torch.dtype) -> None:
    models = [_vary_norms(_build(seed=seed)) for seed in range(4)]
    truth = _stack([_plain_gradients(model, torch.float64) for model in models])
    with torch.autocast("cpu", dtype=dtype):
        ours = _stack([_gradients(model) for model in models])
        plain = _stack([_plain_gradients(model, torch.float32) for model in models])
    assert ours[0].dtype == dtype
    assert {value.dtype for value in ours[1:]} == {torch.float32}
    _assert_model_as_accurate(ours, plain, truth, dtype)


def test_bf16_model_keeps_fp32_rope_tables_and_loss() -> None:
    models = [_vary_norms(_build(seed=seed, dtype=torch.bfloat16)) for seed in range(4)]
    ours = _stack([_gradients(model) for model in models])
    assert models[0].rope_cos.dtype == torch.float32
    assert ours[1].dtype == torch.float32
    plain = _stack([_plain_gradients(model, torch.bfloat16) for model in models])
    truth = _stack([_plain_gradients(model, torch.float64) for model in models])
    _assert_model_as_accurate(ours, plain, truth, torch.bfloat16)


def test_float64_model_is_exact_throughout() -> None:
    model = _vary_norms(_build(dtype=torch.float64))
    for ours, truth in zip(_gradients(model), _plain_gradients(model, torch.float64), strict=True):
        assert error(ours, truth) < 1e-12


@pytest.mark.parametrize("position", [0, 3, 6])
def test_token_changes_no_logits_before_its_position(position: int) -> None:
    model = _build()
    changed_BL = IDS_BL.clone()
    changed_BL[:, position] = (changed_BL[:, position] + 1) % VOCAB
    before, after = model(IDS_BL), model(changed_BL)
    assert torch.equal(before[:, :position], after[:, :position])
    assert all(not torch.equal(before[:, i], after[:, i]) for i in range(position, 7))


def test_sequences_of_a_batch_do_not_mix() -> None:
    model = _build(dtype=torch.float64)
    assert error(model(IDS_BL)[1:], model(IDS_BL[1:])) < 1e-12


def test_loss_goes_through_the_operations() -> None:
    ops = dataclasses.replace(REFERENCE, cross_entropy=lambda logits, targets: 0 * (logits.sum() + targets.sum()) + 7)
    assert _build(ops=ops).loss(IDS_BL, TARGETS_BL).item() == 7
    model = _build()
    assert torch.equal(model.loss(IDS_BL, TARGETS_BL), _gradients(model)[1])


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Operations)])
def test_every_operation_of_the_table_is_used(name: str) -> None:
    calls = 0
    reference = getattr(REFERENCE, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return reference(*args, **kwargs)

    model = _build(ops=dataclasses.replace(REFERENCE, **{name: counting}))
    assert torch.equal(model.loss(IDS_BL, TARGETS_BL), _build().loss(IDS_BL, TARGETS_BL))
    expected = {"linear": 7 * LAYERS + 1, "rms_norm": 2 * LAYERS + 1, "rope": 2 * LAYERS}
    once = {"embedding": 1, "cross_entropy": 1}
    per_layer = {"swiglu": LAYERS, "attention": LAYERS}
    assert calls == (expected | once | per_layer)[name]


@pytest.mark.parametrize(
    ("d_model", "d_ff", "num_layers", "num_heads", "count"),
    [
        (768, 3072, 12, 12, 128_625_408),
        (1024, 4096, 24, 16, 423_183_360),
        (2560, 10240, 32, 32, 3_406_809_600),
    ],
    ids=["small", "medium", "2.7B"],
)
def test_parameter_count(d_model: int, d_ff: int, num_layers: int, num_heads: int, count: int) -> None:
    model = TransformerLM(
        vocab=10_000,
        d_model=d_model,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=num_heads,
        max_context=512,
        device="meta",
    )
    assert sum(p.numel() for p in model.parameters()) == count


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = _build(tie_embeddings=True), _build()
    assert tied.lm_head.weight is tied.embedding.weight
    assert untied.lm_head.weight is not untied.embedding.weight
    saved = untied.embedding.weight.numel()
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == saved
    assert copy.deepcopy(tied).lm_head.weight.shape == tied.embedding.weight.shape
    moved = copy.deepcopy(tied).double()
    assert moved.lm_head.weight is moved.embedding.weight


def test_a_seed_reproduces_the_parameters_and_another_does_not() -> None:
    first, again, other = _build(seed=3), _build(seed=3), _build(seed=4)
    matrices = [name for name, p in first.named_parameters() if p.ndim == 2]
    for name in matrices:
        assert torch.equal(first.get_parameter(name), again.get_parameter(name))
        assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def _assert_truncated_normal(weight: Tensor, std: float) -> None:
    bound = 3 * std
    # Truncation at three standard deviations reduces the standard deviation by 1.3%; 1% is for chance.
    assert weight.std().item() == pytest.approx(0.987 * std, rel=0.01)
    assert abs(weight.mean().item()) < 0.02 * std
    assert 0.97 * bound < weight.abs().max().item() <= bound


def test_matrices_start_as_truncated_normals_and_gains_at_one() -> None:
    torch.manual_seed(0)
    _assert_truncated_normal(Linear(150, 250).weight, math.sqrt(2 / 400))
    _assert_truncated_normal(Embedding(300, 200).weight, 1.0)
    assert bool((RMSNorm(8).weight == 1).all())


class _DevicesSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The device of every tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.devices |= {leaf.device.type for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


@pytest.mark.parametrize("how", ["argument", "ambient"])
def test_everything_is_created_directly_on_its_device(how: str) -> None:
    with _DevicesSeen() as seen:
        if how == "argument":
            _build(device="meta")
        else:
            with torch.device("meta"):
                _build()
    assert seen.devices == {"meta"}


def test_whole_step_runs_on_meta_so_nothing_reads_a_value_back() -> None:
    model = _build(device="meta")
    optimizer = AdamW(model.parameters())
    torch.autograd.backward(model.loss(IDS_BL.to("meta"), TARGETS_BL.to("meta")))
    norm = clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    assert norm.device.type == "meta"
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_rope_tables_are_one_pair_outside_the_state_dict() -> None:
    model = _build()
    assert {name for name, _ in model.named_buffers()} == {"rope_cos", "rope_sin"}
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_a_state_dict_restores_the_logits() -> None:
    source, target = _build(seed=1), _build(seed=2)
    assert not torch.equal(source(IDS_BL), target(IDS_BL))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(IDS_BL), target(IDS_BL))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_model_compiles_into_one_graph_with_the_same_gradients(dynamic: bool) -> None:
    model = _build()
    eager = [model.loss(IDS_BL, TARGETS_BL)]
    eager += torch.autograd.grad(eager[0], list(model.parameters()))
    # aot_eager traces forward and backward as the default does, without the C++ compiler.
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    loss = compiled(IDS_BL, TARGETS_BL)
    for ours, expected in zip([loss, *torch.autograd.grad(loss, list(model.parameters()))], eager, strict=True):
        assert error(ours, expected) <= 1e-6 * (1 + expected.abs().max().item())


def test_blocks_are_a_module_list_of_the_requested_length() -> None:
    model = _build(num_layers=3)
    assert isinstance(model.blocks, nn.ModuleList)
    assert [type(block) for block in model.blocks] == [Block] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_model .24. must be divisible by num_heads .5."),
        ({"num_kv_heads": 3}, "num_heads .4. must be divisible by num_kv_heads .3."),
        ({"d_model": 12, "num_kv_heads": None}, "even .*but got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive, but got 0"),
        ({"vocab": 0}, "vocab must be positive, but got 0"),
        ({"d_model": 0}, "d_model must be positive, but got 0"),
        ({"d_ff": -1}, "d_ff must be positive, but got -1"),
        ({"num_layers": 0}, "num_layers must be positive, but got 0"),
        ({"num_heads": 0}, "num_heads must be positive, but got 0"),
        ({"max_context": 0}, "max_context must be positive, but got 0"),
    ],
)
def test_invalid_shapes_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _build(**changes)


def test_non_positive_theta_raises() -> None:
    with pytest.raises(ValueError, match="rope_theta must be positive, but got 0"):
        TransformerLM(vocab=4, d_model=4, d_ff=4, num_layers=1, num_heads=1, max_context=4, rope_theta=0)


def test_parts_check_their_own_shapes() -> None:
    with pytest.raises(ValueError, match=r"d_model .8. must be divisible by num_heads .3."):
        CausalAttention(8, 3)
    with pytest.raises(ValueError, match="out_features must be positive, but got 0"):
        SwiGLU(8, 0)
    with pytest.raises(ValueError, match=r"weight of shape \(3, 2\), but got \(2, 3\)"):
        Linear(2, 3, weight=nn.Parameter(torch.zeros(2, 3)))


def test_too_long_context_raises_with_both_numbers() -> None:
    model = _build(max_context=6)
    model(IDS_BL[:, :6])
    with pytest.raises(ValueError, match="got 7 tokens, but max_context is 6"):
        model(IDS_BL)
