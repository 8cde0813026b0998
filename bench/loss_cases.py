"""The cases of `loss_kernels.py`: AdamW, cross entropy, linear + cross entropy, and the GEMMs of the latter."""

# N tokens, D width, V vocabulary, P padded vocabulary.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepscope.cost import adamw_bytes, linear_cross_entropy_flops
from stepscope.kernels import (
    AdamWUpdates,
    Hyper,
    OneLaunchAdamW,
    ParameterUpdate,
    cross_entropy,
    linear_cross_entropy,
)
from stepscope.spec import SIZES

Call = Callable[[], Any]
BF16, FP32 = torch.bfloat16, torch.float32
TOKENS = 4096
VOCABULARIES = (10_000, 50_257, 151_936)
WIDTHS = (768, 1024)
HYPER = Hyper(lr=1e-6)
NEVER_CLIPS = 1e9  # the norm is computed, and nothing shrinks from one call to the next
CHECKED_ROWS = 64
COPIED_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`build` makes a call without arguments; `check` takes its result, and returns the error relative to the largest
    value of the truth, and the limit.
    """

    name: str
    build: Callable[[], Call]
    check: Callable[[Any], tuple[float, float]] | None = None
    num_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    contenders: Callable[[torch.device], list[Contender]]
    ours: tuple[str, ...] = ("ours",)
    facts: dict[str, Any] = field(default_factory=dict)


def cases(*, tiny: bool) -> Iterator[Case]:
    sizes = ("nano",) if tiny else ("small", "medium", "large")
    for size in sizes:
        shapes = parameter_shapes(size)
        if tiny:
            shapes = [tuple(min(length, 20) for length in shape) for shape in shapes]
        yield Case(
            name=f"adamw {size}",
            contenders=lambda device, shapes=shapes: adamw_contenders(shapes, device),  # type: ignore[misc]
            ours=("ours", "ours clipped", "ours fp32", "ours fp32 optimizer"),
            facts={"size": size, "parameters": sum(torch.Size(shape).numel() for shape in shapes)},
        )
    tokens, vocabularies, widths = (6, (40, 37), (16,)) if tiny else (TOKENS, VOCABULARIES, WIDTHS)
    for vocab in vocabularies:
        yield Case(
            name=f"cross_entropy {tokens}x{vocab}",
            contenders=lambda device, v=vocab: cross_entropy_contenders(tokens, v, device),  # type: ignore[misc]
            facts={"tokens": tokens, "vocab": vocab},
        )
    for vocab in vocabularies:
        for width in widths:
            yield Case(
                name=f"linear_cross_entropy {tokens}x{width}x{vocab}",
                contenders=lambda device, v=vocab, d=width: linear_contenders(tokens, d, v, device),  # type: ignore[misc]
                ours=("ours", "ours, logits in memory"),
                facts={"tokens": tokens, "vocab": vocab, "width": width},
            )
    vocab, padded = (37, 40) if tiny else (50_257, 50_304)
    yield Case(
        name=f"GEMM {tokens}x{widths[0]}x{vocab}",
        contenders=lambda device: gemm_contenders(tokens, widths[0], vocab, padded, device),
        ours=(),
        facts={"tokens": tokens, "vocab": vocab, "width": widths[0]},
    )


def parameter_shapes(size: str) -> list[tuple[int, ...]]:
    """As of the built-in model: matrices, and the weights of the norms."""
    shape = SIZES[size]
    width, kv_width = shape.d_model, shape.num_kv_heads * shape.head_dim
    layer: list[tuple[int, ...]] = [(width, width), (kv_width, width), (kv_width, width), (width, width)]
    layer += [(shape.d_ff, width), (shape.d_ff, width), (width, shape.d_ff), (width,), (width,)]
    return [(shape.vocab, width), *layer * shape.num_layers, (width,), (shape.vocab, width)]


def draw(*shape: int, device: torch.device, seed: int = 0, std: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).mul_(std).to(dtype)


# --- AdamW. All contenders update the same tensors, which leaves memory for the largest model. ---


class SharedParameters:
    """Parameters with fp32 and bf16 gradients, states and working copies, and each optimizer over them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.params = [
            nn.Parameter(draw(*shape, device=device, seed=seed, std=0.02, dtype=FP32))
            for seed, shape in enumerate(shapes)
        ]
        for param in self.params:
            param.grad = torch.full_like(param, 1e-3)
        self.averages, self.squares = ([torch.zeros_like(param) for param in self.params] for _ in range(2))
        self.low_gradients = [
            param.grad.to(BF16) if param.dim() == 2 else param.grad for param in self.params if param.grad is not None
        ]
        self.working = [param.detach().to(BF16) if param.dim() == 2 else None for param in self.params]
        self.count = sum(param.numel() for param in self.params)

    def updates(self, *, low: bool, max_norm: float | None = None) -> Call:
        rows = zip(self.params, self.averages, self.squares, self.working, strict=True)
        updates = [
            ParameterUpdate(master=param.detach(), exp_avg=average, exp_avg_sq=square, working=work if low else None)
            for param, average, square, work in rows
        ]
        made = AdamWUpdates(updates, [HYPER], max_norm=max_norm)
        made.bind(self.low_gradients if low else [param.grad for param in self.params if param.grad is not None])
        return made.launch

    def optimizer(self, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
        """With the shared states, before its first step."""
        betas = (HYPER.beta1, HYPER.beta2)
        made = kind(self.params, lr=HYPER.lr, betas=betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay, **options)
        for param, average, square in zip(self.params, self.averages, self.squares, strict=True):
            step = torch.zeros((), device=param.device)
            made.state[param] = {"step": step, "exp_avg": average, "exp_avg_sq": square}
        return made

    def reset(self) -> None:
        """As before the first step, except for the parameters themselves."""
        for tensor in (*self.averages, *self.squares):
            tensor.zero_()
        self.before = [param.detach().clone() for param in self._sample()]

    def _sample(self) -> list[nn.Parameter]:
        return [self.params[0], self.params[min(8, len(self.params) - 1)], self.params[-1]]

    def check(self, _: object) -> tuple[float, float]:
        """Compare some parameters after their first step with float64: the averages of one gradient g, corrected, are g
        and g², so that the step is lr · g / (|g| + eps). Without it the error would be 1e-5.
        """
        step = 1e-3 / (1e-3 + HYPER.eps)
        worst = 0.0
        for param, before in zip(self._sample(), self.before, strict=True):
            truth = before.double() * (1 - HYPER.lr * HYPER.weight_decay) - HYPER.lr * step
            worst = max(worst, relative_error(param.detach(), truth))
        return worst, 2e-7


def adamw_contenders(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Contender]:
    shared = SharedParameters(shapes, device)
    moved = {
        "ours": adamw_bytes(shared.count, gradient_bytes=2, working_bytes=2),
        "ours clipped": adamw_bytes(shared.count, gradient_bytes=2, working_bytes=2, clip=True),
        "torch fused fp32 clipped": adamw_bytes(shared.count, clip=True),
    }
    num_bytes = adamw_bytes(shared.count)
    on_gpu = device.type == "cuda"

    def fresh(build: Callable[[], Call]) -> Callable[[], Call]:
        def start() -> Call:
            shared.reset()
            return build()

        return start

    def torch_step(*, copies: bool = False, clips: bool = False, **options: Any) -> Call:
        optimizer = shared.optimizer(torch.optim.AdamW, capturable=on_gpu, **options)
        pairs = [(work, p.detach()) for work, p in zip(shared.working, shared.params, strict=True) if work is not None]

        def step() -> None:
            if clips:
                nn.utils.clip_grad_norm_(shared.params, NEVER_CLIPS, foreach=True)
            optimizer.step()
            if copies:
                torch._foreach_copy_([work for work, _ in pairs], [master for _, master in pairs])

        return step

    builds: dict[str, Callable[[], Call]] = {
        "ours": lambda: shared.updates(low=True),
        "ours clipped": lambda: shared.updates(low=True, max_norm=NEVER_CLIPS),
        "ours fp32": lambda: shared.updates(low=False),
        "ours fp32 optimizer": lambda: shared.optimizer(OneLaunchAdamW).step,
        "torch fused fp32": lambda: torch_step(fused=True),
        "torch fused fp32, copied to bf16": lambda: torch_step(fused=True, copies=True),
        "torch fused fp32 clipped": lambda: torch_step(fused=True, clips=True),
        "torch foreach fp32": lambda: torch_step(foreach=True),
    }
    return [
        *(
            Contender(name=name, build=fresh(build), check=shared.check, num_bytes=moved.get(name, num_bytes))
            for name, build in builds.items()
        ),
        copy_contender(min(COPIED_BYTES, num_bytes), device),
    ]


def copy_contender(num_bytes: int, device: torch.device) -> Contender:
    """Reads and writes this many bytes in all."""

    def build() -> Call:
        source, target = torch.zeros((2, num_bytes // 2), dtype=torch.uint8, device=device)
        return lambda: target.copy_(source)

    return Contender(name="copy", build=build, num_bytes=num_bytes)


# --- The losses: forward and backward ---


def cross_entropy_contenders(tokens: int, vocab: int, device: torch.device) -> list[Contender]:
    values = draw(tokens, vocab, device=device, std=2.0)
    targets = torch.randint(vocab, (tokens,), device=device, generator=torch.Generator(device).manual_seed(1))
    exact = values.double()
    exact_loss = F.cross_entropy(exact, targets)
    truth = exact[:CHECKED_ROWS].softmax(-1)
    truth[torch.arange(len(truth)), targets[:CHECKED_ROWS]] -= 1
    truth /= tokens
    del exact

    def check(result: tuple[Tensor, Tensor]) -> tuple[float, float]:
        loss, gradient = result
        loss_off = ((loss.double() - exact_loss).abs() / exact_loss).item()
        return max(loss_off, relative_error(gradient[:CHECKED_ROWS], truth)), 2**-8

    def both(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Call]:
        def build() -> Call:
            # A copy: Liger writes the gradient over the logits.
            logits = values.clone().requires_grad_()

            def call() -> tuple[Tensor, Tensor]:
                loss = loss_of(logits, targets)
                return loss.detach(), torch.autograd.grad(loss, logits)[0]

            return call

        return build

    def eager(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    num_bytes = 3 * values.nbytes  # the logits twice, the gradient once
    losses: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
        "ours": lambda: cross_entropy,
        "eager": lambda: eager,
        "compiled": lambda: compiled(eager, device),
        "liger": lambda: liger("LigerCrossEntropyLoss"),
        "quack": lambda: (
            lambda logits, targets: import_module("quack.cross_entropy").cross_entropy(
                logits, targets, reduction="mean"
            )
        ),
    }
    return [
        *(
            Contender(name=name, build=lambda load=load: both(load())(), check=check, num_bytes=num_bytes)  # type: ignore[misc]
            for name, load in losses.items()
        ),
        copy_contender(num_bytes, device),
    ]


def linear_contenders(tokens: int, width: int, vocab: int, device: torch.device) -> list[Contender]:
    x = draw(tokens, width, device=device).requires_grad_()
    weight = draw(vocab, width, device=device, seed=1, std=width**-0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device, generator=torch.Generator(device).manual_seed(1))
    with torch.no_grad():
        exact = x.double() @ weight.double().T
        exact_loss = F.cross_entropy(exact, targets)
        gradient = exact.sub_(exact.logsumexp(-1, keepdim=True)).exp_()
        gradient[torch.arange(tokens, device=device), targets] -= 1
        truths = (
            gradient[:CHECKED_ROWS] @ weight.double() / tokens,
            gradient[:, :CHECKED_ROWS].T @ x.double() / tokens,
        )
        del exact, gradient

    def check(result: tuple[Tensor, ...]) -> tuple[float, float]:
        loss, dx, dweight = result
        errors = [((loss.double() - exact_loss).abs() / exact_loss).item()]
        errors += [
            relative_error(part[:CHECKED_ROWS], truth) for part, truth in zip((dx, dweight), truths, strict=True)
        ]
        return max(errors), 2**-6

    def both(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Call:
        def call() -> tuple[Tensor, ...]:
            loss = loss_of(x, weight, targets)
            return loss.detach(), *torch.autograd.grad(loss, (x, weight))

        return call

    def eager(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def with_liger() -> Callable[..., Tensor]:
        loss = liger("LigerFusedLinearCrossEntropyLoss")
        return lambda x, weight, targets: loss(weight, x, targets)

    def with_quack(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        module = import_module("quack.linear_cross_entropy")
        loss: Tensor = module.chunked_linear_cross_entropy(x, weight, targets, reduction="mean")
        return loss

    flops = linear_cross_entropy_flops(tokens=tokens, width=width, vocab=vocab, gradients=2)
    losses: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "ours": lambda: linear_cross_entropy,
        "ours, logits in memory": lambda: lambda x, weight, targets: cross_entropy(F.linear(x, weight), targets),
        "eager": lambda: eager,
        "compiled": lambda: compiled(eager, device),
        "liger": with_liger,
        "quack": lambda: with_quack,
    }
    return [
        Contender(name=name, build=lambda load=load: both(load()), check=check, flops=flops)  # type: ignore[misc]
        for name, load in losses.items()
    ]


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def liger(name: str) -> Callable[..., Tensor]:
    loss: Callable[..., Tensor] = getattr(import_module("liger_kernel.transformers"), name)()
    return loss


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth).abs().max() / truth.abs().max()).item()


# --- Why the vocabulary is padded, and what sums in fp32 cost ---


def gemm_contenders(tokens: int, width: int, vocab: int, padded: int, device: torch.device) -> list[Contender]:
    x_ND = draw(tokens, width, device=device)
    weight_PD = draw(padded, width, device=device, seed=1, std=width**-0.5)
    logits_NP = draw(tokens, padded, device=device, seed=2)
    odd_NV = logits_NP[:, :vocab].contiguous()
    weight_VD = weight_PD[:vocab]
    sums_PD = torch.zeros(padded, width, device=device)
    low_PD = sums_PD.to(BF16)
    builds: dict[str, Call] = {
        "logits, padded": lambda: torch.mm(x_ND, weight_PD.T, out=logits_NP),
        "logits, odd in padded rows": lambda: torch.mm(x_ND, weight_VD.T, out=logits_NP[:, :vocab]),
        "logits, odd": lambda: torch.mm(x_ND, weight_VD.T, out=odd_NV),
        "dx, padded": lambda: torch.mm(logits_NP, weight_PD),
        "dx, odd in padded rows": lambda: torch.mm(logits_NP[:, :vocab], weight_VD),
        "dx, odd": lambda: torch.mm(odd_NV, weight_VD),
        "dweight, padded, bf16": lambda: torch.mm(logits_NP.T, x_ND, out=low_PD),
        "dweight, odd, bf16": lambda: torch.mm(odd_NV.T, x_ND, out=low_PD[:vocab]),
        "padding the weight": lambda: F.pad(weight_VD, (0, 0, 0, padded - vocab)),
    }
    if device.type == "cuda":
        options: dict[str, Any] = {"out_dtype": FP32, "out": sums_PD}
        builds["dweight, padded, fp32"] = lambda: torch.mm(logits_NP.T, x_ND, **options)
        builds["dweight, padded, added in fp32"] = lambda: torch.addmm(sums_PD, logits_NP.T, x_ND, **options)
    flops = linear_cross_entropy_flops(tokens=tokens, width=width, vocab=vocab, gradients=0)
    return [
        Contender(name=name, build=lambda call=call: call, flops=flops)  # type: ignore[misc]
        for name, call in builds.items()
    ]
