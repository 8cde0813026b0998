"""Runs the parts of a training step on the CPU, to find out which instructions work.

`python -m stepscope.measure.instructions [compiled]` prints the name of each part before it starts. On a machine that
advertises instructions it cannot run, the process dies, and the last line says where. `jobs.workers.cpu_limits` starts
it and decides what to set. The sizes are small, but large enough for oneDNN to choose the kernels that it chooses for a
model.
"""

import os
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SIZE = 128

# Variables that keep a library from the CPU's newest instructions, with their values from newest to oldest. AVX10_2 is
# not among oneDNN's: it is off by default, so naming it would allow more.
LEVELS = {
    "ONEDNN_MAX_CPU_ISA": (
        *("AVX512_CORE_AMX_FP16", "AVX512_CORE_AMX", "AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE_VNNI"),
        *("AVX512_CORE", "AVX2_VNNI_2", "AVX2_VNNI", "AVX2", "AVX", "SSE41"),
    ),
    "MKL_ENABLE_INSTRUCTIONS": ("AVX512_E3", "AVX512_E2", "AVX512_E1", "AVX512", "AVX2", "SSE4_2"),
    "ATEN_CPU_CAPABILITY": ("avx2", "default"),
    "TORCHINDUCTOR_VEC_ISA_OK": ("0",),
}
# Older aliases, which still work.
ALIASES = {"DNNL_MAX_CPU_ISA": "ONEDNN_MAX_CPU_ISA"}

COMPILED = "a compiled GEMM"
# In the order in which they run, with what may help if one crashes. oneDNN runs bf16 and fp16 GEMMs, MKL those of fp32
# and some in attention, ATen elementwise operations, and Inductor the compiled code.
REMEDIES = {
    "an elementwise operation": ("ATEN_CPU_CAPABILITY",),
    "an fp32 GEMM": ("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"),
    "a bf16 GEMM": ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    "an fp16 GEMM": ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    "a training step": ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"),
    COMPILED: ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "TORCHINDUCTOR_VEC_ISA_OK"),
}
PARTS = tuple(REMEDIES)


def read_limits(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that limit the CPU's instructions and are set, by anyone."""
    return {name: environ[name] for name in (*LEVELS, *ALIASES) if environ.get(name)}


def say_limits(limits: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in limits.items())


def main(arguments: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is a result, and needs no core dump
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of compilers would outlive a crashed process
    import torch

    parts: dict[str, Callable[[], object]] = {
        "an elementwise operation": _work_on_elements,
        "an fp32 GEMM": lambda: _multiply(torch.float32),
        "a bf16 GEMM": lambda: _multiply(torch.bfloat16),
        "an fp16 GEMM": lambda: _multiply(torch.float16),
        "a training step": _train,
    }
    if arguments == ["compiled"]:
        parts[COMPILED] = lambda: torch.compile(_multiply)(torch.bfloat16)
    for name, work in parts.items():
        _run(name, work)
    _begin("done")


def _begin(part: str) -> None:
    sys.stdout.write(f"{part}\n")
    sys.stdout.flush()


def _run(name: str, work: Callable[[], object]) -> None:
    """A Python exception, such as a missing compiler, is not a failed instruction: a worker that needs it hits the same
    error and reports it.
    """
    _begin(name)
    try:
        work()
    except Exception:  # noqa: BLE001
        traceback.print_exc()


def _work_on_elements() -> object:
    import torch

    values = torch.linspace(-1, 1, _SIZE * _SIZE).view(_SIZE, _SIZE)
    return torch.softmax(values.exp().bfloat16().float().tanh(), dim=-1).half().sum()


def _multiply(dtype: "torch.dtype") -> object:
    import torch

    square = torch.ones(_SIZE, _SIZE, dtype=dtype)
    return torch.relu(square @ square).sum()


def _train() -> None:
    """Forward and backward in the two autocast precisions, with attention, which has GEMMs of its own."""
    import torch
    from torch.nn import functional

    for precision in (torch.bfloat16, torch.float16):
        layer = torch.nn.Linear(_SIZE, 3 * _SIZE)
        x_BLD = torch.ones(2, _SIZE, _SIZE)
        with torch.autocast("cpu", dtype=precision):
            q_BHLD, k_BHLD, v_BHLD = (
                part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x_BLD).chunk(3, dim=-1)
            )
            y_BHLD = functional.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)
            loss = functional.gelu(functional.layer_norm(y_BHLD, y_BHLD.shape[-1:])).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1:])
