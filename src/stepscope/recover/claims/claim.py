"""Claims: the sizes of a model that evidence is compared with.

A claim is a TOML or JSON file with any of the fields below, the `config.json` of a published model, or what
`stepscope recover --format json` printed, of which the certain fields are claimed. It is read strictly: an unknown key
is an error, because a claim that is only partly understood would only partly be checked. Fields that are not claimed
are not checked, and the result says so.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from stepscope.cost import DecoderShape, decoder_parameters
from stepscope.errors import StepscopeError, nearest
from stepscope.files import open_plain
from stepscope.recover.shape import SIZES, RunShape

Dtype = Literal["fp32", "tf32", "fp16", "bf16"]
_FLAGS = ("gated", "tied")
_LARGEST_SIZE = 1 << 40
_LARGEST_BYTES = 1 << 20
FIELDS = (*SIZES, "dtype", *_FLAGS, "parameters")
_FORM = f"{', '.join(FIELDS)}; or a transformers config.json"
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
    """A field that is not claimed is None. `implied` are fields that nobody wrote down as a claim: those that were
    derived from others by default, and tied in a config."""

    dtype: Dtype | None = None
    gated: bool | None = None
    tied: bool | None = None
    parameters: int | None = None
    model_type: str | None = None  # from a transformers config
    implied: tuple[str, ...] = ()

    @property
    def fields(self) -> dict[str, int | str | bool]:
        """The claimed fields by name."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    @property
    def fewest_parameters(self) -> int | None:
        """The parameters of the matrices only, with the LM head tied to the embedding unless claimed otherwise."""
        return self.count_matrices(is_tied=self.tied is not False)

    def count_matrices(self, *, is_tied: bool) -> int | None:
        shape = self.describe(is_tied=is_tied, is_gated=self.gated is True)
        return None if shape is None else sum(decoder_parameters(shape).values())

    def count_most(self, *, is_tied: bool, positions: int) -> int | None:
        """Return the parameters with every bias and norm that a decoder may have, and this many learned positions."""
        shape = self.describe(is_tied=is_tied, is_gated=self.gated is not False)
        if shape is None:
            return None
        most = msgspec.structs.replace(
            shape,
            positions=positions,
            norm_vectors=2,
            head_norm_width=self.d_head or 0,
            has_projection_bias=True,
            has_output_bias=True,
            has_feed_forward_bias=True,
        )
        return sum(decoder_parameters(most).values())

    def describe(self, *, is_tied: bool, is_gated: bool) -> DecoderShape | None:
        """The claimed decoder without biases and norms; None if a size is not claimed."""
        sizes = (self.num_layers, self.d_model, self.num_heads, self.num_kv_heads, self.d_head, self.d_ff)
        layers, width, heads, kv_heads, head, hidden = (size or 0 for size in sizes)
        if None in sizes or self.vocab_size is None:
            return None
        return DecoderShape(
            num_layers=layers,
            d_model=width,
            query_width=heads * head,
            key_width=kv_heads * head,
            d_ff=hidden,
            vocab_size=self.vocab_size,
            is_gated=is_gated,
            is_tied=is_tied,
        )


def read_claim(path: Path, *, batch: int | None = None, context: int | None = None, dtype: str | None = None) -> Claim:
    """Return the claim in a file, with `batch`, `context` and `dtype` added to it."""
    plain = _load(path)
    is_config = "model_type" in plain or "architectures" in plain
    is_recovered = "candidates" in plain and "verdict" in plain
    fields = _from_config(plain, path) if is_config else _from_recovery(plain, path) if is_recovered else dict(plain)
    for name, value in (("batch", batch), ("context", context), ("dtype", dtype)):
        if value is None:
            continue
        if fields.get(name, value) != value:
            raise StepscopeError(
                f"the claim and `--{name}` disagree: `{fields[name]}` and `{value}`", hint=f"remove --{name}"
            )
        fields[name] = value
    # A config says how the weights were stored, which few recordings show: it is not what the claim is about.
    return make_claim(fields, path, imply_heads=not is_recovered, implied=("tied",) if is_config else ())


def make_claim(
    fields: Mapping[str, Any],
    path: Path = Path("the claim"),
    *,
    imply_heads: bool = True,
    implied: Sequence[str] = (),
) -> Claim:
    """Return a checked claim. With `imply_heads`, num_kv_heads defaults to num_heads and d_head to d_model / num_heads.
    Raises StepscopeError for an invalid claim, or one that no model can satisfy."""
    for name, value in fields.items():
        _check(name, value, path)
    sizes = dict(fields)
    implied = list(implied)
    if imply_heads and "num_kv_heads" not in sizes and "num_heads" in sizes:
        sizes["num_kv_heads"] = sizes["num_heads"]
        implied.append("num_kv_heads")
    if imply_heads and "d_head" not in sizes and "d_model" in sizes and "num_heads" in sizes:
        if sizes["d_model"] % sizes["num_heads"]:
            raise StepscopeError(
                f"d_model `{sizes['d_model']}` is not divisible by num_heads `{sizes['num_heads']}`",
                detail="add d_head to the claim if it is not d_model / num_heads",
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
            f"unknown field `{name[:60]}` in `{path}`",
            detail=f"did you mean {meant}?" if meant else f"expected {_FORM}",
        )
    if name == "dtype":
        if value not in get_args(Dtype):
            raise StepscopeError(
                f"unsupported dtype `{str(value)[:60]}`", detail=f"expected one of {', '.join(get_args(Dtype))}"
            )
    elif name in _FLAGS:
        if not isinstance(value, bool):
            raise StepscopeError(f"invalid {name}: `{str(value)[:60]}`", detail="expected true or false")
    elif not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST_SIZE:
        raise StepscopeError(f"invalid {name}: `{str(value)[:60]}`", detail="expected a positive integer")


def _check_together(claim: Claim) -> None:
    if not claim.fields:
        raise StepscopeError("the claim is empty", detail=f"expected at least one of {_FORM}")
    heads, kv_heads = claim.num_heads, claim.num_kv_heads
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise StepscopeError(
            f"num_heads `{heads}` is not divisible by num_kv_heads `{kv_heads}`",
            detail="every key-value head is shared by the same number of heads",
        )
    fewest = claim.fewest_parameters
    if claim.parameters is not None and fewest is not None and claim.parameters < fewest:
        raise StepscopeError(
            f"the claim contradicts itself: `{claim.parameters:,}` parameters",
            detail=f"the claimed matrices already have {fewest:,}",
        )


def _load(path: Path) -> dict[str, Any]:
    with open_plain(path, what="the claim") as (file, _):
        content = file.read(_LARGEST_BYTES + 1)
    if len(content) > _LARGEST_BYTES:
        raise StepscopeError(f"not a claim: `{path}`", detail=f"the file is larger than {_LARGEST_BYTES:,} bytes")
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
            raise ValueError("duplicate key")
        return dict(pairs)

    plain = json.loads(text, object_pairs_hook=once)
    assert isinstance(plain, dict), "JSON that starts with a brace is an object"
    return plain


def _from_recovery(plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields that `recover` was certain of. Claiming its guesses would refute a run for a wrong guess."""
    found = plain.get("fields", {})
    is_valid = isinstance(found, dict) and all(isinstance(one, dict) and "value" in one for one in found.values())
    fields = {name: one["value"] for name, one in found.items() if one.get("certain") is True} if is_valid else {}
    if not fields:
        raise StepscopeError(
            f"no certain fields in `{path}`",
            detail=f"only fields that a recovery marks as certain are used; or write the sizes as a claim: {_FORM}",
            hint="stepscope recover EVIDENCE --format json",
        )
    return fields


def _from_config(plain: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of a transformers config. Its dtype is that of the stored weights, so it is not claimed."""
    model_type = plain.get("model_type")
    reader = _CONFIGS.get(str(model_type))
    if reader is None:
        raise StepscopeError(
            f"unsupported model_type `{str(model_type)[:60]}` in `{path}`",
            detail=f"expected one of {', '.join(_CONFIGS)}; or write the sizes as a claim: {_FORM}",
        )
    try:
        fields = reader(plain)
    except KeyError as error:
        raise StepscopeError(f"`{error.args[0]}` is missing from the config `{path}`") from None
    known = {name: value for name, value in fields.items() if value is not None}
    return {**known, "model_type": str(model_type)}


def _need(plain: Mapping[str, Any], name: str, alias: str = "") -> Any:
    """Return a value that a config must have, under one name or under a second one for the same. Raises KeyError for
    null as well: a size that is left out of a claim would not be checked."""
    found = [plain[one] for one in (name, alias) if plain.get(one) is not None]
    if not found:
        raise KeyError(name)
    if found[0] != found[-1]:
        raise StepscopeError(
            f"the config contradicts itself: {name} `{str(found[0])[:60]}` and {alias} `{str(found[-1])[:60]}`",
            detail="they are two names for the same size",
        )
    return found[0]


def _gpt2(plain: Mapping[str, Any]) -> dict[str, Any]:
    inner = plain.get("n_inner")
    width = _need(plain, "n_embd", "hidden_size")
    return {
        "num_layers": _need(plain, "n_layer", "num_hidden_layers"),
        "d_model": width,
        "num_heads": _need(plain, "n_head", "num_attention_heads"),
        "d_ff": 4 * width if inner is None and isinstance(width, int) else inner,
        "vocab_size": _need(plain, "vocab_size"),
        "gated": False,
        "tied": plain.get("tie_word_embeddings", True),
    }


def _plain_decoder(plain: Mapping[str, Any], *, gated: bool, head: int | None = None) -> dict[str, Any]:
    size = plain.get("head_dim")
    return {
        "num_layers": _need(plain, "num_hidden_layers"),
        "d_model": _need(plain, "hidden_size"),
        "num_heads": _need(plain, "num_attention_heads"),
        "num_kv_heads": plain.get("num_key_value_heads"),
        "d_head": head if size is None else size,
        "d_ff": _need(plain, "intermediate_size"),
        "vocab_size": _need(plain, "vocab_size"),
        "gated": gated,
        "tied": plain.get("tie_word_embeddings", False),
    }


def _grouped_decoder(plain: Mapping[str, Any], *, head: int | None = None) -> dict[str, Any]:
    """Read the config of a model type whose default for num_key_value_heads is a number: without it, nobody knows how
    many heads the claim is about."""
    if "num_key_value_heads" not in plain:
        raise KeyError("num_key_value_heads")
    return _plain_decoder(plain, gated=True, head=head)


_CONFIGS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": partial(_plain_decoder, gated=True),
    "mistral": _grouped_decoder,
    "qwen2": _grouped_decoder,
    "qwen3": partial(_grouped_decoder, head=128),
    "gpt_neox": partial(_plain_decoder, gated=False),
}
