"""What to run: the `Workload`, the named sizes, and grids of them.

The first of the three waists. People come in by flags, by TOML or from Python, and all three meet in one flat table
of settings (`SETTINGS`): a flag is a setting's name with dashes, a TOML key is the name itself, and a list of values
on any of them is an axis of a grid. So a check, a default or an error message is written once and holds for all
three.

Everything here is frozen and hashable, and free of torch: a laptop reads workloads that a GPU ran.
"""

import itertools
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

import msgspec

from stepscope.errors import StepscopeError, nearest

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Mode = Literal["inference", "forward", "forward-backward", "train"]
# `flash` is ours in whichever form is fastest on the device; the last three are those forms, by name.
Attention = Literal["naive", "sdpa", "flash", "tiled", "triton", "hopper"]
Optimizer = Literal["adamw", "adamw-torch", "adamw-fused", "sgd"]
_CHOICES: dict[str, object] = {
    "precision": Precision,
    "mode": Mode,
    "attention": Attention,
    "optimizer": Optimizer,
}
_TOO_LARGE = 2**48  # bytes, tokens or seeds; what is larger overflows somewhere below
Scalar = bool | int | float | str
T = TypeVar("T")


class SpecError(StepscopeError, ValueError):
    """A workload that cannot be. A ValueError too, for those who build workloads in Python."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _named(target: str, arguments: tuple[tuple[str, Scalar], ...]) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in arguments)
    return f"{target}({inside})" if inside else target


def _require_choice(name: str, value: str) -> None:
    """A workload made in Python passes through no parser; a word that nobody knows must not run as something else."""
    options = get_args(_CHOICES[name])
    if value not in options:
        close = nearest(str(value), options)
        raise SpecError(
            f"unknown {name}: `{value}`",
            detail=f"expected one of {', '.join(options)}",
            hint=f"did you mean `{close}`?" if close else "",
        )


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name} `{value}` is not a whole number", hint=f"{_flag(name)} 1")
    if value < 1:
        raise SpecError(f"{name} `{value}` is not positive", detail="expected 1 or more", hint=f"{_flag(name)} 1")
    if value >= _TOO_LARGE:
        raise SpecError(f"{name} `{value}` is too large", detail="no machine has room for it", hint=f"{_flag(name)} 1")


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min((*small, *(number // d for d in small)), key=lambda d: (abs(d - wanted), d))


class Checkpointing(NamedTuple):
    """Groups of `every` blocks are recomputed in backward; `nested` has the blocks of a group checkpointed again while
    the group is recomputed, so that backward holds one block's activations at a time."""

    every: int
    nested: bool


def parse_checkpoint(text: str) -> Checkpointing | None:
    """`none`, the blocks of a group (`block` is one), or `nested:` and the blocks of a group."""
    if text == "none":
        return None
    match = re.fullmatch(r"(nested:)?(-?\d+)", "1" if text == "block" else text)
    if match is None:
        close = nearest(text, ("none", "block", "nested:2"))
        raise SpecError(
            f"unknown checkpoint: `{text}`",
            detail="expected none, a number of blocks, or nested: and a number of blocks",
            hint=f"--checkpoint {close or 1}",
        )
    nested, every = match[1] is not None, int(match[2])
    if not 1 <= every < _TOO_LARGE:
        raise SpecError(
            f"checkpoint `{text}` is not a number of blocks",
            detail="expected 1 or more; none is the word for no checkpointing",
            hint="--checkpoint 1, or --checkpoint none",
        )
    if nested and every == 1:
        raise SpecError(
            f"checkpoint `{text}` nests groups of one block",
            detail="each block would be recomputed twice and nothing saved by it",
            hint="--checkpoint 1, or --checkpoint nested:2",
        )
    return Checkpointing(every, nested)


def _canonical_checkpoint(text: str) -> str:
    """One text for one setting. Groups of one stay `block`, as results files have it whose keys are made of it."""
    parsed = parse_checkpoint(text)
    if parsed is None:
        return "none"
    return "block" if parsed.every == 1 else f"{'nested:' * parsed.nested}{parsed.every}"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, tag="builtin", forbid_unknown_fields=True):
    """The shape of the built-in Transformer: pre-norm, RoPE, SwiGLU, no biases, untied head unless told otherwise."""

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int = 10_000
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "vocab"):
            _require_positive(name, getattr(self, name))
        if self.d_model % self.num_heads:
            near = _nearest_divisor(self.d_model, self.num_heads)
            raise SpecError(
                f"num_heads `{self.num_heads}` does not divide d_model `{self.d_model}`",
                detail="every head takes an equal share of the width",
                hint=f"--num-heads {near}",
            )
        if self.head_dim % 2:
            raise SpecError(
                f"the head size d_model / num_heads = `{self.head_dim}` is odd",
                detail="rotary positions turn pairs of features, so a head needs an even number of them",
                hint=f"--d-model {self.num_heads * (self.head_dim + 1)}",
            )
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_kv_heads `{self.num_kv_heads}` does not divide num_heads `{self.num_heads}`",
                detail="each key/value head serves an equal group of query heads",
                hint=f"--num-kv-heads {_nearest_divisor(self.num_heads, self.num_kv_heads)}",
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def name(self) -> str:
        """The named size this is, or its widths in a word."""
        for name, shape in SIZES.items():
            if msgspec.structs.replace(self, vocab=shape.vocab) == shape:
                return name
        grouped = "" if self.num_kv_heads == self.num_heads else f"g{self.num_kv_heads}"
        tied = "-tied" if self.tie_embeddings else ""
        return f"d{self.d_model}-f{self.d_ff}-l{self.num_layers}-h{self.num_heads}{grouped}{tied}"


class Factory(msgspec.Struct, frozen=True, kw_only=True, tag="factory", forbid_unknown_fields=True):
    """The user's own model: `package.module:function`, and the keyword arguments given with `--set`."""

    target: str
    arguments: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", self.target):
            raise SpecError(
                f"not a factory: `{self.target}`",
                detail="expected package.module:function, with the module importable from here",
                hint="--model my_model:build",
            )

    @property
    def name(self) -> str:
        return _named(self.target, self.arguments)


class HuggingFace(msgspec.Struct, frozen=True, kw_only=True, tag="hf", forbid_unknown_fields=True):
    """A `transformers` architecture with random weights: a model type or a local config, and overrides of its
    fields."""

    config: str
    arguments: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if not self.config:
            raise SpecError("an empty `--hf`", detail="expected a model type or a config file", hint="--hf gpt2")

    @property
    def name(self) -> str:
        return _named(self.config, self.arguments)


def _shape(d_model: int, d_ff: int, num_layers: int, num_heads: int) -> ModelShape:
    return ModelShape(d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads, num_kv_heads=num_heads)


SIZES: dict[str, ModelShape] = {
    "nano": _shape(128, 512, 4, 4),
    "small": _shape(768, 3072, 12, 12),
    "medium": _shape(1024, 4096, 24, 16),
    "large": _shape(1280, 5120, 36, 20),
    "xl": _shape(1600, 6400, 48, 25),
    "2.7B": _shape(2560, 10240, 32, 32),
}


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to run: a model and how to step it."""

    model: ModelShape | Factory | HuggingFace
    batch: int = 4
    context: int = 128
    precision: Precision = "fp32"
    # `inference` builds no graph; `forward` keeps it; the last two go on to gradients and to an update.
    mode: Mode = "train"
    # None leaves a user's own model as it is; the built-in model always says which one it runs.
    attention: Attention | None = None
    compile: bool = False
    checkpoint: str = "none"  # as `parse_checkpoint` reads it
    optimizer: Optimizer = "adamw"
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.attention is None and isinstance(self.model, ModelShape):
            msgspec.structs.force_setattr(self, "attention", "naive")
        for name in ("precision", "mode", "optimizer"):
            _require_choice(name, getattr(self, name))
        # A whole number is as good as its digits: TOML and Python write it so.
        msgspec.structs.force_setattr(self, "checkpoint", _canonical_checkpoint(str(self.checkpoint)))
        if self.attention is not None:
            _require_choice("attention", self.attention)
        _require_positive("batch", self.batch)
        _require_positive("context", self.context)
        if not 0 <= self.seed < _TOO_LARGE:
            raise SpecError(f"seed `{self.seed}` is out of range", detail="expected 0 to 2⁴⁸", hint="--seed 0")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise SpecError(
                f"unknown device: `{self.device}`",
                detail="expected auto, cpu, cuda or cuda:N",
                hint="stepscope doctor",
            )
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError(
                "precision `tf32` on device `cpu`",
                detail="tf32 is a mode of NVIDIA's matrix units; a CPU has none",
                hint="--precision fp32,bf16",
            )
        if self.checkpoint != "none" and self.mode in ("inference", "forward"):
            raise SpecError(
                f"checkpoint `{self.checkpoint}` with mode `{self.mode}`",
                detail="activation checkpointing saves memory for the backward pass, and this mode has none",
                hint="--checkpoint none, or --mode forward-backward",
            )

    @property
    def checkpointing(self) -> Checkpointing | None:
        return parse_checkpoint(self.checkpoint)

    @property
    def tokens(self) -> int:
        """Tokens one step works on."""
        return self.batch * self.context


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a workload is timed. Part of a case, because it changes the figures: warm-up is an axis like any other."""

    warmup: int = 5
    steps: int = 10
    memory_limit: int | None = None  # bytes

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise SpecError(f"warmup `{self.warmup}` is negative", detail="expected 0 or more", hint="--warmup 5")
        _require_positive("steps", self.steps)
        if self.memory_limit is not None:
            _require_positive("memory_limit", self.memory_limit)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a grid."""

    workload: Workload
    timing: Timing


# --- Settings: the flat names that flags and TOML share -------------------------------------------------------------


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One name a user may set. `parse` turns a flag's text into the value that TOML would have given."""

    parse: Callable[[str], Scalar | None]
    help: str
    metavar: str


def _integer(text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise SpecError(f"not a whole number: `{text}`", hint="digits only, such as 1024") from None


def _choice(name: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        _require_choice(name, text)
        return text

    return parse


def _yes_or_no(text: str) -> bool:
    if text.lower() in ("yes", "true", "on", "1"):
        return True
    if text.lower() in ("no", "false", "off", "0"):
        return False
    raise SpecError(f"neither yes nor no: `{text}`")


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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
    return "|".join(get_args(_CHOICES[name]))


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
    "vocab": Setting(parse=_integer, metavar="N", help="Vocabulary of the built-in model."),
    "d_model": Setting(parse=_integer, metavar="N", help="Width, in place of the size's."),
    "d_ff": Setting(parse=_integer, metavar="N", help="Feed-forward width, in place of the size's."),
    "num_layers": Setting(parse=_integer, metavar="N", help="Layers, in place of the size's."),
    "num_heads": Setting(parse=_integer, metavar="N", help="Attention heads, in place of the size's."),
    "num_kv_heads": Setting(parse=_integer, metavar="N", help="Key/value heads (grouped attention)."),
    "tie_embeddings": Setting(parse=_yes_or_no, metavar="yes|no", help="Head and embedding share one weight."),
}
OWN_MODEL_SETTINGS: dict[str, Setting] = {
    "model": Setting(parse=str, metavar="MODULE:FACTORY", help="Your own model: a function that builds it."),
    "hf": Setting(parse=str, metavar="CONFIG", help="A transformers model type or config file."),
}
RUN_SETTINGS: dict[str, Setting] = {
    "batch": Setting(parse=_integer, metavar="N", help="Sequences in a step."),
    "context": Setting(parse=_integer, metavar="N", help="Tokens in a sequence."),
    "precision": Setting(parse=_choice("precision"), metavar=_options("precision"), help="Arithmetic of the step."),
    "mode": Setting(parse=_choice("mode"), metavar=_options("mode"), help="What a step is."),
    "attention": Setting(parse=_choice("attention"), metavar=_options("attention"), help="Attention implementation."),
    "compile": Setting(parse=_yes_or_no, metavar="yes|no", help="torch.compile the model; alone it means yes."),
    "checkpoint": Setting(
        parse=_canonical_checkpoint, metavar="none|K|nested:K", help="Recompute activations of every K blocks."
    ),
    "optimizer": Setting(parse=_choice("optimizer"), metavar=_options("optimizer"), help="Who updates the weights."),
    "device": Setting(parse=str, metavar="auto|cpu|cuda|cuda:N", help="Where to run."),
    "seed": Setting(parse=_integer, metavar="N", help="Seed of weights and tokens."),
}
TIMING_SETTINGS: dict[str, Setting] = {
    "warmup": Setting(parse=_integer, metavar="N", help="Steps before the clock starts."),
    "steps": Setting(parse=_integer, metavar="N", help="Steps that are timed."),
    "memory_limit": Setting(parse=_limit, metavar="SIZE|none", help="Cap on memory, such as 24GB."),
}
WORKLOAD_SETTINGS = SHAPE_SETTINGS | OWN_MODEL_SETTINGS | RUN_SETTINGS
SETTINGS = WORKLOAD_SETTINGS | TIMING_SETTINGS

Settings = Mapping[str, Scalar | Mapping[str, Scalar] | None]


def build_case(settings: Settings) -> Case:
    """One case from flat settings, `set` being a mapping of arguments for a model of the user's own."""
    _check_names(settings)
    model = _build_model(settings)
    workload = {name: settings[name] for name in RUN_SETTINGS if name in settings}
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
            f"`{_flag(own[0])}` and `{_flag(other)}` together",
            detail="a shape belongs to the built-in model; your own takes arguments by --set",
            hint=f"{_flag(own[0])} {settings[own[0]]} --set name=value",
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


def _check_names(settings: Iterable[str]) -> None:
    known = (*SETTINGS, "set")
    for name in settings:
        if name not in known:
            close = nearest(name, known)
            raise SpecError(
                f"unknown setting: `{name}`",
                detail=f"did you mean `{close}`?" if close else f"known: {', '.join(known)}",
                hint="stepscope bench --help",
            )


# --- Grids ----------------------------------------------------------------------------------------------------------


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with one or more values each; the cases are their product, the first axis turning slowest."""

    axes: tuple[tuple[str, tuple[Scalar | None, ...]], ...] = ()
    arguments: tuple[tuple[str, tuple[Scalar, ...]], ...] = ()

    def cases(self) -> tuple[Case, ...]:
        """Every case once, in order; a value given twice counts once."""
        return tuple(dict.fromkeys(build_case(settings) for settings in self._points()))

    def _points(self) -> Iterator[dict[str, Scalar | Mapping[str, Scalar] | None]]:
        names = [name for name, _ in self.axes]
        arguments = [name for name, _ in self.arguments]
        for values in itertools.product(*(values for _, values in self.axes)):
            for chosen in itertools.product(*(values for _, values in self.arguments)):
                yield {
                    **dict(zip(names, values, strict=True)),
                    "set": dict(zip(arguments, chosen, strict=True)),
                }

    def override(self, other: "Grid") -> "Grid":
        """This grid with `other`'s axes in place of its own: flags over a file."""
        return Grid(
            axes=tuple((dict(self.axes) | dict(other.axes)).items()),
            arguments=tuple((dict(self.arguments) | dict(other.arguments)).items()),
        )


def grid_from_flags(flags: Mapping[str, str], arguments: Sequence[str] = ()) -> Grid:
    """A grid from flags' texts (`{"size": "small,medium"}`) and `--set` pairs (`["depth=2,4"]`)."""
    _check_names(flags)
    axes = tuple((name, tuple(_parse_flag(name, part) for part in _split(name, text))) for name, text in flags.items())
    pairs = [_parse_argument(pair) for pair in arguments]
    for name, _ in pairs:
        if [other for other, _ in pairs].count(name) > 1:
            raise SpecError(f"`--set {name}` twice", detail="several values stand in one", hint=f"--set {name}=1,2")
    return Grid(axes=axes, arguments=tuple(pairs))


def grid_from_toml(path: Path) -> Grid:
    """A grid from a file: the settings by name, a list for several values, and `[set]` for a model's arguments."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read the settings file: `{path}`", detail=error.strerror or "") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"not a TOML file: `{path}`", detail=str(error)) from None
    _check_names(fields)
    arguments = fields.pop("set", {})
    if not isinstance(arguments, dict):
        raise SpecError(f"`set` in `{path}` is not a table", hint="[set]")
    return Grid(
        axes=tuple((name, _toml_values(name, value)) for name, value in fields.items()),
        arguments=tuple((name, _as_scalars(name, value)) for name, value in arguments.items()),
    )


def _toml_values(name: str, value: object) -> tuple[Scalar | None, ...]:
    """Texts go through the flag's parser, so that `"24GB"` and unknown words mean what they mean on the command
    line."""
    values: list[Scalar | None] = []
    for item in _as_scalars(name, value):
        values += [_parse_flag(name, part) for part in _split(name, item)] if isinstance(item, str) else [item]
    return tuple(values)


def _as_scalars(name: str, value: object) -> tuple[Scalar, ...]:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if not isinstance(item, bool | int | float | str):
            raise SpecError(f"`{name}` has a value that is neither a word nor a number: `{item}`")
    if not items:
        raise SpecError(f"`{name}` has no values", detail="an axis of a grid needs at least one")
    return tuple(items)


def _split(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise SpecError(f"an empty value in `{_flag(name)} {text}`", detail="expected values separated by commas")
    return parts


def _parse_flag(name: str, text: str) -> Scalar | None:
    try:
        return SETTINGS[name].parse(text)
    except SpecError as error:
        raise SpecError(f"`{_flag(name)}`: {error.message}", detail=error.detail, hint=error.hint) from None


def _parse_argument(pair: str) -> tuple[str, tuple[Scalar, ...]]:
    name, equals, text = pair.partition("=")
    if not equals or not name.isidentifier():
        raise SpecError(f"not an argument: `--set {pair}`", detail="expected name=value", hint="--set depth=4")
    return name, tuple(_parse_scalar(part) for part in _split("set", text))


def _parse_scalar(text: str) -> Scalar:
    """JSON's reading of a number or a boolean, and a plain word otherwise."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text
