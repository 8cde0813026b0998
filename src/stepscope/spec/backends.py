"""The ways to compute attention, by name. Everything that lists them reads this registry: the choices of `--attention`,
the rows and default grids of `stepscope attention`, the closed forms of `cost.attention`, the functions of
`kernels.attention.backends`, and the tables of the documentation.

A new one is an entry here, an entry with its functions in `kernels.attention.backends`, and its own module.
"""

from typing import Literal, get_args

import msgspec

# In the order of tables and legends: from the one that keeps all scores to the one made for one kind of GPU.
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
]
# What a model may use. `flash` is ours in whichever form is fastest on the device; the last three are those forms.
Attention = Literal["naive", "sdpa", "flash", "tiled", "triton", "hopper"]
DeviceKind = Literal["cuda", "cpu"]


class Workspace(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that backward takes for itself, with the symbols of `cost.attention` in its size."""

    tensor: str
    bytes_formula: str
    why: str
    count: int = 1


class AttentionBackend(msgspec.Struct, frozen=True, kw_only=True):
    """One way to compute attention.

    `keeps` is what it holds for backward besides its inputs and output, `exact` the moments at which the closed form of
    its memory is exact rather than a lower bound, and `rounded_to` the rows to which its launcher pads the length.
    """

    name: Implementation
    summary: str
    keeps: Literal["scores", "weights", "log-sum-exp"]
    exact: tuple[Literal["before backward", "peak"], ...] = ()
    rounded_to: int = 1
    workspaces: tuple[Workspace, ...] = ()
    compared_on: tuple[DeviceKind, ...] = ()  # where `stepscope attention` runs it unless told otherwise
    longest_compared: int | None = None  # the longest sequence of that default grid
    slow_on_cuda: bool = False  # left out where a comparison is only part of a report
    half_only: bool = False  # takes fp16 and bf16 alone


_ROW_STATISTICS = Workspace(
    tensor="log-sum-exp and delta", bytes_formula="B·H·P·4", why="in the order in which tiles are read", count=2
)
_ONE_OF_SDPA = "one of its backends, forced"

BACKENDS: dict[Implementation, AttentionBackend] = {
    backend.name: backend
    for backend in (
        AttentionBackend(
            name="naive",
            summary="the reference in plain PyTorch: all scores in memory, softmax in fp32",
            keeps="scores",
            exact=("before backward", "peak"),
            compared_on=("cuda", "cpu"),
        ),
        AttentionBackend(
            name="compiled",
            summary="the same under `torch.compile`, each shape compiled for itself",
            keeps="weights",
            compared_on=("cuda",),
            slow_on_cuda=True,
        ),
        AttentionBackend(
            name="sdpa",
            summary="PyTorch's `scaled_dot_product_attention`, which chooses one of the next four",
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
            summary="FlashAttention-2 as a loop over tiles in PyTorch: to read, not to run",
            keeps="log-sum-exp",
            exact=("before backward",),
            workspaces=(Workspace(tensor="delta", bytes_formula="B·H·L·4", why="the softmax's gradient subtracts it"),),
            compared_on=("cuda", "cpu"),
            longest_compared=8192,  # Python's loop over tiles takes minutes beyond
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
            summary="FlashAttention-2 in Gluon, for Hopper alone",
            keeps="log-sum-exp",
            exact=("before backward", "peak"),
            rounded_to=128,
            workspaces=(
                _ROW_STATISTICS,
                Workspace(
                    tensor="gradient of q in fp32",
                    bytes_formula="B·H·L·D·4",
                    why="programs add to it from all sides",
                ),
            ),
            compared_on=("cuda",),
            half_only=True,
        ),
    )
}
assert tuple(BACKENDS) == get_args(Implementation)
assert set(get_args(Attention)) <= {"flash", *BACKENDS}


def compared_on(device: DeviceKind, *, fast: bool = False, half: bool = True) -> tuple[Implementation, ...]:
    """What is compared on a device where nobody names implementations. `fast` leaves out what takes long there, and
    `half=False` what takes fp16 and bf16 alone."""
    return tuple(
        name
        for name, backend in BACKENDS.items()
        if device in backend.compared_on
        and not (fast and device == "cuda" and backend.slow_on_cuda)
        and (half or not backend.half_only)
    )
