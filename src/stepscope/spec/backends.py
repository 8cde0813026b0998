"""The registry of attention implementations. Everything that lists them reads it: the choices of `--attention`, the
rows and default grids of `stepscope attention`, the formulas of `cost.attention`, the functions of
`kernels.attention.backends`, and the tables in the documentation.

A new implementation needs an entry here, an entry with its functions in `kernels.attention.backends`, and a module.
"""

from typing import Literal, get_args

import msgspec

# In the order of tables and legends.
Implementation = Literal[
    "naive",
    "compiled",
    "sdpa",
    "sdpa-math",
    "sdpa-flash",
    "sdpa-efficient",
    "sdpa-cudnn",
    "tiled",
    "triton",
    "hopper",
    "fa4",
]
# What a model may use. `flash` is the fastest for the shape and the device, as `flash_attention` chooses it.
Attention = Literal["naive", "sdpa", "flash", "tiled", "triton", "hopper"]
DeviceKind = Literal["cuda", "cpu"]


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A temporary tensor of the backward pass. Its size uses the symbols of `cost.attention`."""

    tensor: str
    bytes_formula: str
    why: str
    count: int = 1


class AttentionBackend(msgspec.Struct, frozen=True, kw_only=True):
    """An attention implementation.

    `keeps` is what it saves for backward in addition to its inputs and output. `exact` lists the moments at which its
    memory formula is exact rather than a lower bound. `rounded_to` is the multiple to which its launcher pads the
    length.
    """

    name: Implementation
    summary: str
    keeps: Literal["scores", "weights", "log-sum-exp"]
    exact: tuple[Literal["before backward", "peak"], ...] = ()
    rounded_to: int = 1
    workspaces: tuple[Workspace, ...] = ()
    compared_on: tuple[DeviceKind, ...] = ()  # devices on which `stepscope attention` runs it by default
    longest_compared: int | None = None  # the longest sequence in the default grid
    slow_on_cuda: bool = False  # left out of the comparison in a report
    half_only: bool = False  # supports only fp16 and bf16


_ROW_STATISTICS = Workspace(
    tensor="log-sum-exp and delta", bytes_formula="B·H·P·4", why="stored in the order in which tiles are read", count=2
)
_QUERY_GRADIENT = Workspace(
    tensor="gradient of q in fp32", bytes_formula="B·H·L·D·4", why="many programs accumulate into it"
)
_ONE_OF_SDPA = "SDPA with this backend forced"

BACKENDS: dict[Implementation, AttentionBackend] = {
    backend.name: backend
    for backend in (
        AttentionBackend(
            name="naive",
            summary="reference in plain PyTorch: all scores in memory, softmax in fp32",
            keeps="scores",
            exact=("before backward", "peak"),
            compared_on=("cuda", "cpu"),
        ),
        AttentionBackend(
            name="compiled",
            summary="`naive` under `torch.compile`, compiled separately for each shape",
            keeps="weights",
            compared_on=("cuda",),
            slow_on_cuda=True,
        ),
        AttentionBackend(
            name="sdpa",
            summary="PyTorch's `scaled_dot_product_attention`, which chooses one of the four backends below",
            keeps="log-sum-exp",
            compared_on=("cpu",),
        ),
        AttentionBackend(name="sdpa-math", summary=_ONE_OF_SDPA, keeps="weights"),
        AttentionBackend(
            name="sdpa-flash", summary=_ONE_OF_SDPA, keeps="log-sum-exp", compared_on=("cuda",), half_only=True
        ),
        AttentionBackend(name="sdpa-efficient", summary=_ONE_OF_SDPA, keeps="log-sum-exp", compared_on=("cuda",)),
        AttentionBackend(
            name="sdpa-cudnn", summary=_ONE_OF_SDPA, keeps="log-sum-exp", compared_on=("cuda",), half_only=True
        ),
        AttentionBackend(
            name="tiled",
            summary="FlashAttention-2 as a loop over tiles in PyTorch, written for readability, not speed",
            keeps="log-sum-exp",
            exact=("before backward",),
            workspaces=(
                Workspace(tensor="delta", bytes_formula="B·H·L·4", why="subtracted in the gradient of softmax"),
            ),
            compared_on=("cuda", "cpu"),
            longest_compared=8192,  # beyond this, the Python loop over tiles takes minutes
            slow_on_cuda=True,
        ),
        AttentionBackend(
            name="triton",
            summary="FlashAttention-2 in Triton",
            keeps="log-sum-exp",
            exact=("before backward", "peak"),
            rounded_to=16,
            workspaces=(_ROW_STATISTICS,),
            compared_on=("cuda",),
        ),
        AttentionBackend(
            name="hopper",
            summary="FlashAttention-2 in Gluon, for Hopper GPUs only",
            keeps="log-sum-exp",
            exact=("before backward", "peak"),
            rounded_to=128,
            workspaces=(_ROW_STATISTICS, _QUERY_GRADIENT),
            compared_on=("cuda",),
            half_only=True,
        ),
        AttentionBackend(
            name="fa4",
            summary="FlashAttention-4, if it is installed (`pip install flash-attn-4`)",
            keeps="log-sum-exp",
            workspaces=(_ROW_STATISTICS, _QUERY_GRADIENT),
            half_only=True,
        ),
    )
}
assert tuple(BACKENDS) == get_args(Implementation)
assert set(get_args(Attention)) <= {"flash", *BACKENDS}


def compared_on(device: DeviceKind, *, fast: bool = False, half: bool = True) -> tuple[Implementation, ...]:
    """The implementations to compare on a device by default. `fast` leaves out slow ones, and `half=False` leaves out
    those that support only fp16 and bf16."""
    return tuple(
        name
        for name, backend in BACKENDS.items()
        if device in backend.compared_on
        and not (fast and device == "cuda" and backend.slow_on_cuda)
        and (half or not backend.half_only)
    )
