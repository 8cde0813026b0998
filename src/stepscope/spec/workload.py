"""The `Workload`: a model and how to step it, with the named sizes.

A field is declared together with its `Setting`. A new setting is a field here and the code that acts on it.
"""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec

from stepscope.errors import nearest
from stepscope.spec.backends import Attention
from stepscope.spec.settings import (
    TOO_LARGE,
    Mode,
    Optimizer,
    Precision,
    Scalar,
    Setting,
    SpecError,
    complete,
    declared,
    parse_limit,
    require_choice,
    require_positive,
)


def _named(target: str, arguments: tuple[tuple[str, Scalar], ...]) -> str:
    inside = ", ".join(f"{name}={value}" for name, value in arguments)
    return f"{target}({inside})" if inside else target


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
    if not 1 <= every < TOO_LARGE:
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


def canonical_checkpoint(text: str) -> str:
    """One text for one setting. Groups of one stay `block`, as results files have it whose keys are made of it."""
    parsed = parse_checkpoint(text)
    if parsed is None:
        return "none"
    return "block" if parsed.every == 1 else f"{'nested:' * parsed.nested}{parsed.every}"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, tag="builtin", forbid_unknown_fields=True):
    """The shape of the built-in Transformer: pre-norm, RoPE, SwiGLU, no biases, untied head unless told otherwise."""

    vocab: Annotated[int, Setting(help="Vocabulary of the built-in model.", in_title="never")] = 10_000
    d_model: Annotated[int, Setting(help="Width, in place of the size's.", label="width")]
    d_ff: Annotated[int, Setting(help="Feed-forward width, in place of the size's.", label="feed-forward")]
    num_layers: Annotated[int, Setting(help="Layers, in place of the size's.", label="layers")]
    num_heads: Annotated[int, Setting(help="Attention heads, in place of the size's.", label="heads")]
    num_kv_heads: Annotated[int, Setting(help="Key/value heads (grouped attention).", label="kv heads")]
    tie_embeddings: Annotated[bool, Setting(help="Head and embedding share one weight.")] = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_heads", "num_kv_heads", "vocab"):
            require_positive(name, getattr(self, name))
        require_positive("num_layers", self.num_layers, too_large=2**20)  # each is an entry in lists
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
    """The user's own model: `package.module:function` or `path/to/file.py:function`, and the keyword arguments given
    with `--set`."""

    target: str
    arguments: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*", self.target):
            file = self.target.rpartition(":")[0] or self.target
            meant = f"{file}FILE.py" if file.endswith("/") else f"{file.removesuffix('.py')}.py"
            is_path = "/" in file or file.endswith(".py")
            raise SpecError(
                f"not a factory: `{self.target}`",
                detail="expected package.module:function or path/to/file.py:function",
                hint="--model " + shlex.quote(f"{meant if is_path else 'my_model'}:build"),
            )

    @property
    def file(self) -> str | None:
        """The path of the Python file that holds the function; None for a module that is imported by its name."""
        place = self.target.rpartition(":")[0]
        return place if place.endswith(".py") else None

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


DEFAULT_CONTEXT = 128
OWN_OPTIMIZER: Optimizer = "adamw-torch"  # of a model that is not built in


def _defaults(model: ModelShape | Factory | HuggingFace) -> dict[str, object]:
    """Settings whose default depends on the kind of model. The textbook AdamW is part of the built-in model; others are
    measured with the optimizer that their users have."""
    match model:
        case ModelShape():
            return {"attention": "naive", "context": DEFAULT_CONTEXT, "optimizer": "adamw"}
        case Factory():
            return {}
        case HuggingFace():
            return {"optimizer": OWN_OPTIMIZER}


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to run: a model and how to step it."""

    model: ModelShape | Factory | HuggingFace
    batch: Annotated[int, Setting(help="Sequences in a step.", in_case="always", in_title="always")] = 4
    # 0 leaves it open: `DEFAULT_CONTEXT` where the model takes tokens. It stays 0 where the model takes none.
    context: Annotated[int, Setting(help="Tokens in a sequence.", absent=0, in_case="always", in_title="always")] = 0
    precision: Annotated[
        Precision,
        Setting(help="Arithmetic of the step.", baseline="fp32", phrase="{}", in_case="always", in_title="always"),
    ] = "fp32"
    # `inference` builds no graph; `forward` keeps it; the last two go on to gradients and to an update.
    mode: Annotated[
        Mode,
        Setting(help="What a step is.", phrase="{}", in_case="always", in_title="always", in_precision=False),
    ] = "train"
    # None leaves a user's own model as it is; the built-in model always says which one it runs.
    attention: Annotated[
        Attention | None,
        Setting(
            help="Attention implementation.",
            baseline="naive",
            phrase="{} attention",
            word="{}",
            in_case="always",
            in_title="always",
            is_extra=True,
        ),
    ] = None
    compile: Annotated[
        bool,
        Setting(
            help="torch.compile the model; alone it means yes.",
            baseline=False,
            phrase="compiled",
            is_extra=True,
            in_precision=False,
        ),
    ] = False
    checkpoint: Annotated[
        str,  # as `parse_checkpoint` reads it
        Setting(
            help="Recompute activations of every K blocks.",
            metavar="none|K|nested:K",
            parse=canonical_checkpoint,
            baseline="none",
            is_extra=True,
            modes=("forward-backward", "train"),
            in_precision=False,
        ),
    ] = "none"
    # A step's batch is split, not multiplied: tokens, FLOPs and the update of a step stay the same whatever the number.
    grad_accumulation: Annotated[
        int,
        Setting(
            help="Split the batch of a step into N micro-batches, whose gradients add up.",
            label="micro-batches",
            baseline=1,
            phrase="{} micro-batches",
            is_extra=True,
            modes=("train",),
            in_precision=False,
        ),
    ] = 1
    # None leaves it to a factory, which may return its own; without one, and for transformers, it is PyTorch's AdamW.
    optimizer: Annotated[
        Optimizer | None,
        Setting(
            help="Who updates the weights.",
            label="optimized by",
            baseline="adamw",
            phrase="{}",
            in_title="always",
            modes=("train",),
            in_precision=False,
        ),
    ] = None
    device: Annotated[
        str, Setting(help="Where to run.", metavar="auto|cpu|cuda|cuda:N", in_case="never", in_title="never")
    ] = "auto"
    seed: Annotated[int, Setting(help="Seed of weights and tokens.", in_title="never")] = 0

    def __post_init__(self) -> None:
        for name, value in _defaults(self.model).items():
            if getattr(self, name) in (None, 0):
                msgspec.structs.force_setattr(self, name, value)
        check_choices(self, RUN_SETTINGS)
        # A whole number is as good as its digits: TOML and Python write it so.
        msgspec.structs.force_setattr(self, "checkpoint", canonical_checkpoint(str(self.checkpoint)))
        require_positive("batch", self.batch)
        require_positive("grad_accumulation", self.grad_accumulation)
        self._check_accumulation()
        if self.context != 0 or isinstance(self.context, bool):
            require_positive("context", self.context)
        if not 0 <= self.seed < TOO_LARGE:
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

    def _check_accumulation(self) -> None:
        if self.grad_accumulation > 1 and self.mode != "train":
            raise SpecError(
                f"grad_accumulation `{self.grad_accumulation}` with mode `{self.mode}`",
                detail="micro-batches share one optimizer step, and this mode has none",
                hint="--grad-accumulation 1, or --mode train",
            )
        if self.batch % self.grad_accumulation:
            raise SpecError(
                f"batch `{self.batch}` cannot be split into `{self.grad_accumulation}` micro-batches",
                detail="every micro-batch has the same number of sequences",
                hint=f"--batch {math.ceil(self.batch / self.grad_accumulation) * self.grad_accumulation}",
            )

    @property
    def checkpointing(self) -> Checkpointing | None:
        return parse_checkpoint(self.checkpoint)

    @property
    def passes(self) -> int:
        """Forward and backward passes that make one step."""
        return self.grad_accumulation

    @property
    def micro_batch(self) -> int:
        """Sequences in one pass."""
        return self.batch // self.passes

    @property
    def tokens(self) -> int:
        """Tokens one step works on."""
        return self.batch * self.context


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a workload is timed. Part of a case, because it changes the figures: warm-up is an axis like any other."""

    steps: Annotated[
        int, Setting(help="Steps that are timed.", phrase="{} step{s}", in_title="always", in_precision=False)
    ] = 10
    warmup: Annotated[
        int,
        Setting(
            help="Steps before the clock starts.",
            label="warm-up",
            phrase="{} warm-up{s}",
            word="warm-up {}",
            in_title="always",
            in_precision=False,
        ),
    ] = 5
    memory_limit: Annotated[
        int | None,  # bytes
        Setting(
            help="Cap on memory, such as 24GB.",
            metavar="SIZE|none",
            parse=parse_limit,
            label="limit",
            kind="bytes",
            phrase="held to {}",
            word="limit {}",
            in_precision=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise SpecError(f"warmup `{self.warmup}` is negative", detail="expected 0 or more", hint="--warmup 5")
        require_positive("steps", self.steps)
        if self.memory_limit is not None:
            require_positive("memory_limit", self.memory_limit)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a grid."""

    workload: Workload
    timing: Timing


def parse_size(text: str) -> str:
    if text not in SIZES:
        close = nearest(text, SIZES)
        raise SpecError(
            f"unknown size: `{text}`",
            detail=f"expected one of {', '.join(SIZES)}" + (f"; did you mean `{close}`?" if close else ""),
            hint="stepscope bench --list",
        )
    return text


# The model has three kinds of settings, which are not fields of one struct: those that shape the built-in one, and
# those that name another.
_SIZE = Setting(parse=parse_size, metavar="NAME", help="A named size of the built-in model (see --list).")
_FACTORY = Setting(metavar="MODULE:FACTORY", help="Your own model: the function that builds it, or FILE.py:FACTORY.")
_CONFIG = Setting(metavar="CONFIG", help="A transformers model type or local config file.")
SHAPE_SETTINGS: dict[str, Setting] = {"size": complete(_SIZE, "size"), **declared(ModelShape)}
OWN_MODEL_SETTINGS: dict[str, Setting] = {"model": complete(_FACTORY, "model"), "hf": complete(_CONFIG, "hf")}
RUN_SETTINGS: dict[str, Setting] = declared(Workload)
TIMING_SETTINGS: dict[str, Setting] = declared(Timing)
SETTINGS = SHAPE_SETTINGS | OWN_MODEL_SETTINGS | RUN_SETTINGS | TIMING_SETTINGS


def check_choices(struct: msgspec.Struct, settings: Mapping[str, Setting]) -> None:
    """Words that a setting does not know raise SpecError; None, where it is allowed, is not a word."""
    for name, setting in settings.items():
        value = getattr(struct, name)
        if setting.choices and value is not None:
            require_choice(name, value, setting.choices)


def for_precisions(workload: Workload) -> Workload:
    """The workload whose precisions are compared: by themselves, in one uncompiled forward and backward pass each. What
    has no effect on that is at its default for this kind of model."""
    plain = Workload(model=workload.model)
    names = [name for name, setting in RUN_SETTINGS.items() if name == "precision" or not setting.in_precision]
    return msgspec.structs.replace(workload, **{name: getattr(plain, name) for name in names})
