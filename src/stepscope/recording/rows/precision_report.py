"""What one workload did in each precision: the dtypes that were seen, and the errors against float64.

This is what a worker sends over its pipe, what `--out` keeps, and what `--format json` prints: one document, so that a
file from a GPU host is shown on a laptop as if it had been measured there. It holds facts only. Why an output has its
dtype follows from the facts (`explain.precision.autocast`), and a better reason next year works on last year's file.

JSON has no number that is not finite. A figure that is NaN or infinite, such as the error of gradients that
overflowed, is None here, and the tables say so.
"""

import math
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode_as, read_plain, write_atomically, writing
from stepscope.recording.rows.bench import Environment
from stepscope.spec import Case, Precision, Workload

SCHEMA = "stepscope.precision/1"

NormKind = Literal["RMSNorm", "LayerNorm"]
LowDtype = Literal["bf16", "fp16"]


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a module, the model or the loss returned. `operation` is the PyTorch function that made it, views
    and casts of the shape alone left aside; None where none was seen. `input_dtypes` are what that function was given,
    before autocast cast anything. A module that was called several times is described by its first call."""

    name: str
    kind: str  # the class, with its package
    dtype: str
    gradient_dtype: str | None = None
    operation: str | None = None
    input_dtypes: tuple[str, ...] = ()
    calls: int = 1


class GradientError(msgspec.Struct, frozen=True, kw_only=True):
    """The gradients of the parameters that a module holds itself, against float64: relative L2 error, and one minus the
    cosine."""

    module: str
    relative: float | None
    one_minus_cosine: float | None


class Underflow(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of gradients that are not zero in float64, how many of them were zero here, and how many of all were
    NaN or infinite: of a module's parameters, and of its output."""

    module: str
    parameters: int = 0
    parameters_zero: int = 0
    parameters_not_finite: int = 0
    outputs: int = 0
    outputs_zero: int = 0
    outputs_not_finite: int = 0


class ScaledBackward(msgspec.Struct, frozen=True, kw_only=True):
    """One backward pass from a loss times `scale`; the gradients were divided by it again before they were judged."""

    scale: float
    gradient_error: float | None
    modules: tuple[Underflow, ...]

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"`{self.scale}` is not a scale: expected more than 0")

    @property
    def total(self) -> Underflow:
        names = [name for name in Underflow.__struct_fields__ if name != "module"]
        return Underflow(module="", **{name: sum(getattr(one, name) for one in self.modules) for name in names})


class PrecisionRun(msgspec.Struct, frozen=True, kw_only=True):
    """One precision. `loss_scale` is the one at which `gradients` were taken: 1 but for fp16."""

    precision: Precision
    parameter_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    outputs: tuple[Output, ...]
    logits: Output | None
    loss: Output
    loss_value: float | None
    loss_error: float | None
    loss_scale: float
    gradient_error: float | None
    gradient_one_minus_cosine: float | None
    gradients: tuple[GradientError, ...]
    backwards: tuple[ScaledBackward, ...] = ()


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """The same weights and inputs in float64. `narrowed` are modules in which a float of fewer bits appeared all the
    same, because the model casts by itself: there the truth is no better than that."""

    loss: float
    parameters: int
    narrowed: tuple[str, ...] = ()


class Sum(msgspec.Struct, frozen=True, kw_only=True):
    """`count` times `term` added up one by one: the dtype of the sum, of the term, and whether the term was upcast
    before it was added. `stored_term` is what the term's dtype makes of it; `stopped_at` how many additions changed the
    sum when the last ones did not."""

    accumulator: str
    term_dtype: str
    upcast: bool
    count: int
    term: float
    stored_term: float
    result: float
    stopped_at: int | None = None


class NormPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a normalisation done in `dtype` and all the rest in float64: the relative L2 error of the output,
    None where it is not finite, for inputs of a standard deviation `input_scale`."""

    norm: NormKind
    part: str
    dtype: LowDtype
    input_scale: float
    width: int
    error: float | None


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A case that `stepscope bench` timed in this precision and in fp32."""

    workload: Workload
    device: str
    step_ns: int
    fp32_step_ns: int

    def __post_init__(self) -> None:
        if min(self.step_ns, self.fp32_step_ns) <= 0:
            raise ValueError("expected steps that took time")

    @property
    def speedup(self) -> float:
        return self.fp32_step_ns / self.step_ns


class PrecisionComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker measured."""

    truth: Truth
    runs: tuple[PrecisionRun, ...]
    sums: tuple[Sum, ...]
    norm_parts: tuple[NormPart, ...]

    def __post_init__(self) -> None:
        precisions = [run.precision for run in self.runs]
        if not precisions or len(set(precisions)) < len(precisions):
            raise ValueError(f"expected one run in each of some precisions, found {precisions}")
        if not self.sums or not self.norm_parts:
            raise ValueError("expected sums, and parts of norms")


class PrecisionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document."""

    schema: str = SCHEMA
    case: Case
    environment: Environment
    command: str
    started: str
    comparison: PrecisionComparison
    speeds: tuple[Speed, ...] = ()


def encode_report(report: PrecisionReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def read_report(path: Path) -> PrecisionReport:
    try:
        content = read_plain(path)
    except OSError as error:
        raise StepscopeError(
            f"cannot read `{path}`", detail=error.strerror or "", hint=f"stepscope precision --out {path.name}"
        ) from None
    try:
        return decode_as(content, PrecisionReport, SCHEMA)
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"not a file of `stepscope precision --out`: `{path}`",
            detail=str(error),
            hint=f"stepscope precision --out {path.name}",
        ) from None


def write_report(report: PrecisionReport, path: Path) -> None:
    """The file is there whole, or as it was."""
    with writing(path, if_full="nothing was written", hint="stepscope precision --out FILE.json"):
        write_atomically(path, encode_report(report))
