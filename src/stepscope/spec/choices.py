"""The words and numbers a setting may be, checked in one place whoever gives them."""

from typing import Literal, get_args

from stepscope.errors import StepscopeError, nearest
from stepscope.spec.backends import Attention as Attention

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Mode = Literal["inference", "forward", "forward-backward", "train"]
Optimizer = Literal["adamw", "adamw-torch", "adamw-fused", "sgd"]
# `single` is one process and no collective. The next four are ways of data parallelism; `fsdp` shards the weights.
Strategy = Literal["single", "naive", "flat", "overlap", "bucketed", "fsdp"]
CHOICES: dict[str, object] = {
    "precision": Precision,
    "mode": Mode,
    "attention": Attention,
    "optimizer": Optimizer,
    "strategy": Strategy,
}
TOO_LARGE = 2**48  # bytes, tokens or seeds; what is larger overflows somewhere below
Scalar = bool | int | float | str


class SpecError(StepscopeError, ValueError):
    """A workload that cannot be. A ValueError too, for those who build workloads in Python."""


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def require_choice(name: str, value: str) -> None:
    """A workload made in Python passes through no parser; a word that nobody knows must not run as something else."""
    options = get_args(CHOICES[name])
    if value not in options:
        close = nearest(str(value), options)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(options)}",
            hint=f"did you mean `{close}`?" if close else "",
        )


def require_positive(name: str, value: int, *, too_large: int = TOO_LARGE) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name} `{value}` is not a whole number", hint=f"{flag_of(name)} 1")
    if value < 1:
        raise SpecError(f"{name} `{value}` is not positive", detail="expected 1 or more", hint=f"{flag_of(name)} 1")
    if value >= too_large:
        raise SpecError(
            f"{name} `{value}` is too large", detail="no machine has room for it", hint=f"{flag_of(name)} 1"
        )
