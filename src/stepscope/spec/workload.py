"""`Workload`: a model and how to run a training step of it, with the named sizes.

Each field is declared together with its `Setting`. A new setting needs a field here and the code that implements it.
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
    flag_of,
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
    """Activation checkpointing. Groups of `every` blocks are recomputed in backward. With `nested`, the blocks of a
    group are checkpointed again during recomputation, so that backward holds the activations of one block at a time."""

    every: int
    nested: bool


def parse_checkpoint(text: str) -> Checkpointing | None:
    """Parse `none`, the number of blocks per group (`block` means 1), or `nested:` and a number of blocks."""
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
            f"checkpoint must be at least 1 block, got `{text}`",
            detail="use none to turn checkpointing off",
            hint="--checkpoint 1, or --checkpoint none",
        )
    if nested and every == 1:
        raise SpecError(
            f"checkpoint `{text}` has groups of a single block",
            detail="nesting them would recompute each block twice without saving memory",
            hint="--checkpoint 1, or --checkpoint nested:2",
        )
    return Checkpointing(every, nested)


def canonical_checkpoint(text: str) -> str:
    """The canonical text of a checkpoint setting. Groups of one are `block`, which the keys in results files use."""
    parsed = parse_checkpoint(text)
    if parsed is None:
        return "none"
    return "block" if parsed.every == 1 else f"{'nested:' * parsed.nested}{parsed.every}"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, tag="builtin", forbid_unknown_fields=True):
    """The shape of the built-in Transformer: pre-norm, RoPE, SwiGLU, no biases, untied output head by default."""

    vocab: Annotated[int, Setting(help="Vocabulary size of the built-in model.", in_title="never")] = 10_000
    d_model: Annotated[int, Setting(help="Model width; overrides --size.", label="d_model")]
    d_ff: Annotated[int, Setting(help="Feed-forward width; overrides --size.", label="d_ff")]
    num_layers: Annotated[int, Setting(help="Number of layers; overrides --size.", label="layers")]
    num_heads: Annotated[int, Setting(help="Number of attention heads; overrides --size.", label="heads")]
    num_kv_heads: Annotated[int, Setting(help="Number of key/value heads (grouped-query attention).", label="kv heads")]
    tie_embeddings: Annotated[bool, Setting(help="Share one weight between embedding and output head.")] = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "num_heads", "num_kv_heads", "vocab"):
            require_positive(name, getattr(self, name))
        require_positive("num_layers", self.num_layers, too_large=2**20)  # one list entry per layer
        if self.d_model % self.num_heads:
            near = _nearest_divisor(self.d_model, self.num_heads)
            raise SpecError(
                f"num_heads `{self.num_heads}` does not divide d_model `{self.d_model}`",
                detail="every head gets an equal share of d_model",
                hint=f"--num-heads {near}",
            )
        if self.head_dim % 2:
            raise SpecError(
                f"the head dimension d_model / num_heads = `{self.head_dim}` is odd",
                detail="rotary embeddings rotate pairs of features, so it must be even",
                hint=f"--d-model {self.num_heads * (self.head_dim + 1)}",
            )
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_kv_heads `{self.num_kv_heads}` does not divide num_heads `{self.num_heads}`",
                detail="every key/value head serves an equal number of query heads",
                hint=f"--num-kv-heads {_nearest_divisor(self.num_heads, self.num_kv_heads)}",
            )

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def name(self) -> str:
        """The named size with this shape, or a short name made of its dimensions."""
        for name, shape in SIZES.items():
            if msgspec.structs.replace(self, vocab=shape.vocab) == shape:
                return name
        grouped = "" if self.num_kv_heads == self.num_heads else f"g{self.num_kv_heads}"
        tied = "-tied" if self.tie_embeddings else ""
        return f"d{self.d_model}-f{self.d_ff}-l{self.num_layers}-h{self.num_heads}{grouped}{tied}"


class Factory(msgspec.Struct, frozen=True, kw_only=True, tag="factory", forbid_unknown_fields=True):
    """The user's own model: `package.module:function` or `path/to/file.py:function`, and the keyword arguments from
    `--set`."""

    target: str
    arguments: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_][\w.]*", self.target):
            file = self.target.rpartition(":")[0] or self.target
            meant = f"{file}FILE.py" if file.endswith("/") else f"{file.removesuffix('.py')}.py"
            is_path = "/" in file or file.endswith(".py")
            raise SpecError(
                f"invalid model: `{self.target}`",
                detail="expected package.module:function or path/to/file.py:function",
                hint="--model " + shlex.quote(f"{meant if is_path else 'my_model'}:build"),
            )

    @property
    def file(self) -> str | None:
        """The path of the Python file with the function; None for a module imported by name."""
        place = self.target.rpartition(":")[0]
        return place if place.endswith(".py") else None

    @property
    def name(self) -> str:
        return _named(self.target, self.arguments)


class HuggingFace(msgspec.Struct, frozen=True, kw_only=True, tag="hf", forbid_unknown_fields=True):
    """A `transformers` architecture with random weights: a model type or a local config, and overrides for its
    fields."""

    config: str
    arguments: tuple[tuple[str, Scalar], ...] = ()

    def __post_init__(self) -> None:
        if not self.config:
            raise SpecError("`--hf` is empty", detail="expected a model type or a config file", hint="--hf gpt2")

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
OWN_OPTIMIZER: Optimizer = "adamw-torch"  # for models that are not built in


# The settings that change a whole training step, and the precisions in which they can.
PRECISIONS_OF: dict[str, tuple[Precision, ...]] = {
    "fuse": ("fp32", "tf32", "bf16"),
    "merge": ("bf16",),
    "working_weights": ("bf16",),
    "graph": ("fp32", "tf32", "bf16"),
}
WHOLE_STEP = tuple(PRECISIONS_OF)
WITH_COPIES: tuple[Optimizer, ...] = ("adamw-torch", "adamw-fused", "adamw-onelaunch")  # update working weights


def _defaults(model: ModelShape | Factory | HuggingFace) -> dict[str, object]:
    """Defaults that depend on the kind of model. The built-in model comes with the textbook AdamW; other models are
    measured with the optimizer that people use."""
    match model:
        case ModelShape():
            return {"attention": "naive", "context": DEFAULT_CONTEXT, "optimizer": "adamw"}
        case Factory():
            return {}
        case HuggingFace():
            return {"optimizer": OWN_OPTIMIZER}


def _whole_step(what: str, phrase: str) -> Setting:
    """A switch that changes a whole training step."""
    return Setting(
        help=f"{what}  [default: no; without a value: yes]",
        baseline=False,
        phrase=phrase,
        is_extra=True,
        modes=("train",),
        in_precision=False,
    )


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model and how to run a training step of it."""

    model: ModelShape | Factory | HuggingFace
    batch: Annotated[int, Setting(help="Sequences per step.", in_case="always", in_title="always")] = 4
    # 0 means not given: `DEFAULT_CONTEXT` if the model takes tokens. It stays 0 for models without tokens.
    context: Annotated[int, Setting(help="Tokens per sequence.", absent=0, in_case="always", in_title="always")] = 0
    precision: Annotated[
        Precision,
        Setting(help="Precision of the step.", baseline="fp32", phrase="{}", in_case="always", in_title="always"),
    ] = "fp32"
    # `inference` builds no graph and `forward` keeps it; the last two add gradients and the optimizer step.
    mode: Annotated[
        Mode,
        Setting(help="What to run in a step.", phrase="{}", in_case="always", in_title="always", in_precision=False),
    ] = "train"
    # None keeps the attention of the user's own model; the built-in model always has a value.
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
            help="Use torch.compile.  [default: no; without a value: yes]",
            baseline=False,
            phrase="compiled",
            is_extra=True,
            in_precision=False,
        ),
    ] = False
    fuse: Annotated[
        bool,
        _whole_step(
            "Replace attention, norms, activations and RoPE in the traced model by stepscope's kernels.",
            "fused kernels",
        ),
    ] = False
    merge: Annotated[
        bool, _whole_step("Merge GEMMs that have the same input: q, k, v, and gate, up.", "merged GEMMs")
    ] = False
    working_weights: Annotated[
        bool,
        _whole_step(
            "Keep bf16 copies of the weights, which the optimizer updates: no casts in a step.", "working weights"
        ),
    ] = False
    graph: Annotated[bool, _whole_step("Capture the step in CUDA graphs and replay them.", "CUDA graphs")] = False
    checkpoint: Annotated[
        str,  # as `parse_checkpoint` reads it
        Setting(
            help="Activation checkpointing: recompute every K blocks in backward.",
            metavar="none|K|nested:K",
            parse=canonical_checkpoint,
            baseline="none",
            is_extra=True,
            modes=("forward-backward", "train"),
            in_precision=False,
        ),
    ] = "none"
    # The batch is split, not multiplied: tokens, FLOPs and the update of a step do not depend on the number.
    grad_accumulation: Annotated[
        int,
        Setting(
            help="Split the batch into N micro-batches and accumulate their gradients.",
            label="micro-batches",
            baseline=1,
            phrase="{} micro-batches",
            is_extra=True,
            modes=("train",),
            in_precision=False,
        ),
    ] = 1
    # None leaves the choice to the factory, which may return one. The default there, and for transformers, is PyTorch's
    # AdamW.
    optimizer: Annotated[
        Optimizer | None,
        Setting(
            help="Optimizer.",
            baseline="adamw",
            phrase="{}",
            in_title="always",
            modes=("train",),
            in_precision=False,
        ),
    ] = None
    device: Annotated[
        str, Setting(help="Device to run on.", metavar="auto|cpu|cuda|cuda:N", in_case="never", in_title="never")
    ] = "auto"
    seed: Annotated[int, Setting(help="Random seed for weights and tokens.  [default: 0]", in_title="never")] = 0

    def __post_init__(self) -> None:
        for name, value in _defaults(self.model).items():
            if getattr(self, name) in (None, 0):
                msgspec.structs.force_setattr(self, name, value)
        check_choices(self, RUN_SETTINGS)
        # TOML and Python may give an integer.
        msgspec.structs.force_setattr(self, "checkpoint", canonical_checkpoint(str(self.checkpoint)))
        require_positive("batch", self.batch)
        require_positive("grad_accumulation", self.grad_accumulation)
        self._check_accumulation()
        self._check_whole_step()
        if self.context != 0 or isinstance(self.context, bool):
            require_positive("context", self.context)
        if not 0 <= self.seed < TOO_LARGE:
            raise SpecError(f"seed `{self.seed}` is out of range", detail="expected 0 to 2⁴⁸ - 1", hint="--seed 0")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise SpecError(
                f"unknown device: `{self.device}`",
                detail="expected auto, cpu, cuda or cuda:N",
                hint="stepscope doctor",
            )
        if self.precision == "tf32" and self.device == "cpu":
            raise SpecError(
                "precision `tf32` is unsupported on device `cpu`",
                detail="tf32 is a mode of NVIDIA tensor cores",
                hint="--precision fp32,bf16",
            )
        if self.checkpoint != "none" and self.mode in ("inference", "forward"):
            raise SpecError(
                f"checkpoint `{self.checkpoint}` cannot be used with mode `{self.mode}`",
                detail="activation checkpointing saves memory in the backward pass, which this mode does not run",
                hint="--checkpoint none, or --mode forward-backward",
            )

    def _check_accumulation(self) -> None:
        if self.grad_accumulation > 1 and self.mode != "train":
            raise SpecError(
                f"grad_accumulation `{self.grad_accumulation}` cannot be used with mode `{self.mode}`",
                detail="micro-batches share one optimizer step, which this mode does not run",
                hint="--grad-accumulation 1, or --mode train",
            )
        if self.batch % self.grad_accumulation:
            raise SpecError(
                f"batch `{self.batch}` cannot be split into `{self.grad_accumulation}` micro-batches",
                detail="all micro-batches must have the same number of sequences",
                hint=f"--batch {math.ceil(self.batch / self.grad_accumulation) * self.grad_accumulation}",
            )

    def _check_whole_step(self) -> None:
        asked = [name for name in WHOLE_STEP if getattr(self, name)]
        if asked and self.mode != "train":
            raise SpecError(
                f"{asked[0]} cannot be used with mode `{self.mode}`",
                detail="it changes a whole training step, which this mode does not run",
                hint=f"{flag_of(asked[0])} no, or --mode train",
            )
        for name in asked:
            allowed = PRECISIONS_OF[name]
            if self.precision not in allowed:
                raise SpecError(
                    f"{name} cannot be used with precision `{self.precision}`",
                    detail="the loss scale of fp16 is decided on the CPU, which waits for the GPU"
                    if self.precision == "fp16"
                    else f"the copies of the weights are in bf16, and precision `{self.precision}` casts no weights",
                    hint=f"--precision bf16, or {flag_of(name)} no",
                )
        if self.working_weights and self.optimizer not in (None, *WITH_COPIES):
            raise SpecError(
                f"working_weights cannot be used with optimizer `{self.optimizer}`",
                detail=f"only AdamW updates the copies; expected one of {', '.join(WITH_COPIES)}",
                hint="--optimizer adamw-onelaunch",
            )
        if self.merge and not self.working_weights:
            raise SpecError(
                "merge requires working_weights",
                detail="the copies of the weights are stored so that one GEMM can read several of them",
                hint="--merge --working-weights",
            )

    @property
    def is_program(self) -> bool:
        """Whether a step is a program of `stepscope.fast`: traced, rewritten or captured as a whole."""
        return any(getattr(self, name) for name in WHOLE_STEP)

    @property
    def is_traced(self) -> bool:
        """Whether a step runs code that was traced from its modules, which then do not run."""
        return self.compile or any(getattr(self, name) for name in WHOLE_STEP if name != "graph")

    @property
    def hides_modules(self) -> bool:
        """Whether a recorder cannot see modules in a step, because it runs traced code or CUDA graphs."""
        return self.is_traced or self.graph

    @property
    def checkpointing(self) -> Checkpointing | None:
        return parse_checkpoint(self.checkpoint)

    @property
    def passes(self) -> int:
        """Forward and backward passes per step."""
        return self.grad_accumulation

    @property
    def micro_batch(self) -> int:
        """Sequences per pass."""
        return self.batch // self.passes

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a workload is timed. This is part of a case because it changes the results, so warm-up steps can be an
    axis."""

    steps: Annotated[int, Setting(help="Timed steps.", phrase="{} step{s}", in_title="always", in_precision=False)] = 10
    warmup: Annotated[
        int,
        Setting(
            help="Warm-up steps before timing starts.",
            label="warm-up",
            phrase="{} warm-up step{s}",
            word="warm-up {}",
            in_title="always",
            in_precision=False,
        ),
    ] = 5
    memory_limit: Annotated[
        int | None,  # bytes
        Setting(
            help="Memory limit, such as 24GB.",
            metavar="SIZE|none",
            parse=parse_limit,
            label="memory limit",
            kind="bytes",
            phrase="memory limit {}",
            word="limit {}",
            in_precision=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise SpecError(f"warmup must be at least 0, got `{self.warmup}`", hint="--warmup 5")
        require_positive("steps", self.steps)
        if self.memory_limit is not None:
            require_positive("memory_limit", self.memory_limit)


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a grid: a workload and how it is timed."""

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


# The model settings are not fields of one struct: some shape the built-in model, and the others name another model.
_SIZE = Setting(
    parse=parse_size, metavar="NAME", help="Named size of the built-in model; `stepscope bench --list` lists all sizes."
)
_FACTORY = Setting(
    metavar="MODULE:FACTORY", help="Your own model: a factory function, in a module or as FILE.py:FACTORY."
)
_CONFIG = Setting(metavar="CONFIG", help="A transformers model type, or a local config file.")
SHAPE_SETTINGS: dict[str, Setting] = {"size": complete(_SIZE, "size"), **declared(ModelShape)}
OWN_MODEL_SETTINGS: dict[str, Setting] = {"model": complete(_FACTORY, "model"), "hf": complete(_CONFIG, "hf")}
RUN_SETTINGS: dict[str, Setting] = declared(Workload)
TIMING_SETTINGS: dict[str, Setting] = declared(Timing)


def check_choices(struct: msgspec.Struct, settings: Mapping[str, Setting]) -> None:
    """Raise SpecError for unknown choices. None is allowed."""
    for name, setting in settings.items():
        value = getattr(struct, name)
        if setting.choices and value is not None:
            require_choice(name, value, setting.choices)


def with_precision(workload: Workload, precision: Precision) -> Workload:
    """The workload in another precision, without the settings that it does not support."""
    dropped = {name: False for name, allowed in PRECISIONS_OF.items() if precision not in allowed}
    return msgspec.structs.replace(workload, precision=precision, **dropped)


def for_precisions(workload: Workload) -> Workload:
    """The workload for comparing precisions: one forward and backward pass each, without compilation. Settings that
    have no effect there are reset to the defaults for this kind of model."""
    plain = Workload(model=workload.model)
    names = [name for name, setting in RUN_SETTINGS.items() if name == "precision" or not setting.in_precision]
    return msgspec.structs.replace(workload, **{name: getattr(plain, name) for name in names})
