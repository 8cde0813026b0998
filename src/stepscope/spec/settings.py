"""Settings: the flat names that flags and TOML share, and a case made of them."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, get_args

import msgspec

from stepscope.errors import nearest
from stepscope.spec.choices import CHOICES, Scalar, SpecError, flag_of, require_choice, require_positive
from stepscope.spec.workload import (
    SIZES,
    Case,
    Factory,
    HuggingFace,
    ModelShape,
    Timing,
    Workload,
    canonical_checkpoint,
)
from stepscope.units import GIB, KIB, MIB

T = TypeVar("T")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One name a user may set. `parse` turns a flag's text into the value that TOML would have given."""

    parse: Callable[[str], Scalar | None]
    help: str
    metavar: str


def parse_integer(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"not a whole number: `{text}`", hint="digits only, such as 1024") from None


def _choice(name: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        require_choice(name, text)
        return text

    return parse


def parse_yes_or_no(text: str) -> bool:
    if text.lower() in ("yes", "true", "on", "1"):
        return True
    if text.lower() in ("no", "false", "off", "0"):
        return False
    raise SpecError(f"neither yes nor no: `{text}`")


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024 * GIB}


def _limit(text: str) -> int | None:
    return None if text.lower() == "none" else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """`24GB` is 24 · 10⁹ bytes and `24GiB` is 24 · 2³⁰, as everywhere outside of marketing."""
    match = re.fullmatch(r"([\d._]+)\s*([KMGT]?i?B)?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise SpecError(
            f"not an amount of memory: `{text}`", detail="expected a number and a unit", hint="24GB, 512MiB"
        )
    return round(number * _UNITS[(match[2] or "B").upper()])


def _options(name: str) -> str:
    return "|".join(get_args(CHOICES[name]))


def _named_size(text: str) -> str:
    if text not in SIZES:
        close = nearest(text, SIZES)
        raise SpecError(
            f"unknown size: `{text}`",
            detail=f"expected one of {', '.join(SIZES)}" + (f"; did you mean `{close}`?" if close else ""),
            hint="stepscope bench --list",
        )
    return text


SHAPE_SETTINGS: dict[str, Setting] = {
    "size": Setting(parse=_named_size, metavar="NAME", help="A named size of the built-in model (see --list)."),
    "vocab": Setting(parse=parse_integer, metavar="N", help="Vocabulary of the built-in model."),
    "d_model": Setting(parse=parse_integer, metavar="N", help="Width, in place of the size's."),
    "d_ff": Setting(parse=parse_integer, metavar="N", help="Feed-forward width, in place of the size's."),
    "num_layers": Setting(parse=parse_integer, metavar="N", help="Layers, in place of the size's."),
    "num_heads": Setting(parse=parse_integer, metavar="N", help="Attention heads, in place of the size's."),
    "num_kv_heads": Setting(parse=parse_integer, metavar="N", help="Key/value heads (grouped attention)."),
    "tie_embeddings": Setting(parse=parse_yes_or_no, metavar="yes|no", help="Head and embedding share one weight."),
}
OWN_MODEL_SETTINGS: dict[str, Setting] = {
    "model": Setting(
        parse=str, metavar="MODULE:FACTORY", help="Your own model: the function that builds it, or FILE.py:FACTORY."
    ),
    "hf": Setting(parse=str, metavar="CONFIG", help="A transformers model type or local config file."),
}
RUN_SETTINGS: dict[str, Setting] = {
    "batch": Setting(parse=parse_integer, metavar="N", help="Sequences in a step."),
    "context": Setting(parse=parse_integer, metavar="N", help="Tokens in a sequence."),
    "precision": Setting(parse=_choice("precision"), metavar=_options("precision"), help="Arithmetic of the step."),
    "mode": Setting(parse=_choice("mode"), metavar=_options("mode"), help="What a step is."),
    "attention": Setting(parse=_choice("attention"), metavar=_options("attention"), help="Attention implementation."),
    "compile": Setting(parse=parse_yes_or_no, metavar="yes|no", help="torch.compile the model; alone it means yes."),
    "checkpoint": Setting(
        parse=canonical_checkpoint, metavar="none|K|nested:K", help="Recompute activations of every K blocks."
    ),
    "optimizer": Setting(parse=_choice("optimizer"), metavar=_options("optimizer"), help="Who updates the weights."),
    "device": Setting(parse=str, metavar="auto|cpu|cuda|cuda:N", help="Where to run."),
    "seed": Setting(parse=parse_integer, metavar="N", help="Seed of weights and tokens."),
}
TIMING_SETTINGS: dict[str, Setting] = {
    "warmup": Setting(parse=parse_integer, metavar="N", help="Steps before the clock starts."),
    "steps": Setting(parse=parse_integer, metavar="N", help="Steps that are timed."),
    "memory_limit": Setting(parse=_limit, metavar="SIZE|none", help="Cap on memory, such as 24GB."),
}
WORKLOAD_SETTINGS = SHAPE_SETTINGS | OWN_MODEL_SETTINGS | RUN_SETTINGS
SETTINGS = WORKLOAD_SETTINGS | TIMING_SETTINGS

Settings = Mapping[str, Scalar | Mapping[str, Scalar] | None]


def build_case(settings: Settings) -> Case:
    """One case from flat settings, `set` being a mapping of arguments for a model of the user's own."""
    check_names(settings)
    model = _build_model(settings)
    workload = {name: settings[name] for name in RUN_SETTINGS if name in settings}
    if workload.get("context") == 0:  # in a workload it means that none was given
        require_positive("context", 0)
    if "checkpoint" in workload:
        workload["checkpoint"] = str(workload["checkpoint"])
    return Case(
        workload=_convert(workload | {"model": model}, Workload),
        timing=_convert({name: settings[name] for name in TIMING_SETTINGS if name in settings}, Timing),
    )


def _build_model(settings: Settings) -> ModelShape | Factory | HuggingFace:
    shaped = [name for name in SHAPE_SETTINGS if name in settings]
    own = [name for name in OWN_MODEL_SETTINGS if name in settings]
    arguments = settings.get("set", {})
    assert isinstance(arguments, Mapping)
    if own and (len(own) > 1 or shaped):
        other = (own[1:] or shaped)[0]
        raise SpecError(
            f"`{flag_of(own[0])}` and `{flag_of(other)}` together",
            detail="a shape belongs to the built-in model; your own takes arguments by --set",
            hint=f"{flag_of(own[0])} {settings[own[0]]} --set name=value",
        )
    if not own:
        if arguments:
            raise SpecError(
                "`--set` without a model of your own",
                detail="it gives arguments to a factory or overrides to a transformers config",
                hint="--model my_model:build --set depth=4",
            )
        return _build_shape({name: settings[name] for name in shaped})
    pairs = tuple(sorted(arguments.items()))
    if own == ["model"]:
        return _convert({"type": "factory", "target": settings["model"], "arguments": pairs}, Factory)
    return _convert({"type": "hf", "config": settings["hf"], "arguments": pairs}, HuggingFace)


def _build_shape(settings: Settings) -> ModelShape:
    fields = msgspec.structs.asdict(SIZES[_named_size(str(settings.get("size", "nano")))])
    fields |= {name: value for name, value in settings.items() if name != "size"}
    if "num_heads" in settings and "num_kv_heads" not in settings:
        fields["num_kv_heads"] = fields["num_heads"]
    return _convert(fields | {"type": "builtin"}, ModelShape)


def _convert(fields: Mapping[str, object], kind: type[T]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, SpecError):
            raise error.__cause__ from None
        raise SpecError(f"a setting of the wrong kind: {error}") from None


def check_names(settings: Iterable[str]) -> None:
    known = (*SETTINGS, "set")
    for name in settings:
        if name not in known:
            close = nearest(name, known)
            raise SpecError(
                f"unknown setting: `{name}`",
                detail=f"did you mean `{close}`?" if close else f"known: {', '.join(known)}",
                hint="stepscope bench --help",
            )
