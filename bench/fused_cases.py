"""The cases of `fused_kernels.py`: each fused kernel, what people write instead of it, and the kernels of others."""

# N tokens, M width, F width of the feed-forward layer, B batch, H heads, L length, D head dim.

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stepscope import kernels
from stepscope.nn import functional

Operation = Callable[..., Sequence[Tensor]]
FP32, BF16 = torch.float32, torch.bfloat16
EPS = 1e-5
TOKENS = 4096
WIDTHS = (768, 1024, 1280, 2560, 4096)
FEED_FORWARD = (3072, 4096, 5120, 10240)
BATCH, LENGTH = 4, 1024
HEADS = ((12, 64), (16, 64), (20, 64), (32, 64), (32, 80))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem. `shapes` and `dtypes` describe the inputs, all of which have gradients. `saved` returns, from inputs
    and results, what a backward pass must read in addition to the gradients of the results.
    """

    op: str
    dtype: str
    size: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    ours: Operation
    eager: Operation
    peers: dict[str, Operation]
    saved: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    heads_first: bool = False  # inputs are (B, H, L, D) views of (B, L, H, D) memory

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} {self.size}"

    def make_inputs(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        inputs = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            x = torch.randn(shape, generator=generator, device=device).to(dtype)
            inputs.append((x.transpose(1, 2) if self.heads_first else x).detach().requires_grad_())
        return inputs


def cases(*, tiny: bool = False) -> Iterator[Case]:
    """All of them, or a small one of each kind."""
    widths, tokens = ((24,), 6) if tiny else (WIDTHS, TOKENS)
    for add in (True, False):
        for width in widths:
            for dtype in ("mixed", "bf16"):
                yield norm_case("rms", width, dtype, tokens=tokens, add=add)
                if width in (24, 1024):
                    yield norm_case("layer", width, dtype, tokens=tokens, add=add)
    feed_forward = (20,) if tiny else FEED_FORWARD
    for width in feed_forward:
        yield gated_case("swiglu", width, tokens=tokens)
        yield gated_case("swiglu", width, tokens=tokens, packed=True)
        if width in (20, 4096):
            yield gated_case("geglu", width, tokens=tokens)
    heads = ((2, 8),) if tiny else HEADS
    batch, length = (2, 5) if tiny else (BATCH, LENGTH)
    for count, head_dim in heads:
        yield rope_case(batch, length, count, head_dim, interleaved=False)
        yield rope_case(batch, length, count, head_dim, interleaved=False, packed=True)
        if count in (2, 16):
            yield rope_case(batch, length, count, head_dim, interleaved=True)


def _round(y: Tensor) -> Tensor:
    """Results are bf16, and float64 where the truth is computed."""
    return y if y.dtype == torch.float64 else y.to(BF16)


# --- Norms ---


def norm_case(kind: str, width: int, dtype: str, *, tokens: int, add: bool) -> Case:
    """mixed: the residual stream and the weight are fp32, the branch and y are bf16."""
    stream = FP32 if dtype == "mixed" else BF16
    rows, features = (tokens, width), ((width,), (width,)) if kind == "layer" else ((width,),)
    name = f"{'add_' if add else ''}{kind}_norm"
    kernel: Callable[..., Any] = getattr(kernels, name)

    def ours(*tensors: Tensor) -> Sequence[Tensor]:
        found = kernel(*tensors, eps=EPS, out_dtype=BF16)
        return found if add else (found,)

    def eager(x: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        total, parameters = (x + rest[0], rest[1:]) if add else (x, rest)
        norm: Callable[..., Tensor] = F.rms_norm if kind == "rms" else F.layer_norm
        y = _round(norm(total, (width,), *parameters, eps=EPS))
        return (total, y) if add else (y,)

    return Case(
        op=name,
        dtype=dtype,
        size=f"{tokens}x{width}",
        shapes=(rows, rows, *features) if add else (rows, *features),
        dtypes=(stream, *([BF16] if add else []), *([stream] * len(features))),
        ours=ours,
        eager=eager,
        peers=_norm_peers(kind, stream, add=add),
        saved=lambda inputs, results: [results[0] if add else inputs[0]],
    )


def _norm_peers(kind: str, stream: torch.dtype, *, add: bool) -> dict[str, Operation]:
    peers: dict[str, Operation] = {}
    if (liger := _module("liger_kernel.ops.rms_norm")) and kind == "rms" and not add and stream == BF16:
        peers["liger"] = lambda x, weight: (
            liger.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),  # noqa: FBT003 - its signature
        )
    if (fused := _module("liger_kernel.ops.fused_add_rms_norm")) and kind == "rms" and add and stream == BF16:
        peers["liger"] = lambda x, branch, weight: tuple(
            reversed(fused.LigerFusedAddRMSNormFunction.apply(branch, x, weight, EPS, 0.0, "llama", False))  # noqa: FBT003
        )
    if (layered := _module("liger_kernel.ops.layer_norm")) and kind == "layer" and not add and stream == BF16:
        peers["liger"] = lambda x, weight, bias: (layered.LigerLayerNormFunction.apply(x, weight, bias, EPS),)
    if (quack := _module("quack.rmsnorm")) and kind == "rms":
        if add:
            peers["quack"] = lambda x, branch, weight: tuple(
                reversed(quack.rmsnorm(branch, weight, residual=x, out_dtype=BF16, eps=EPS, prenorm=True))
            )
        else:
            peers["quack"] = lambda x, weight: (quack.rmsnorm(x, weight, out_dtype=BF16, eps=EPS),)
    return peers


# --- Gated activations ---


def gated_case(name: str, width: int, *, tokens: int, packed: bool = False) -> Case:
    """GeGLU with the tanh approximation."""
    options = {} if name == "swiglu" else {"approximate": "tanh"}
    kernel: Callable[..., Tensor] = getattr(kernels, f"{name}_packed" if packed else name)
    activate: Callable[..., Tensor] = F.silu if name == "swiglu" else F.gelu

    def eager(*tensors: Tensor) -> Sequence[Tensor]:
        gate, up = tensors[0].chunk(2, dim=-1) if packed else tensors
        return (activate(gate, **options) * up,)

    peers: dict[str, Operation] = {}
    liger = _module(f"liger_kernel.ops.{name}")
    if liger and not packed:
        function = liger.LigerSiLUMulFunction if name == "swiglu" else liger.LigerGELUMulFunction
        peers["liger"] = lambda gate, up: (function.apply(gate, up),)
    return Case(
        op=f"{name}_packed" if packed else name,
        dtype="bf16",
        size=f"{tokens}x{width}",
        shapes=((tokens, 2 * width),) if packed else ((tokens, width),) * 2,
        dtypes=(BF16,) if packed else (BF16, BF16),
        ours=lambda *tensors: (kernel(*tensors, **options),),
        eager=eager,
        peers=peers,
        saved=lambda inputs, _: inputs,
    )


# --- Rotary embeddings ---


def rope_case(batch: int, length: int, heads: int, head_dim: int, *, interleaved: bool, packed: bool = False) -> Case:
    """As many heads of k and v as of q. Tables are fp32, in the form that each implementation takes."""
    tables = functional.rope_tables(head_dim, length, theta=10000.0)
    tables_of: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def load(x: Tensor) -> tuple[Tensor, Tensor]:
        """The tables, moved to the device once: a copy from the host cannot be captured."""
        if x.device not in tables_of:
            tables_of[x.device] = (tables[0].to(x.device), tables[1].to(x.device))
        return tables_of[x.device]

    def rotate(x: Tensor) -> Tensor:
        return (functional.rope if interleaved else functional.rope_half)(x, *load(x))

    def ours(*tensors: Tensor) -> Sequence[Tensor]:
        if packed:
            (qkv,) = tensors
            return kernels.rope_packed(qkv, *load(qkv), num_heads=heads, num_groups=heads, interleaved=interleaved)
        q, k = tensors
        return kernels.rope(q, k, *load(q), interleaved=interleaved)

    def eager(*tensors: Tensor) -> Sequence[Tensor]:
        if not packed:
            return tuple(map(rotate, tensors))
        q, k, v = tensors[0].view(batch, length, 3, heads, head_dim).transpose(1, 3).unbind(2)
        # Attention reads v in place; a contiguous one is what ours returns.
        return rotate(q), rotate(k), v

    shape = (batch, length, heads, head_dim)
    return Case(
        op=f"rope{'_packed' if packed else ''} {'interleaved' if interleaved else 'half'}",
        dtype="bf16",
        size=f"{batch}x{length}x{heads}x{head_dim}",
        shapes=((batch, length, 3 * heads * head_dim),) if packed else (shape, shape),
        dtypes=(BF16,) if packed else (BF16, BF16),
        ours=ours,
        eager=eager,
        peers={} if packed else _rope_peers(load, interleaved=interleaved),
        saved=lambda *_: [],
        heads_first=not packed,
    )


def _rope_peers(load: Callable[[Tensor], tuple[Tensor, Tensor]], *, interleaved: bool) -> dict[str, Operation]:
    peers: dict[str, Operation] = {}
    if (liger := _module("liger_kernel.ops.rope")) and not interleaved:
        wide: dict[torch.device, list[Tensor]] = {}

        def run_liger(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            if q.device not in wide:
                wide[q.device] = [torch.cat((table, table), dim=-1)[None] for table in load(q)]
            found: Sequence[Tensor] = liger.LigerRopeFunction.apply(q, k, *wide[q.device])
            return found

        peers["liger"] = run_liger
    if quack := _module("quack.rotary"):

        def run_quack(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            return tuple(
                quack.apply_rotary_emb(x.transpose(1, 2), *load(x), interleaved=interleaved).transpose(1, 2)
                for x in (q, k)
            )

        peers["quack"] = run_quack
    return peers


def _module(name: str) -> Any:
    """A module of another library. None without a GPU, or if the library or the module is missing."""
    if not torch.cuda.is_available() or find_spec(name.partition(".")[0]) is None:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None
