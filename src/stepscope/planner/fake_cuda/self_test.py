"""`python -m stepscope.planner.fake_cuda.self_test WAY`: whether a simulation on fake CUDA does what a GPU does.

It trains a small model in ways that depend on what is faked, and checks facts that hold on every GPU. It prints `ok`,
or what is wrong. The process ends as any other: a crash in a destructor fails the test.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stepscope import hardware
from stepscope.planner import fake_cuda
from stepscope.planner.assumptions import accelerator_of
from stepscope.planner.replayed_memory import ReplayedMemory
from stepscope.planner.simulation import Simulation, simulate_callable

WIDTH, TOKENS, VOCAB, LAYERS = 64, 96, 1000, 2


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, TOKENS, 2, -1).transpose(1, 2) for part in self.inner(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + functional.dropout(self.outer(mixed.transpose(1, 2).reshape(1, TOKENS, WIDTH)), 0.1)


class _SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def _build() -> Callable[[], None]:
    model = _SmallModel()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(VOCAB, (1, TOKENS))

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check(simulation: Simulation) -> str:
    """What differs from a GPU; empty if nothing does."""
    names = {one.name for one in simulation.operations}
    products = [one for one in simulation.operations if one.name in ("aten.mm.default", "aten.addmm.default")]
    phases = [one.phase for one in simulation.operations]
    held = _held(simulation.memory)
    parameter_bytes = 4 * simulation.parameters
    checks = {
        "autocast is off": all(one.outputs[0].dtype == "bfloat16" for one in products),
        "attention is decomposed": "aten._scaled_dot_product_cudnn_attention.default" in names,
        "the optimizer is not the one for many tensors": "aten._foreach_addcdiv_.ScalarList" in names,
        "backward did not run": phases.count("backward") > phases.count("optimizer") > 0,
        "a checkpoint recomputed nothing": _count(simulation, "layer_norm.default", "backward") == 2 * LAYERS,
        "gradients are not added in place": abs(held["gradients"] / parameter_bytes - 1) < 0.1,
        "parameters have another size": abs(held["parameters"] / parameter_bytes - 1) < 0.1,
        "the optimizer's state has another size": abs(held["optimizer state"] / parameter_bytes - 2) < 0.2,
    }
    return "; ".join(wrong for wrong, holds in checks.items() if not holds)


def _held(memory: ReplayedMemory) -> dict[str, int]:
    return {one.category: one.bytes for one in memory.categories}


def _count(simulation: Simulation, name: str, phase: str) -> int:
    return sum(one.name.endswith(name) and one.phase == phase for one in simulation.operations)


def main(name: str) -> None:
    fake_cuda.install(next(way for way in fake_cuda.WAYS if way == name))
    card = hardware.find("NVIDIA H200")
    assert card is not None, "the H200 is listed"
    sys.stdout.write(check(simulate_callable(_build, accelerator_of(card))) or "ok")


if __name__ == "__main__":
    main(sys.argv[1])
