"""Attention of random tensors, to be run forward and backward: what is checked, weighed and timed."""

# B batch, H heads, L length, D head dim.

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stepscope.kernels import flash_attention
from stepscope.recording.rows.attention import AttentionCase

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """All are (B, H, L, D); `upstream` is the gradient of the output. The three inputs want gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    causal: bool
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def forward(self) -> Tensor:
        return self.attend(*self.inputs)

    def backward(self, out_BHLD: Tensor) -> tuple[Tensor, ...]:
        """The gradients. The graph is used up, as in training: what it kept is given back on the way."""
        return torch.autograd.grad(out_BHLD, self.inputs, self.upstream)


def make_problem(case: AttentionCase, device: torch.device) -> AttentionProblem:
    torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
    generator = torch.Generator(device).manual_seed(case.seed)
    shape = (case.batch, case.heads, case.length, case.head_dim)

    def draw() -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPES[case.precision], generator=generator)

    q_BHLD, k_BHLD, v_BHLD = (draw().requires_grad_() for _ in range(3))
    return AttentionProblem(
        q=q_BHLD,
        k=k_BHLD,
        v=v_BHLD,
        upstream=draw(),
        causal=case.causal,
        attend=partial(flash_attention, causal=case.causal, backend=case.implementation),
    )
