"""What somebody says of a model: the sizes that evidence is held against.

A claim is a TOML or JSON file with any of the fields below, or the `config.json` of a published model. It is read
strictly: a key that nobody knows is an error, because a claim that was half understood would be half checked. What is
not claimed is not checked, and said not to be.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from stepscope.cost import DecoderShape, decoder_parameters
from stepscope.errors import StepscopeError, nearest
from stepscope.files import open_plain
from stepscope.recover.shape import SIZES, RunShape

Dtype = Literal["fp32", "tf32", "fp16", "bf16"]
_FLAGS = ("gated", "tied")
_LARGEST_SIZE = 1 << 40
_LARGEST_BYTES = 1 << 20
FIELDS = (*SIZES, "dtype", *_FLAGS, "parameters")
_FORM = f"{', '.join(FIELDS)}; or a config.json of transformers"
_NAMES_OF_OTHERS = {
    "n_layers": "num_layers",
    "n_layer": "num_layers",
    "layers": "num_layers",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "n_head": "num_heads",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "d_head",
    "intermediate_size": "d_ff",
    "vocab": "vocab_size",
    "batch_size": "batch",
    "seq_len": "context",
    "context_length": "context",
    "params": "parameters",
}


class Claim(RunShape, frozen=True, kw_only=True):
    """None is what was not claimed. `implied` are fields that follow from others by the form's defaults."""

    dtype: Dtype | None = None
    gated: bool | None = None
    tied: bool | None = None
    parameters: int | None = None
    model_type: str | None = None  # of a transformers config
    implied: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, int | str | bool]:
        """What was claimed, by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @property
    def fewest_parameters(self) -> int | None:
        """Of the matrices alone, with one table for the embedding and the head."""
        sizes = (self.num_layers, self.d_model, self.num_heads, self.num_kv_heads, self.d_head, self.d_ff)
        layers, width, heads, kv_heads, head, hidden = (size or 0 for size in sizes)
        if None in sizes or self.vocab_size is None:
            return None
        shape = DecoderShape(
            num_layers=layers,
            d_model=width,
            query_width=heads * head,
            key_width=kv_heads * head,
            d_ff=hidden,
            vocab_size=self.vocab_size,
            is_gated=bool(self.gated),
            is_tied=self.tied is not False,
        )
        return sum(decoder_parameters(shape).values())


def read_claim(path: Path, *, batch: int | None = None, context: int | None = None, dtype: str | None = None) -> Claim:
    """The claim in a file, with what flags add to it."""
    plain = _load(path)
    is_config = "model_type" in plain or "architectures" in plain
    fields = _from_config(plain, path) if is_config else dict(plain)
    for name, value in (("batch", batch), ("context", context), ("dtype", dtype)):
        if value is None:
            continue
        if fields.get(name, value) != value:
            raise StepscopeError(
                f"the claim and `--{name}` disagree: `{fields[name]}` and `{value}`", hint=f"leave out --{name}"
            )
        fields[name] = value
    return make_claim(fields, path)


def make_claim(fields: Mapping[str, Any], path: Path = Path("the claim")) -> Claim:
    """Raises StepscopeError for what is no claim or cannot be true of any model."""
    for name, value in fields.items():
        _check(name, value, path)
    sizes = dict(fields)
    implied: list[str] = []
    if "num_kv_heads" not in sizes and "num_heads" in sizes:
        sizes["num_kv_heads"] = sizes["num_heads"]
        implied.append("num_kv_heads")
    if "d_head" not in sizes and "d_model" in sizes and "num_heads" in sizes:
        if sizes["d_model"] % sizes["num_heads"]:
            raise StepscopeError(
                f"d_model `{sizes['d_model']}` does not divide into `{sizes['num_heads']}` heads",
                detail="expected a d_head in the claim where it is not d_model / num_heads",
            )
        sizes["d_head"] = sizes["d_model"] // sizes["num_heads"]
        implied.append("d_head")
    claim = Claim(**sizes, implied=tuple(implied))
    _check_together(claim)
    return claim


def _check(name: str, value: object, path: Path) -> None:
    if name == "model_type":
        return
    if name not in FIELDS:
        meant = _NAMES_OF_OTHERS.get(name) or nearest(name, FIELDS)
        raise StepscopeError(
            f"`{path}` claims `{name[:60]}`, which is no field of a claim",
            detail=f"did you mean {meant}?" if meant else f"expected {_FORM}",
        )
    if name == "dtype":
        if value not in get_args(Dtype):
            raise StepscopeError(f"dtype `{str(value)[:60]}` is none of {', '.join(get_args(Dtype))}")
    elif name in _FLAGS:
        if not isinstance(value, bool):
            raise StepscopeError(f"{name} is true or false, not `{str(value)[:60]}`")
    elif not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST_SIZE:
        raise StepscopeError(f"{name} `{str(value)[:60]}` is no size", detail="expected a whole number above 0")


def _check_together(claim: Claim) -> None:
    if not claim.fields:
        raise StepscopeError("the claim claims nothing", detail=f"expected some of {_FORM}")
    heads, kv_heads = claim.num_heads, claim.num_kv_heads
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise StepscopeError(
            f"num_kv_heads `{kv_heads}` does not divide num_heads `{heads}`",
            detail="every key-value head serves the same number of heads",
        )
    fewest = claim.fewest_parameters
    if claim.parameters is not None and fewest is not None and claim.parameters < fewest:
        raise StepscopeError(
            f"the claim contradicts itself: `{claim.parameters:,}` parameters",
            detail=f"the matrices that it claims have {fewest:,} alone",
        )


def _load(path: Path) -> dict[str, Any]:
    with open_plain(path, what="a claim") as (file, _):
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise StepscopeError(f"not a claim: `{path}`", detail=f"it is larger than {_LARGEST_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
        plain = _load_json(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise StepscopeError(
            f"not a claim: `{path}`",
            detail=f"neither TOML nor JSON: {str(error)[:160]}",
            hint="stepscope verify --help",
        ) from None
    return plain


def _load_json(text: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError("a key stands twice")
        return dict(pairs)

    plain = json.loads(text, object_pairs_hook=once)
    assert isinstance(plain, dict), "what begins with a brace is an object"
    return plain


def _from_config(plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a transformers config. How weights are stored says nothing of how a run computes: no dtype."""
    model_type = plain.get("model_type")
    reader = _CONFIGS.get(str(model_type))
    if reader is None:
        raise StepscopeError(
            f"the config `{path}` is of a `{str(model_type)[:60]}`, which is not known here",
            detail=f"known are {', '.join(_CONFIGS)}; or write the sizes into a claim: {_FORM}",
        )
    try:
        fields = reader(plain)
    except KeyError as error:
        raise StepscopeError(f"the config `{path}` has no `{error.args[0]}`") from None
    known = {name: value for name, value in fields.items() if value is not None}
    return {**known, "model_type": str(model_type)}


def _gpt2(plain: Mapping[str, Any]) -> dict[str, Any]:
    inner = plain.get("n_inner")
    width = plain["n_embd"]
    return {
        "num_layers": plain["n_layer"],
        "d_model": width,
        "num_heads": plain["n_head"],
        "d_ff": 4 * width if inner is None and isinstance(width, int) else inner,
        "vocab_size": plain["vocab_size"],
        "gated": False,
        "tied": plain.get("tie_word_embeddings", True),
    }


def _plain_decoder(plain: Mapping[str, Any], *, gated: bool, head: int | None = None) -> dict[str, Any]:
    return {
        "num_layers": plain["num_hidden_layers"],
        "d_model": plain["hidden_size"],
        "num_heads": plain["num_attention_heads"],
        "num_kv_heads": plain.get("num_key_value_heads"),
        "d_head": plain.get("head_dim") or head,
        "d_ff": plain["intermediate_size"],
        "vocab_size": plain["vocab_size"],
        "gated": gated,
        "tied": plain.get("tie_word_embeddings", False),
    }


def _gated_decoder(plain: Mapping[str, Any]) -> dict[str, Any]:
    return _plain_decoder(plain, gated=True)


_CONFIGS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _gated_decoder,
    "mistral": _gated_decoder,
    "qwen2": _gated_decoder,
    "qwen3": lambda plain: _plain_decoder(plain, gated=True, head=128),
    "gpt_neox": lambda plain: _plain_decoder(plain, gated=False),
}
