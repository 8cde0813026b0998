"""Which backend runs: what each of them can do, what `auto` takes, and a record of what it took.

`FUNCTIONS` has an entry for each backend in `spec.backends`: its module, and a function that says why it cannot take a
problem, or None when it can. Asked for by name a backend runs or raises with that reason; `auto` goes through the order
of preference for the device and takes the first that does not refuse, and what it took is in `chosen_backends`. Reasons
name no lengths, so that this record stays short when every call has another. There is one other way from one backend to
another, which the caller asks for: a deterministic backward pass is never Hopper's.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from stepscope.errors import nearest
from stepscope.kernels.attention.problem import Problem, UnsupportedError, is_tma_able
from stepscope.spec.backends import BACKENDS as REGISTERED

# Hopper's tiles are 64 or 128 wide and a head is padded to that in shared memory, which costs matrix work but no memory
# traffic. Sizes at which that still beats `triton` on an H200: at 48 by 1.2, forward, and at 80 by 1.5; at 32 they are
# even, and at 16 `triton` wins.
HOPPER_HEAD_DIMS = frozenset(range(40, 129, 8))


# --- What the machine is ---


@cache
def triton_version() -> tuple[int, int] | None:
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return None
    return int(major), int(minor)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _architecture(device: torch.device) -> str:
    major, minor = _capability(device)
    return f"sm_{major}{minor}"


def is_interpreting() -> bool:
    """Whether Triton interprets its kernels, which is how they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# --- What each backend refuses ---


def _refuses_nothing(_: Problem) -> str | None:
    return None


def _refuses_triton(problem: Problem) -> str | None:
    return _triton_lacks(problem.q_BHLD.device, problem.q_BHLD.dtype)


def _triton_lacks(device: torch.device, dtype: torch.dtype) -> str | None:
    if triton_version() is None:
        return "triton is not installed"
    if dtype == torch.float64:
        return "it has no float64"
    if device.type != "cuda":
        if device.type != "cpu" or not is_interpreting():
            return f"the tensors are on {device.type}, and it needs a CUDA GPU"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes products of bf16 wrongly"
    elif _capability(device) < (8, 0):
        return f"the GPU is {_architecture(device)}, and it needs sm_80 or later"
    return None


def _refuses_hopper(problem: Problem) -> str | None:
    q_BHLD = problem.q_BHLD
    if q_BHLD.device.type != "cuda":
        return f"the tensors are on {q_BHLD.device.type}, and it needs an sm_90 GPU"
    if torch.version.hip is not None or _capability(q_BHLD.device)[0] != 9:
        return f"the GPU is {_architecture(q_BHLD.device)}, and it needs sm_90"
    found = triton_version()
    if found is None or found < (3, 6):
        return "it needs triton 3.6 or later"
    if q_BHLD.dtype not in (torch.float16, torch.bfloat16):
        return f"the dtype is {q_BHLD.dtype}, and it takes float16 and bfloat16"
    if problem.head_dim not in HOPPER_HEAD_DIMS:
        return f"the head dim is {problem.head_dim}, and it takes {', '.join(map(str, sorted(HOPPER_HEAD_DIMS)))}"
    for name, x in (("q", q_BHLD), ("k", problem.k_BGKD), ("v", problem.v_BGKD)):
        if not is_tma_able(x):
            return f"`{name}` has strides or an address that the copy engine cannot read: not on 16 bytes"
    return None


def _refuses_plain(problem: Problem) -> str | None:
    if problem.num_keys == 0:
        return "there are no keys, and a softmax over none is not a number"
    return None


def _refuses_sdpa(problem: Problem) -> str | None:
    if problem.hides_keys and problem.num_queries != problem.num_keys:
        return "it aligns a causal mask at the start, and the lengths of queries and keys differ"
    return _refuses_plain(problem)


def _refuses_sdpa_kernel(backend: str) -> Callable[[Problem], str | None]:
    def refuse(problem: Problem) -> str | None:
        reason = _refuses_sdpa(problem)
        if reason is not None:
            return reason
        device = problem.q_BHLD.device.type
        if device == "cuda":
            return _ask_sdpa(backend, problem)
        return None if (device, backend) == ("cpu", "sdpa-flash") else f"PyTorch has no such kernel for {device}"

    return refuse


def _ask_sdpa(backend: str, problem: Problem) -> str | None:
    """PyTorch's own answer. It tells its reasons as warnings, and only when asked to: so it is asked twice."""
    asks = {
        "sdpa-flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa-efficient": torch.backends.cuda.can_use_efficient_attention,
        "sdpa-cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }
    if torch.compiler.is_compiling():
        return None  # this cannot be traced; where PyTorch refuses, it raises by itself
    q_BHLD, k_BGKD, v_BGKD, causal = problem
    params = torch.backends.cuda.SDPAParams(q_BHLD, k_BGKD, v_BGKD, None, 0.0, causal, problem.is_grouped)
    if asks[backend](params):
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asks[backend](params, debug=True)
    return "; ".join(str(warning.message).split(" (Triggered")[0] for warning in told) or "PyTorch refuses it"


# --- The registry ---


class BackendFunctions(NamedTuple):
    """`module` has the functions `forward` and `backward`; `plain` runs a backend without one, and PyTorch
    differentiates it. `repeats`: whether gradients are the same to the bit in every run; `if asked` is PyTorch's
    switch for it."""

    refuse: Callable[[Problem], str | None]
    module: str = ""
    needs_gpu: bool = False
    repeats: Literal["always", "if asked", "never"] = "always"


FUNCTIONS = {
    "hopper": BackendFunctions(_refuses_hopper, "hopper_launch", needs_gpu=True, repeats="never"),
    "triton": BackendFunctions(_refuses_triton, "triton_launch", needs_gpu=True),
    "tiled": BackendFunctions(_refuses_nothing, "tiled"),
    "naive": BackendFunctions(_refuses_plain),
    "compiled": BackendFunctions(_refuses_plain),
    "sdpa": BackendFunctions(_refuses_sdpa, repeats="if asked"),
    "sdpa-flash": BackendFunctions(_refuses_sdpa_kernel("sdpa-flash"), repeats="if asked"),
    "sdpa-efficient": BackendFunctions(_refuses_sdpa_kernel("sdpa-efficient"), repeats="if asked"),
    "sdpa-cudnn": BackendFunctions(_refuses_sdpa_kernel("sdpa-cudnn"), repeats="if asked"),
    "sdpa-math": BackendFunctions(_refuses_sdpa),
}
assert set(FUNCTIONS) == set(REGISTERED)

BACKENDS = ("auto", *FUNCTIONS)
FLASH = tuple(name for name, functions in FUNCTIONS.items() if functions.module)
KERNELS = tuple(name for name in FLASH if FUNCTIONS[name].needs_gpu)
PLAIN = tuple(name for name in FUNCTIONS if name not in FLASH)


# --- The choice ---

_chosen: Counter[tuple[str, str]] = Counter()


def check_backend(backend: str, among: Sequence[str] = BACKENDS) -> None:
    if backend not in among:
        close = nearest(str(backend), among)
        guess = f"did you mean `{close}`?" if close else f"expected one of {', '.join(among)}"
        raise ValueError(f"unknown `backend` `{backend}`: {guess}")


def require(backend: str, problem: Problem, *, deterministic: bool = False) -> None:
    """Raises where the backend cannot take the problem."""
    reason = refusal(backend, problem, deterministic=deterministic)
    if reason is not None:
        raise UnsupportedError(f"`backend` `{backend}` cannot run this: {reason}")


def refusal(backend: str, problem: Problem, *, deterministic: bool = False) -> str | None:
    """Why this backend cannot take this problem, or not with gradients that repeat; None when it can."""
    reason = FUNCTIONS[backend].refuse(problem)
    return _varies(backend, problem) if reason is None and deterministic else reason


def _varies(backend: str, problem: Problem) -> str | None:
    """Why this backend's gradients may differ from run to run; None when they repeat to the bit."""
    repeats = FUNCTIONS[backend].repeats
    if repeats == "never":
        return "its backward pass is not deterministic"
    atomic = repeats == "if asked" and problem.q_BHLD.is_cuda
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if atomic and not strict:
        return "its backward pass is deterministic only under `torch.use_deterministic_algorithms(True)`"
    return None


def choose(problem: Problem, *, deterministic: bool = False, among: Sequence[str] = tuple(FUNCTIONS)) -> str:
    """What `auto` runs, recorded with what spoke against the backends that it would rather have taken."""
    reasons: list[str] = []
    for backend in preferences(problem.q_BHLD.device):
        if backend not in among:
            continue
        reason = refusal(backend, problem, deterministic=deterministic)
        if reason is None:
            _chosen[backend, "; ".join(reasons)] += 1
            return backend
        reasons.append(f"{backend}: {reason}")
    raise UnsupportedError(f"no `backend` can run this: {'; '.join(reasons)}")


def preferences(device: torch.device) -> tuple[str, ...]:
    """The best first. On a CPU, PyTorch's own kernel is far faster than tiles in Python."""
    return ("hopper", "triton", "sdpa", "tiled") if device.type == "cuda" else ("sdpa", "tiled", "triton")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one of our GPU kernels takes every problem of this dtype on this device."""
    return device.type == "cuda" and _triton_lacks(device, dtype) is None


def chosen_backends() -> Mapping[tuple[str, str], int]:
    """How often `auto` took which backend in this process, by (backend, why not the ones before it). Forward and
    backward choose for themselves; what was asked for by name is not counted. In a compiled model the choices between
    our own kernels count as they run, and SDPA, which is part of the compiled code, does not count."""
    return MappingProxyType(_chosen)
