"""The result of `stepscope precision`: the observed dtypes in each precision, and the errors relative to float64.

One document is what a worker sends, what `--out` saves, and what `--format json` prints, so a result from a GPU machine
can be shown on a laptop. It contains observations only. The reason for the dtype of an output is derived from them
(`explain.precision.autocast`), so that better reasons also work on old files.

JSON has no NaN or infinity. Such a value, for example the error of gradients that overflowed, is None here, and the
tables show it as infinite.
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
    """A tensor that a module, the model or the loss returned. `operation` is the PyTorch function that produced it,
    ignoring views and reshapes; None if none was recorded. `input_dtypes` are the dtypes of its inputs before autocast.
    If a module was called several times, this is its first call."""

    name: str
    kind: str  # qualified name of the class
    dtype: str
    gradient_dtype: str | None = None
    operation: str | None = None
    input_dtypes: tuple[str, ...] = ()
    calls: int = 1


class GradientError(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the gradients of a module's own parameters, compared with float64: relative L2 error, and one minus
    the cosine."""

    module: str
    relative: float | None
    one_minus_cosine: float | None


class Underflow(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of gradient elements, for a module's parameters and its output: nonzero in float64, of these zero in this
    precision, and NaN or infinite."""

    module: str
    parameters: int = 0
    parameters_zero: int = 0
    parameters_not_finite: int = 0
    outputs: int = 0
    outputs_zero: int = 0
    outputs_not_finite: int = 0


class ScaledBackward(msgspec.Struct, frozen=True, kw_only=True):
    """One backward pass with the loss multiplied by `scale`. Gradients are divided by it before they are compared."""

    scale: float
    gradient_error: float | None
    modules: tuple[Underflow, ...]

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"invalid loss scale `{self.scale}`: expected a positive number")

    @property
    def total(self) -> Underflow:
        names = [name for name in Underflow.__struct_fields__ if name != "module"]
        return Underflow(module="", **{name: sum(getattr(one, name) for one in self.modules) for name in names})


class PrecisionRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result in one precision. `loss_scale` is the scale for `gradients`: 1 except in fp16."""

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
    """The reference: the same weights and inputs in float64. `narrowed` are modules that used a narrower float anyway,
    because the model casts explicitly; the reference is less accurate there."""

    loss: float
    parameters: int
    narrowed: tuple[str, ...] = ()


class Sum(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of `count` terms, added one by one: the dtype of the sum, of the term, and whether the term was upcast
    first. `stored_term` is the term rounded to its dtype; `stopped_at` is the number of additions after which the sum
    stopped changing."""

    accumulator: str
    term_dtype: str
    upcast: bool
    count: int
    term: float
    stored_term: float
    result: float
    stopped_at: int | None = None


class NormPart(msgspec.Struct, frozen=True, kw_only=True):
    """A norm with one part in `dtype` and the rest in float64: the relative L2 error of the output, None if it is not
    finite, for inputs with standard deviation `input_scale`."""

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
            raise ValueError("expected positive step times")

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
            raise ValueError(f"expected one run per precision, got {precisions}")
        if not self.sums or not self.norm_parts:
            raise ValueError("expected at least one sum and one norm part")


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
            f"not a `stepscope precision` result: `{path}`",
            detail=str(error),
            hint=f"stepscope precision --out {path.name}",
        ) from None


def write_report(report: PrecisionReport, path: Path) -> None:
    """Write the file atomically."""
    with writing(path, if_full="nothing was written", hint="stepscope precision --out FILE.json"):
        write_atomically(path, encode_report(report))
