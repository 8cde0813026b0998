"""Hand-made recordings for questions and comparisons: a CPU that launches, a device that runs, one clock."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording import EVALUATE, tables
from stepscope.recording.store import Manifest, Recording
from stepscope.spec import Scalar, build_case

HOST, AUTOGRAD = 1, 2
GEMM = "ampere_sgemm_128x64_tn"
SMALL_GEMM = "ampere_sgemm_64x32_sliced1x4_tn"
EXP = "void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel_cuda, std::array<char*, 2ul>>(int)"
COPY = "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
FLASH = "void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t>>(F)"
SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*)"
ADAM = "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>(int)"
TINY: dict[str, Scalar] = {"d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 2, "batch": 2, "context": 16}
LINEAR = {"q_proj": (64, 64), "k_proj": (64, 64), "v_proj": (64, 64)}
LINEAR |= {"output_proj": (64, 64), "gate": (64, 256), "up": (64, 256), "down": (256, 64)}


@dataclass
class Tape:
    """The CPU clock advances by `launch_ns` per kernel; a kernel starts once launched and its stream is free."""

    now: int = 1000
    launch_ns: int = 10
    rows: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {name: [] for name in tables.SCHEMAS}  # one list a table
    )
    free: dict[int, int] = field(default_factory=dict)
    sequence: int = 0

    @contextmanager
    def inside(self, name: str, thread: int = HOST) -> Iterator[None]:
        start = self.now
        self.now += 1
        yield
        self.now += 1
        self.add("ranges", name=name, start_ns=start, end_ns=self.now, thread=thread, process=1, source="user")

    @contextmanager
    def operator(self, name: str, thread: int = HOST, **more: Any) -> Iterator[None]:
        start = self.now
        self.now += 1
        yield
        self.now += 1
        self.add("ops", name=name, start_ns=start, end_ns=self.now, thread=thread, process=1, **more)

    def kernel(self, name: str, ns: int, *, thread: int = HOST, stream: int = 7, kind: str = "kernel") -> None:
        number = len(self.rows["launches"])
        called = {"name": "cudaLaunchKernel", "start_ns": self.now, "end_ns": self.now + self.launch_ns}
        self.add("launches", **called, thread=thread, process=1, correlation=number)
        self.now += self.launch_ns
        start = max(self.now, self.free.get(stream, 0))
        self.free[stream] = start + ns
        ran = {"name": name, "start_ns": start, "end_ns": start + ns, "kind": kind}
        self.add("kernels", **ran, process=1, device=0, stream=stream, correlation=number)

    def forward(self, op: str, kernel: str, ns: int, shapes: str | None = None) -> int:
        """An operator that creates an autograd node, and the number of that node."""
        self.sequence += 1
        with self.operator(op, sequence=self.sequence, shapes=shapes):
            self.kernel(kernel, ns)
        return self.sequence

    def backward(self, node: str, sequence: int, runs: Sequence[tuple[str, str, int]]) -> None:
        with self.operator(EVALUATE + node, AUTOGRAD, sequence=sequence, forward_thread=HOST):
            for op, kernel, ns in runs:
                with self.operator(op, AUTOGRAD):
                    self.kernel(kernel, ns, thread=AUTOGRAD)

    def synchronise(self) -> None:
        start = self.now
        self.now = max([self.now, *self.free.values()]) + 5
        self.add("launches", name="cudaDeviceSynchronize", start_ns=start, end_ns=self.now, thread=HOST, process=1)

    def add(self, table: str, **row: Any) -> None:
        self.rows[table].append(row)

    def recording(self, **manifest: Any) -> Recording:
        frames = {
            name: tables.conform(name, pl.DataFrame(rows, infer_schema_length=None))
            for name, rows in self.rows.items()
            if rows
        }
        described = {"source": "pytorch profiler", "file": "made.json", "device": "NVIDIA H200", **manifest}
        return Recording(manifest=Manifest(modules_recorded=True, **described), **frames)

    def profile(self, **manifest: Any) -> Profile:
        return make_profile(self.recording(**manifest))


def linear_shapes(rows: int, inputs: int, outputs: int) -> str:
    return f"[[{rows}, {inputs}], [{inputs}, {outputs}]]"


def model_step(tape: Tape, step: int, *, mode: str = "train", fused: bool = False, gemm_ns: int = 100) -> None:
    """One step of a two-layer model, with every GEMM of the built-in model."""
    made: list[tuple[str, int, str]] = []
    with tape.inside(f"step:{step}"):
        with tape.inside("phase:forward"):
            for layer in range(2):
                _layer(tape, layer, made, fused=fused, gemm_ns=gemm_ns)
            with tape.inside("module:lm_head"):
                made.append(("mm", tape.forward("aten::mm", GEMM, gemm_ns, linear_shapes(32, 64, 10)), "aten::mm"))
        if mode == "train":
            with tape.inside("phase:backward", AUTOGRAD):
                for kind, sequence, op in reversed(made):
                    tape.backward(f"{kind.title()}Backward0", sequence, [(op, GEMM, gemm_ns), (op, GEMM, gemm_ns)])
                tape.backward("TransposeBackward0", made[0][1], [("aten::copy_", COPY, 40)])
                tape.backward("torch::autograd::AccumulateGrad", 0, [("aten::copy_", COPY, 10)])
            with tape.inside("phase:optimizer"), tape.operator("aten::_fused_adam_"):
                tape.kernel(ADAM, 300)
        tape.synchronise()


def _layer(tape: Tape, layer: int, made: list[tuple[str, int, str]], *, fused: bool, gemm_ns: int) -> None:
    block = f"module:blocks.{layer}"
    for name, (inputs, outputs) in LINEAR.items():
        if name == "output_proj":
            with tape.inside(f"{block}.attention"):
                _attention(tape, made, fused=fused, gemm_ns=gemm_ns)
        part = "ffn" if name in ("gate", "up", "down") else "attention"
        with tape.inside(f"{block}.{part}.{name}"):
            shapes = linear_shapes(32, inputs, outputs)
            made.append(("mm", tape.forward("aten::mm", GEMM, gemm_ns, shapes), "aten::mm"))


def _attention(tape: Tape, made: list[tuple[str, int, str]], *, fused: bool, gemm_ns: int) -> None:
    if fused:
        with tape.operator("aten::_scaled_dot_product_flash_attention"):
            tape.kernel(FLASH, gemm_ns)
        return
    with tape.inside("part:scores"):
        made.append(("bmm", tape.forward("aten::bmm", GEMM, gemm_ns, "[[4, 16, 32], [4, 32, 16]]"), "aten::bmm"))
    with tape.inside("part:softmax"):
        tape.forward("aten::exp", EXP, 50)
    with tape.inside("part:values"):
        made.append(("bmm", tape.forward("aten::bmm", GEMM, gemm_ns, "[[4, 16, 16], [4, 16, 32]]"), "aten::bmm"))


def model_profile(
    *, steps: int = 2, mode: str = "train", fused: bool = False, gemm_ns: int = 100, **more: Any
) -> Profile:
    tape = Tape()
    for step in range(steps):
        model_step(tape, step, mode=mode, fused=fused, gemm_ns=gemm_ns)
    case = build_case({**TINY, "mode": mode, "device": "cuda:0"})
    return tape.profile(**{"case": case, "parameters": 1000, **more})
