"""Gated activations between the matrices of a feed-forward layer: SwiGLU and GeGLU, one kernel per direction.

Backward computes the activation again, so nothing is saved but the inputs. With one product for gate and up, the
`_packed` functions take its result (..., 2 · F), gate first, and return one gradient of that shape: no copies to split
it or to join it.

On a GPU Triton kernels run (`gated_kernels.py`), on a CPU and in float64 the formulas below, which use the reference.
"""

# F the width of gate and up. Tensors without a suffix are (..., F).

import math
from typing import Any, Literal

import torch
from torch import Tensor

from stepscope.kernels.launch import KERNEL_DTYPES, as_rows, on_device_of, register_fake, vector_elements
from stepscope.nn import functional

_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]  # registrations last as long as it does
Approximation = Literal["none", "tanh"]
ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu, "gelu_tanh": functional.gelu_tanh}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the wider of their dtypes."""
    return _gate(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor, approximate: Approximation = "none") -> Tensor:
    """gelu(gate) * up, in the wider of their dtypes. "tanh" is the approximation of GPT-2 and Gemma."""
    return _gate(gate, up, _gelu(approximate))


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """`swiglu` of the two halves of (..., 2 · F), gate first: (..., F)."""
    return _gate_packed(gate_up, "silu")


def geglu_packed(gate_up: Tensor, approximate: Approximation = "none") -> Tensor:
    """`geglu` of the two halves of (..., 2 · F), gate first: (..., F)."""
    return _gate_packed(gate_up, _gelu(approximate))


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """`swiglu_packed(gate_up)` times the transposed weight (M, F): (..., M).

    The activation is not kept for backward, which writes it again while it reads gate and up: of what a feed-forward
    layer keeps, a third less.
    """
    result: Tensor = _GatedLinear.apply(gate_up, weight, "silu")  # type: ignore[no-untyped-call]
    return result


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, activation: str) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(gate_up, weight)
        return torch.nn.functional.linear(_gate_packed(gate_up, activation), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        gradient, again = torch.ops.stepscope.gated_activation_packed_again(dy @ weight, gate_up, ctx.activation)
        return gradient, dy.flatten(0, -2).T @ again.flatten(0, -2), None


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise ValueError(f'`approximate` must be "none" or "tanh", but got {approximate!r}')
    return "gelu" if approximate == "none" else "gelu_tanh"


def _gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(f"gate and up must have the same shape, but got {tuple(gate.shape)} and {tuple(up.shape)}")
    y: Tensor = torch.ops.stepscope.gated_activation(gate, up, activation)
    return y


def _gate_packed(gate_up: Tensor, activation: str) -> Tensor:
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"expected an even last dimension, gate and up, but got the shape {tuple(gate_up.shape)}")
    y: Tensor = torch.ops.stepscope.gated_activation_packed(gate_up, activation)
    return y


# --- The formulas, for CPUs and float64 ---


def _plain_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    wide = ACTIVATIONS[activation](_widen(gate)) * up
    return wide.to(torch.promote_types(gate.dtype, up.dtype))


def _plain_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor) -> None:
    """Write the gradients of gate and up."""
    x, dy = _widen(gate), _widen(dy)
    dgate.copy_(dy * up * _slope(x, activation))
    dup.copy_(dy * ACTIVATIONS[activation](x))


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of the activation."""
    if activation == "silu":
        share = torch.sigmoid(x)
        return share * (1 + x * (1 - share))
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    scale, cubic = math.sqrt(2 / math.pi), functional.GELU_CUBIC
    tanh = torch.tanh(scale * (x + cubic * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * scale * (1 + 3 * cubic * x.square())


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- Launchers ---


def _launch_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    from stepscope.kernels.gated_kernels import TILE, gated_forward

    y = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    if y.numel():
        gate_NF, up_NF = as_rows(gate), as_rows(up)
        with on_device_of(gate):
            gated_forward[TILE.count_programs(*gate_NF.shape),](
                gate_NF,
                up_NF,
                y,
                gate_NF.stride(0),
                up_NF.stride(0),
                WIDTH=gate.shape[-1],
                BLOCK=TILE.block,
                VECTOR=vector_elements(y),
                ACTIVATION=activation,
                num_warps=TILE.num_warps,
            )
    return y


def _launch_backward(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, y: Tensor | None = None
) -> None:
    from stepscope.kernels.gated_kernels import TILE, gated_backward

    if dy.numel() == 0:
        return
    dy_NF, gate_NF, up_NF, dgate_NF, dup_NF = (as_rows(x) for x in (dy, gate, up, dgate, dup))
    with on_device_of(gate):
        gated_backward[TILE.count_programs(*dy_NF.shape),](
            dy_NF,
            gate_NF,
            up_NF,
            dgate_NF,
            dup_NF,
            y,
            dy_NF.stride(0),
            gate_NF.stride(0),
            up_NF.stride(0),
            dgate_NF.stride(0),
            dup_NF.stride(0),
            WIDTH=dy.shape[-1],
            BLOCK=TILE.block,
            VECTOR=vector_elements(dgate, dup),
            ACTIVATION=activation,
            num_warps=TILE.num_warps,
        )


# --- Operators ---


def _run_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    on_gpu = gate.is_cuda and gate.dtype in KERNEL_DTYPES and up.dtype in KERNEL_DTYPES
    return (_launch_forward if on_gpu else _plain_forward)(gate, up, activation)


def _write_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str, dgate: Tensor, dup: Tensor, y: Tensor | None = None
) -> None:
    """Write the gradients of gate and up, and forward's result if `y` is given."""
    if gate.is_cuda and gate.dtype in KERNEL_DTYPES and up.dtype in KERNEL_DTYPES:
        _launch_backward(dy, gate, up, activation, dgate, dup, y)
        return
    _plain_backward(dy, gate, up, activation, dgate, dup)
    if y is not None:
        y.copy_(_plain_forward(gate, up, activation))


def _run_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _write_gradients(dy, gate, up, activation, dgate, dup)
    return dgate, dup


def _run_packed(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _run_forward(gate, up, activation)


def _run_packed_backward(dy: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    gradient = gate_up.new_empty(gate_up.shape)
    (gate, up), (dgate, dup) = gate_up.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
    _write_gradients(dy, gate, up, activation, dgate, dup)
    return gradient


def _run_packed_again(dy: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    gradient, y = _fake_packed_again(dy, gate_up, activation)
    (gate, up), (dgate, dup) = gate_up.chunk(2, dim=-1), gradient.chunk(2, dim=-1)
    _write_gradients(dy, gate, up, activation, dgate, dup, y)
    return gradient, y


def _fake_forward(gate: Tensor, up: Tensor, _activation: str) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _fake_backward(_dy: Tensor, gate: Tensor, up: Tensor, _activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _fake_packed(gate_up: Tensor, _activation: str) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _fake_packed_backward(_dy: Tensor, gate_up: Tensor, _activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _fake_packed_again(dy: Tensor, gate_up: Tensor, _activation: str) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty(dy.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.stepscope.gated_activation_backward(dy, *ctx.saved_tensors, ctx.activation), None


def _differentiate_packed(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.stepscope.gated_activation_packed_backward(dy, *ctx.saved_tensors, ctx.activation), None


def _refuse_twice(_ctx: Any, *_gradients: Tensor) -> None:
    raise RuntimeError(
        "gated activations do not support double backward; use the functions of `stepscope.nn.functional`"
    )


for _schema, _run, _fake in (
    ("gated_activation(Tensor gate, Tensor up, str activation) -> Tensor", _run_forward, _fake_forward),
    (
        "gated_activation_backward(Tensor dy, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)",
        _run_backward,
        _fake_backward,
    ),
    ("gated_activation_packed(Tensor gate_up, str activation) -> Tensor", _run_packed, _fake_packed),
    (
        "gated_activation_packed_backward(Tensor dy, Tensor gate_up, str activation) -> Tensor",
        _run_packed_backward,
        _fake_packed_backward,
    ),
    (
        "gated_activation_packed_again(Tensor dy, Tensor gate_up, str activation) -> (Tensor, Tensor)",
        _run_packed_again,
        _fake_packed_again,
    ),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(getattr(torch.ops.stepscope, _name).default, _fake, _library)
for _name, _backward in (("gated_activation", _differentiate), ("gated_activation_packed", _differentiate_packed)):
    torch.library.register_autograd(f"stepscope::{_name}", _backward, setup_context=_keep, lib=_library)
    torch.library.register_autograd(f"stepscope::{_name}_backward", _refuse_twice, lib=_library)
torch.library.register_autograd("stepscope::gated_activation_packed_again", _refuse_twice, lib=_library)
