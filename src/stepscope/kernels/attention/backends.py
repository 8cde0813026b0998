"""Backend selection: what each backend supports, what `auto` chooses, and a record of its choices.

`FUNCTIONS` has an entry for each backend in `spec.backends`: its module, and a function that returns why it cannot run
a problem, or None if it can. A backend requested by name runs or raises with that reason; `auto` tries the backends in
order of preference and uses the first that can run, and `chosen_backends` records the choice. Where speeds were
measured, that order is the measured one (`rankings.py`), and each pass has its own: all of these backends save the same
tensors. Reasons contain no lengths, so that this record stays short when every call has a different length. The only
other switch between backends is one the caller requests: a deterministic backward pass runs only on those that have
one.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, ModuleType
from typing import Literal, NamedTuple

import torch

from stepscope.errors import nearest
from stepscope.kernels.attention import rankings
from stepscope.kernels.attention.problem import NO_EXTRAS, Problem, UnsupportedError, is_tma_able
from stepscope.spec.backends import BACKENDS as REGISTERED

# Hopper's tiles are 64 or 128 wide and a head is padded to that in shared memory, which costs tensor-core work but no
# memory traffic. These sizes still beat `triton` on an H200: 48 by 1.2× in forward, and 80 by 1.5×; at 32 they are
# even, and at 16 `triton` wins.
HOPPER_HEAD_DIMS = frozenset(range(40, 129, 8))
HOPPER_EXTRAS = frozenset(("window", "documents"))
FA4_EXTRAS = frozenset(("window",))
HALF = (torch.float16, torch.bfloat16)
# What `auto` tries on a GPU where nothing was measured.
UNMEASURED = ("hopper", "triton", "sdpa", "tiled")
# cuDNN compiles for each new length, which takes far longer than it saves where every batch has another one. Lengths
# that a program was written for are multiples of this.
CUDNN_LENGTHS = 128


# --- The machine ---


@cache
def triton_version() -> tuple[int, int] | None:
    try:
        major, minor = version("triton").split(".")[:2]
    except PackageNotFoundError:
        return None
    return int(major), int(minor)


@cache
def _has_fa4() -> bool:
    """Whether FlashAttention-4 is installed, without importing it, which takes seconds."""
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return False
    return True


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _architecture(device: torch.device) -> str:
    major, minor = _capability(device)
    return f"sm_{major}{minor}"


def is_interpreting() -> bool:
    """Whether Triton interprets its kernels, which is how they run on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


# --- What each backend does not support ---


def _refuses_nothing(_: Problem) -> str | None:
    return None


def _refuses_triton(problem: Problem) -> str | None:
    return _triton_lacks(problem.q_BHLD.device, problem.q_BHLD.dtype)


def _triton_lacks(device: torch.device, dtype: torch.dtype) -> str | None:
    if triton_version() is None:
        return "triton is not installed"
    if dtype == torch.float64:
        return "float64 is not supported"
    if device.type != "cuda":
        if device.type != "cpu" or not is_interpreting():
            return f"it requires a CUDA GPU, but the tensors are on {device.type}"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bf16 `tl.dot` incorrectly"
    elif _capability(device) < (8, 0):
        return f"it requires sm_80 or later, but the GPU is {_architecture(device)}"
    return None


def _refuses_hopper(problem: Problem) -> str | None:
    q_BHLD = problem.q_BHLD
    if q_BHLD.device.type != "cuda":
        return f"it requires an sm_90 GPU, but the tensors are on {q_BHLD.device.type}"
    if torch.version.hip is not None or _capability(q_BHLD.device)[0] != 9:
        return f"it requires sm_90, but the GPU is {_architecture(q_BHLD.device)}"
    found = triton_version()
    if found is None or found < (3, 6):
        return "it requires triton 3.6 or later"
    unequal = _refuses_unequal(problem)
    if unequal is not None:
        return unequal
    if problem.head_dim not in HOPPER_HEAD_DIMS:
        return f"it requires a head dim of {', '.join(map(str, sorted(HOPPER_HEAD_DIMS)))}, but got {problem.head_dim}"
    return _cannot_read(problem) or _lacks(problem, HOPPER_EXTRAS)


def _refuses_fa4(problem: Problem) -> str | None:
    q_BHLD = problem.q_BHLD
    if q_BHLD.device.type != "cuda":
        return f"it requires an sm_90 or sm_100 GPU, but the tensors are on {q_BHLD.device.type}"
    if torch.version.hip is not None or _capability(q_BHLD.device)[0] not in (9, 10):
        return f"it requires sm_90 or sm_100, but the GPU is {_architecture(q_BHLD.device)}"
    if not _has_fa4():
        return "it is not installed: `pip install flash-attn-4`"
    dims = problem.head_dim, problem.v_BGKD.shape[3]
    widest = 256 if _capability(q_BHLD.device)[0] == 9 else 128
    if any(dim % 8 or dim > widest for dim in dims) and dims not in ((192, 128), (256, 256)):
        return f"it requires head dims that are multiples of 8 up to {widest}, but got {dims[0]} and {dims[1]}"
    if problem.is_grouped and dims[0] != dims[1]:
        return "with grouped heads, it requires values of the same head dim as keys"
    if not q_BHLD.numel():
        return "it requires queries"
    hides_keys = problem.causal or problem.extras is not NO_EXTRAS
    if problem.num_keys == 0 or (hides_keys and problem.num_queries > problem.num_keys):
        return "some queries see no key"
    return _cannot_read(problem) or _lacks(problem, FA4_EXTRAS)


def _cannot_read(problem: Problem) -> str | None:
    """Return what keeps kernels for 16-bit numbers from reading a tensor with the copy engine."""
    if problem.q_BHLD.dtype not in HALF:
        return f"it requires float16 or bfloat16, but the dtype is {problem.q_BHLD.dtype}"
    for name, x in (("q", problem.q_BHLD), ("k", problem.k_BGKD), ("v", problem.v_BGKD)):
        if not is_tma_able(x):
            return f"the copy engine cannot read `{name}`: its strides and address must be multiples of 16 bytes"
    return None


def _refuses_unequal(problem: Problem) -> str | None:
    v_head_dim = problem.v_BGKD.shape[3]
    if v_head_dim != problem.head_dim:
        return f"it requires `v` to have the head dim of `q` ({problem.head_dim}), but got {v_head_dim}"
    return None


def _lacks(problem: Problem, supported: frozenset[str]) -> str | None:
    lacking = _lacking(problem, supported)
    return f"it does not support {lacking}" if lacking else None


def _lacking(problem: Problem, supported: frozenset[str]) -> str:
    """Return the extras of the problem that are not supported, by the names of their arguments."""
    if problem.extras is NO_EXTRAS:
        return ""
    return " or ".join(f"`{name}`" for name in problem.extras.names if name not in supported)


def _refuses_plain(problem: Problem) -> str | None:
    if problem.num_keys == 0:
        return "without keys, the softmax is NaN"
    return None


def _refuses_sdpa(problem: Problem) -> str | None:
    if problem.hides_keys and problem.num_queries != problem.num_keys:
        return "it aligns causal masks at the start, which requires as many queries as keys"
    return _refuses_plain(problem) or _lacks(problem, frozenset())


def _refuses_sdpa_kernel(backend: str) -> Callable[[Problem], str | None]:
    def refuse(problem: Problem) -> str | None:
        reason = _refuses_sdpa(problem)
        if reason is not None:
            return reason
        device = problem.q_BHLD.device.type
        if device == "cuda":
            # PyTorch does not ask for the alignment that cuDNN relies on: results would be wrong without it.
            unread = _cannot_read(problem) if backend == "sdpa-cudnn" else None
            return unread or _ask_sdpa(backend, problem)
        if (device, backend) != ("cpu", "sdpa-flash"):
            return f"PyTorch has no such kernel for {device}"
        return _refuses_unequal(problem)

    return refuse


def _ask_sdpa(backend: str, problem: Problem) -> str | None:
    """Return PyTorch's own answer. It reports reasons as warnings, and only on request: so it is asked twice."""
    asks = {
        "sdpa-flash": torch.backends.cuda.can_use_flash_attention,
        "sdpa-efficient": torch.backends.cuda.can_use_efficient_attention,
        "sdpa-cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }
    if torch.compiler.is_compiling():
        return None  # not traceable; where PyTorch cannot run it, it raises itself
    params = torch.backends.cuda.SDPAParams(*problem[:3], None, 0.0, problem.hides_keys, problem.is_grouped)
    if asks[backend](params):
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        asks[backend](params, debug=True)
    return "; ".join(str(warning.message).split(" (Triggered")[0] for warning in told) or "PyTorch does not support it"


# --- The registry ---


class BackendFunctions(NamedTuple):
    """`module` has the functions `forward` and `backward`; `plain` runs a backend without one, which PyTorch
    differentiates. `repeats` is whether gradients are bitwise reproducible; `if asked` means under PyTorch's switch for
    it.
    """

    refuse: Callable[[Problem], str | None]
    module: str = ""
    needs_gpu: bool = False
    repeats: Literal["always", "if asked", "never"] = "always"


FUNCTIONS = {
    "hopper": BackendFunctions(_refuses_hopper, "hopper.launch", needs_gpu=True),
    "fa4": BackendFunctions(_refuses_fa4, "peers.fa4", needs_gpu=True, repeats="never"),
    "sdpa-cudnn": BackendFunctions(_refuses_sdpa_kernel("sdpa-cudnn"), "peers.cudnn", needs_gpu=True, repeats="never"),
    "triton": BackendFunctions(_refuses_triton, "triton_launch", needs_gpu=True),
    "tiled": BackendFunctions(_refuses_nothing, "tiled"),
    "naive": BackendFunctions(_refuses_plain),
    "compiled": BackendFunctions(_refuses_plain),
    "sdpa": BackendFunctions(_refuses_sdpa, repeats="if asked"),
    "sdpa-flash": BackendFunctions(_refuses_sdpa_kernel("sdpa-flash"), repeats="if asked"),
    "sdpa-efficient": BackendFunctions(_refuses_sdpa_kernel("sdpa-efficient"), repeats="if asked"),
    "sdpa-math": BackendFunctions(_refuses_sdpa),
}
assert set(FUNCTIONS) == set(REGISTERED)

BACKENDS = ("auto", *FUNCTIONS)
FLASH = tuple(name for name, functions in FUNCTIONS.items() if functions.module)
KERNELS = tuple(name for name in FLASH if FUNCTIONS[name].needs_gpu)
# By name, cuDNN runs as PyTorch runs it; `auto` uses its two passes separately.
PLAIN = (*(name for name in FUNCTIONS if name not in FLASH), "sdpa-cudnn")


@cache
def load(backend: str) -> ModuleType:
    """Return the module with `forward` and `backward`. Some packages are not installed everywhere, and take a while to
    import.
    """
    return import_module(f"stepscope.kernels.attention.{FUNCTIONS[backend].module}")


# --- The choice ---

_chosen: Counter[tuple[str, str]] = Counter()
_warned: set[str] = set()


def check_backend(backend: str, among: Sequence[str] = BACKENDS) -> None:
    if backend not in among:
        close = nearest(str(backend), among)
        guess = f"did you mean `{close}`?" if close else f"expected one of {', '.join(among)}"
        raise ValueError(f"unknown `backend` `{backend}`: {guess}")


def require(backend: str, problem: Problem, *, deterministic: bool = False) -> None:
    """Raise if the backend cannot run the problem."""
    reason = refusal(backend, problem, deterministic=deterministic)
    if reason is not None:
        raise UnsupportedError(f"`backend` `{backend}` cannot run this: {reason}")


def refusal(backend: str, problem: Problem, *, deterministic: bool = False) -> str | None:
    """Return why this backend cannot run this problem, or not deterministically; None if it can."""
    reason = FUNCTIONS[backend].refuse(problem)
    return _varies(backend, problem) if reason is None and deterministic else reason


def _varies(backend: str, problem: Problem) -> str | None:
    """Return why this backend's gradients may differ between runs; None if they are bitwise reproducible."""
    repeats = FUNCTIONS[backend].repeats
    if repeats == "never":
        return "its backward pass is not deterministic"
    atomic = repeats == "if asked" and problem.q_BHLD.is_cuda
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if atomic and not strict:
        return "its backward pass is deterministic only under `torch.use_deterministic_algorithms(True)`"
    return None


def choose(
    problem: Problem,
    direction: rankings.Direction = "forward",
    *,
    deterministic: bool = False,
    among: Sequence[str] = tuple(FUNCTIONS),
) -> str:
    """Return what `auto` runs, and record it with the reasons against the backends it prefers."""
    choice = decide(problem, direction, deterministic=deterministic, among=among)
    count(choice)
    backend, reasons = choice
    if problem.extras is not NO_EXTRAS and reasons:
        _warn_of_extras(backend, problem)
    return backend


def decide(
    problem: Problem,
    direction: rankings.Direction,
    *,
    deterministic: bool = False,
    among: Sequence[str] = tuple(FUNCTIONS),
) -> tuple[str, str]:
    """Return the first preference that can run, and the reasons against those before it."""
    reasons: list[str] = []
    for backend in preferences(problem, direction):
        if backend not in among:
            continue
        reason = refusal(backend, problem, deterministic=deterministic)
        if reason is None:
            return backend, "; ".join(reasons)
        reasons.append(f"{backend}: {reason}")
    raise UnsupportedError(f"no `backend` can run this: {'; '.join(reasons)}")


def _warn_of_extras(backend: str, problem: Problem) -> None:
    """Warn once per process and reason that an extra is the only thing that keeps a problem off `hopper`."""
    lacking = _lacking(problem, HOPPER_EXTRAS)
    if not lacking or lacking in _warned or _refuses_hopper(problem._replace(extras=NO_EXTRAS)) is not None:
        return
    _warned.add(lacking)
    warnings.warn(
        f"`hopper` does not support {lacking}, so attention runs on `{backend}`, which is slower on this GPU. Pass "
        f"`backend='{backend}'` to accept that without this warning, or leave the argument out to run on `hopper`.",
        stacklevel=2,
    )


def count(choice: tuple[str, str]) -> None:
    """Record what `auto` chose: the backend, and the reasons against those before it."""
    _chosen[choice] += 1


def preferences(problem: Problem, direction: rankings.Direction) -> tuple[str, ...]:
    """Best first. On a CPU, PyTorch's own kernel is far faster than tiles in Python."""
    if problem.q_BHLD.device.type != "cuda":
        return "sdpa", "tiled", "triton"
    ranked = _rank(problem, direction)
    return *ranked, *(backend for backend in UNMEASURED if backend not in ranked)


def _rank(problem: Problem, direction: rankings.Direction) -> tuple[str, ...]:
    """The measured order. Only plain attention of a sequence to itself was measured, in bf16."""
    q_BHLD = problem.q_BHLD
    batch, num_heads, length, head_dim = q_BHLD.shape
    measured = problem.extras is NO_EXTRAS and problem.num_keys == length and q_BHLD.dtype in HALF
    if not measured or not q_BHLD.numel():
        return ()
    shape = rankings.MeasuredShape(
        direction=direction,
        causal=problem.causal,
        head_dim=head_dim,
        value_dim=problem.v_BGKD.shape[3],
        length=length,
        programs=batch * num_heads,
        group=num_heads // problem.k_BGKD.shape[1],
    )
    ranked = rankings.rank(_architecture(q_BHLD.device), shape)
    if length % CUDNN_LENGTHS:
        return tuple(backend for backend in ranked if backend != "sdpa-cudnn")
    return ranked


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one of our GPU kernels supports every problem of this dtype on this device."""
    return device.type == "cuda" and _triton_lacks(device, dtype) is None


def chosen_backends() -> Mapping[tuple[str, str], int]:
    """Return how often `auto` chose which backend in this process, by (backend, reasons against the preferred ones).
    Forward and backward choose separately; requests by name are not counted. In a compiled model, choices between
    kernels are counted as they run, while SDPA is part of the compiled code and is not counted.
    """
    return MappingProxyType(_chosen)
