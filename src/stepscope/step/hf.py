"""A text, image, video or audio model from `transformers`, with random weights and without network access.

`--hf gpt2` uses the default config of a model type, and `--hf path/to/config.json` a file; `--set` overrides fields.
The head, and with it the loss, is the one in the config's `architectures`, or else the first of `_HEADS` that
`transformers` has for it. The input follows from the model's `main_input_name` (`_INPUTS`). No model is special-cased.

`transformers` is an optional extra and is imported only here.
"""

import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from stepscope.errors import StepscopeError, nearest
from stepscope.files import read_plain
from stepscope.spec import DEFAULT_CONTEXT, Attention, HuggingFace, Workload
from stepscope.step.own import Parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Labels = Literal["next", "masked", "target", "class", "transcript"]

AUDIO_S = 10  # seconds of audio, for models that take any length
SAMPLES_PER_S, FRAMES_PER_S = 16_000, 100
TRANSCRIPT = 32  # labels per audio sample: few enough to align with AUDIO_S under any usual subsampling
IMAGE_SIZE = 224  # for models that take any size
CHARACTERS = 256  # for models that read characters and have no vocabulary
MASK_EVERY = 7  # about 15%, as usual for masked language models


_USE_FACTORY = "--model my_model.py:build, with a function that returns the model, its input and its loss"


class _Head(NamedTuple):
    """A kind of model in `transformers`: the suffixes of `AutoModelFor…` and `MODEL_FOR_…_MAPPING`, the labels of its
    loss, and whether a decoder reads the output of an encoder."""

    auto: str
    mapping: str
    labels: Labels
    has_decoder: bool = False


_HEADS = (
    _Head("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "target", has_decoder=True),
    _Head("SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", "target", has_decoder=True),
    _Head("MaskedLM", "MASKED_LM", "masked"),
    _Head("CausalLM", "CAUSAL_LM", "next"),
    _Head("ImageClassification", "IMAGE_CLASSIFICATION", "class"),
    _Head("VideoClassification", "VIDEO_CLASSIFICATION", "class"),
    _Head("CTC", "CTC", "transcript"),
    _Head("AudioClassification", "AUDIO_CLASSIFICATION", "class"),
    _Head("SequenceClassification", "SEQUENCE_CLASSIFICATION", "class"),
)


class _Model(NamedTuple):
    """A config and the head chosen for it, before any weights exist."""

    config: "PretrainedConfig"
    head: _Head
    kind: Any  # the class
    input_name: str

    @property
    def takes_context(self) -> bool:
        """Whether a step has tokens, in its input or in the labels of a decoder."""
        return self.input_name == "input_ids" or self.head.labels == "target"

    def takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.kind.forward).parameters


def build_hf(workload: Workload, spec: HuggingFace) -> Parts:
    model = _choose_model(spec)
    context = _check_context(model, workload, spec)
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32}
    if workload.attention is not None:
        options["attn_implementation"] = _attention_name(workload.attention)
    model.config.architectures = [model.kind.__name__]  # some configs have several classes for a head and name none
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # some models take no such argument, and a checkpoint would fill the cache twice
    try:
        module = getattr(transformers, f"AutoModelFor{model.head.auto}").from_config(model.config, **options)
    except (ValueError, AssertionError) as error:
        said = str(error).partition("\n")[0][:200] or type(error).__name__
        change = "change its config with --set FIELD=VALUE, or choose another --attention"
        raise StepscopeError(
            f"transformers cannot build {model.kind.__name__} for `{spec.name}`",
            detail=said,
            hint="--set pad_token_id=0" if said.startswith("Padding_idx") else change,
        ) from None
    if workload.is_program and isinstance(getattr(type(module), "loss_function", None), property):
        module.loss_function = module.loss_function  # found once: the search logs, which would end a traced graph
    inputs = _make_inputs(model, batch=workload.micro_batch, context=context, with_labels=workload.mode != "inference")
    return Parts(
        module=module,
        inputs=(inputs,) * workload.passes,
        call=lambda run, batch: _feed(run, batch, model, spec),
        loss=_loss_of,
        has_tokens=model.takes_context,
    )


def check_config(workload: Workload, spec: HuggingFace) -> tuple[str, bool]:
    """Raise StepscopeError, before anything runs, for a config that cannot be built. Returns a digest of the config
    with its head, and whether the model takes a context."""
    model = _choose_model(spec)
    if workload.context:
        _check_context(model, workload, spec)
    content = model.config.to_json_string(use_diff=False)
    # Early versions supported only this head, and the keys of their rows must not change.
    content += "" if model.head.labels == "next" else model.kind.__name__
    return hashlib.sha256(content.encode()).hexdigest()[:16], model.takes_context


def _attention_name(attention: Attention) -> str:
    """The transformers name of an attention implementation. Their `eager` corresponds to `naive`."""
    if attention in ("naive", "sdpa"):
        return "eager" if attention == "naive" else attention
    from stepscope.kernels.attention.transformers import register

    return register("auto" if attention == "flash" else attention)


# --- The config -------------------------------------------------------------------------------------------------------


def load_config(spec: HuggingFace) -> "PretrainedConfig":
    """Load the config and apply the overrides. An unknown field is an error instead of a new attribute."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ModuleNotFoundError:
        raise StepscopeError(
            "`--hf` requires transformers, which is not installed", hint="pip install 'stepscope[hf]'"
        ) from None
    path = Path(spec.config).expanduser()
    if path.exists():
        fields = _read_config(path / "config.json" if path.is_dir() else path)
    else:
        fields = {"model_type": spec.config}
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise _unknown_config(spec, str(kind), path, CONFIG_MAPPING)
    _check_names(AutoConfig.for_model(kind, **fields), spec)
    # Built with the overrides applied, because some fields are derived from others, like the head dimension.
    return AutoConfig.for_model(kind, **fields | dict(spec.arguments))


def _unknown_config(spec: HuggingFace, kind: str, path: Path, known: Mapping[str, object]) -> StepscopeError:
    """The error for a missing file, the name of a model on the Hugging Face Hub, or an unknown word."""
    if path.exists():
        return StepscopeError(
            f"unknown model type `{kind}` in `{spec.config}`",
            detail="the installed version of transformers does not have it",
            hint="pip install --upgrade transformers",
        )
    owner, slash, name = spec.config.partition("/")
    family = re.split(r"[^a-z]", name.lower())[0] if slash else ""
    is_file = spec.config.startswith(("/", ".", "~")) or "/" in name or path.suffix == ".json" or Path(owner).is_dir()
    if slash and name and not is_file:
        local = f"hf download {spec.config} config.json --local-dir {name}  # then: --hf {name}"
        return StepscopeError(
            f"`{spec.config}` looks like a model on the Hugging Face Hub, and stepscope downloads nothing",
            detail="--hf takes a model type or a local config; weights are random",
            hint=f"--hf {family} --set num_hidden_layers=4, or {local}" if family in known else local,
        )
    if slash or path.suffix:
        where = "" if path.is_absolute() else f"; looked in {Path.cwd()}"
        return StepscopeError(
            f"file not found: `{spec.config}`",
            detail=f"expected a transformers model type, a config.json, or a directory that contains one{where}",
            hint="--hf path/to/config.json, or --hf llama",
        )
    close = nearest(kind, known)
    return StepscopeError(
        f"unknown config file or transformers model type: `{spec.config}`",
        detail=f"did you mean `{close}`?" if close else "stepscope does not download weights or configs",
        hint=f"--hf {close or 'llama'}",
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_plain(path))  # transformers writes `Infinity`, which msgspec refuses
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StepscopeError(f"not a transformers config: `{path}`", detail=reason or "", hint="--hf gpt2") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise StepscopeError(f"not a transformers config: `{path}`", detail="it has no `model_type`", hint="--hf gpt2")
    return fields


def _check_names(config: "PretrainedConfig", spec: HuggingFace) -> None:
    for name, value in spec.arguments:
        if not hasattr(config, name):
            close = nearest(name, config.to_dict())
            raise StepscopeError(
                f"the config of `{spec.config}` has no field `{name}`",
                detail=f"did you mean `{close}`?" if close else f"expected a field of {type(config).__name__}",
                hint=f"--set {close}={value}" if close else f"remove --set {name}",
            )


# --- The head ---------------------------------------------------------------------------------------------------------


def _choose_model(spec: HuggingFace) -> _Model:
    config = load_config(spec)
    heads = list(_list_heads(config))
    named = [(head, kind) for head, kind in heads if kind.__name__ in (config.architectures or ())]
    fitting = [
        (head, kind)
        for head, kind in heads
        if head.has_decoder == bool(getattr(config, "is_encoder_decoder", False))
        and not (head.labels == "masked" and getattr(config, "is_decoder", False))
    ]
    for head, kind in named or fitting:
        takes = inspect.signature(kind.forward).parameters
        names = [name for name in (kind.main_input_name, "input_ids") if name in takes and name in _INPUTS]
        if names and "labels" in takes:
            if head.has_decoder:
                _complete_decoder(config, spec)
            return _Model(config, head, kind, names[0])
    raise _no_head(config, spec)


def _list_heads(config: "PretrainedConfig") -> Iterator[tuple[_Head, Any]]:
    from transformers.models.auto import modeling_auto

    for head in _HEADS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{head.mapping}_MAPPING")
        if type(config) in mapping:
            found = mapping[type(config)]
            yield from ((head, kind) for kind in (found if isinstance(found, list | tuple) else (found,)))


def _complete_decoder(config: "PretrainedConfig", spec: HuggingFace) -> None:
    """Set the start and padding tokens of a decoder, which reads the labels shifted by one."""
    vocab = _vocabulary(config)
    for name in ("pad_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if value is None:
            setattr(config, name, 0)
        elif value >= vocab:
            raise StepscopeError(
                f"`{name}` {value} of `{spec.name}` is outside its vocabulary of {vocab}", hint=f"--set {name}=0"
            )


def _no_head(config: "PretrainedConfig", spec: HuggingFace) -> StepscopeError:
    return StepscopeError(
        f"`{spec.config}` cannot run from its config alone",
        detail=f"transformers has no head for {type(config).__name__} that computes a loss from generated inputs: "
        "text, images, video or audio, with tokens or a class as labels",
        hint=_USE_FACTORY,
    )


# --- The inputs -------------------------------------------------------------------------------------------------------


def _check_context(model: _Model, workload: Workload, spec: HuggingFace) -> int:
    """The context, after checking that the model supports it. Beyond its learned positions, a CPU would raise an
    IndexError and a GPU a device-side assertion."""
    if not model.takes_context:
        if workload.context:
            raise StepscopeError(
                f"`{spec.config}` does not support `--context`",
                detail=f"the input of {model.kind.__name__} is `{model.input_name}`, which has no tokens",
                hint="remove --context",
            )
        return 0
    context = workload.context or DEFAULT_CONTEXT
    text = model.config.get_text_config(decoder=model.head.has_decoder)
    for name in ("max_position_embeddings", "max_target_positions"):
        longest = getattr(text, name, None)
        if isinstance(longest, int) and 0 < longest < context:
            raise StepscopeError(
                f"context `{context}` exceeds the model's `{longest}` positions",
                hint=f"--context {longest}, or --set {name}={context}",
            )
    return context


def _make_inputs(model: _Model, *, batch: int, context: int, with_labels: bool) -> dict[str, Any]:
    inputs: dict[str, Any] = {model.input_name: _INPUTS[model.input_name](model.config, batch, context)}
    labels = _make_labels(model, inputs[model.input_name], context)
    if with_labels:
        inputs["labels"] = labels
    elif model.head.has_decoder:
        inputs["decoder_input_ids"] = labels
    if model.takes("use_cache"):
        inputs["use_cache"] = False
    return inputs


def _make_labels(model: _Model, given: Tensor, context: int) -> Tensor:
    batch = given.shape[0]
    match model.head.labels:
        case "next":
            return given
        case "masked":
            skipped = torch.arange(given.shape[1], device=given.device) % MASK_EVERY != 0
            return given.masked_fill(skipped, -100)  # ignored by PyTorch's cross entropy
        case "target":
            return torch.randint(_vocabulary(model.config), (batch, context))
        case "class":
            classes = model.config.num_labels or 1
            return torch.randint(classes, (batch,)) if classes > 1 else torch.randn(batch)  # one class means regression
        case "transcript":  # 0 is the blank
            return torch.randint(1, max(2, _vocabulary(model.config)), (batch, TRANSCRIPT))


def _vocabulary(config: "PretrainedConfig") -> int:
    return getattr(config.get_text_config(decoder=True), "vocab_size", None) or CHARACTERS


def _tokens(config: "PretrainedConfig", batch: int, context: int) -> Tensor:
    size = getattr(config.get_text_config(), "vocab_size", None) or CHARACTERS
    return torch.randint(size, (batch, context))


def _images(config: "PretrainedConfig", batch: int, _context: int) -> Tensor:
    """Images, or videos if the config has a number of frames."""
    size = _find(config, "image_size", "crop_size") or IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _find(config, "num_frames", "frames_per_clip")
    channels = _find(config, "num_channels", "in_chans") or 3
    return torch.randn(batch, *((frames,) if frames else ()), channels, height, width)


def _audio(config: "PretrainedConfig", batch: int, _context: int) -> Tensor:
    """Waveforms, or spectra if the config has a number of mel bins."""
    bins = _find(config, "num_mel_bins")
    if bins and not hasattr(config, "conv_stride"):
        return torch.randn(batch, _find(config, "max_length") or AUDIO_S * FRAMES_PER_S, bins)
    return torch.randn(batch, AUDIO_S * SAMPLES_PER_S)


def _spectra(config: "PretrainedConfig", batch: int, _context: int) -> Tensor:
    """Spectra as frames × bins, or as bins × frames if the encoder has learned positions. Such an encoder always takes
    all positions, with two frames each."""
    bins, positions = _find(config, "num_mel_bins"), _find(config, "max_source_positions")
    if bins and positions:
        return torch.randn(batch, bins, 2 * positions)
    bins = bins or _find(config, "feature_projection_input_dim")
    bins = bins or math.prod(_find(config, name) or 1 for name in ("input_feat_per_channel", "input_channels"))
    return torch.randn(batch, AUDIO_S * FRAMES_PER_S, bins)


# The function that creates each kind of input, by the name of the model's argument.
_INPUTS: dict[str, Callable[["PretrainedConfig", int, int], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "input_values": _audio,
    "input_features": _spectra,
}


def _find(config: "PretrainedConfig", *names: str) -> Any:
    """The first of these fields in the config, or in the config of its encoder; None if there is none."""
    inside = [getattr(config, f"{part}_config", None) for part in ("vision", "audio", "encoder")]
    for one in (config, *inside):
        for name in names:
            if getattr(one, name, None) is not None:
                return getattr(one, name)
    return None


def _feed(run: Callable[..., object], inputs: Mapping[str, Any], model: _Model, spec: HuggingFace) -> object:
    if torch.compiler.is_compiling():  # a traced `try` would end the graph
        return run(**inputs)
    try:
        return run(**inputs)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        made = ", ".join(f"{name} {tuple(one.shape)}" for name, one in inputs.items() if isinstance(one, Tensor))
        raise StepscopeError(
            f"{model.kind.__name__} of `{spec.name}` failed on {made}",
            detail=f"{type(error).__name__}: {error}".splitlines()[0][:200],
            hint=_USE_FACTORY,
        ) from error


def _loss_of(output: object, _inputs: object) -> Tensor:
    loss = getattr(output, "loss", None)
    assert isinstance(loss, Tensor), "a model that gets labels returns its loss"
    return loss
