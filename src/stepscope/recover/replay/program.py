"""The programs that a replay runs: the claimed model, with the settings of the evidence.

A claim has the sizes of a model. How it runs comes from the evidence. A recording of stepscope states its settings. For
other files, the kernels show whether attention is fused, the step compiled, and the model trained. They do not show
whether the weights are stored in the claimed dtype or cast by autocast, so there is a program for each.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stepscope.errors import StepscopeError
from stepscope.recover.claims.claim import Claim
from stepscope.recover.evidence.order import is_attention
from stepscope.recover.facts import Sighting
from stepscope.recover.shape import SIZES
from stepscope.spec import Factory, HuggingFace, ModelShape, Workload

# Builds a `transformers` model with its weights in the claimed dtype, which no precision of a workload does.
CAST_MODEL = "stepscope.measure.cast_model:build"
_REQUIRED = tuple(name for name in SIZES if name not in ("num_kv_heads", "d_head"))
_LAYER_FIELDS = ("n_layer", "num_hidden_layers")


def check_claim(claim: Claim) -> None:
    """Raise StepscopeError for a claim that does not determine a model to run."""
    missing = [name for name in (*_REQUIRED, "dtype") if getattr(claim, name) is None]
    if missing:
        flags = [f"--{name} …" for name in missing if name in ("batch", "context", "dtype")]
        raise StepscopeError(
            f"`--replay` requires {', '.join(missing)} in the claim",
            detail="the claimed model runs on this machine, so all of its sizes must be known",
            hint=f"add {' '.join(flags)}" if len(flags) == len(missing) else "claim a transformers config.json",
        )
    if claim.model_type is None:
        _build_shape(claim, claim.num_layers or 1)


def cut_config(plain: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a transformers config with fewer layers. Raises StepscopeError if its layers differ."""
    kinds = plain.get("layer_types")
    cut = {**plain, **{name: layers for name in _LAYER_FIELDS if name in plain}}
    if not isinstance(kinds, list) or layers >= len(kinds):
        return cut
    if len(set(map(str, kinds))) > 1:
        raise StepscopeError(
            "the layers of this config differ, so that a few of them do not show the others",
            hint=f"--replay {len(kinds)}",
        )
    return {**cut, "layer_types": kinds[:layers]}


def list_programs(
    claim: Claim, sightings: Sequence[Sighting], *, layers: int, config: Path | None, stated: Workload | None
) -> list[Workload]:
    """Return the workloads to try, most likely first. `config` is a transformers config with that many layers."""
    model = _build_shape(claim, layers) if config is None else HuggingFace(config=str(config))
    sizes = {"batch": claim.batch, "context": claim.context, "device": "auto", "seed": 0}
    if stated is not None:
        _check_kind(stated.model, model)
        return [msgspec.structs.replace(stated, model=model, precision=claim.dtype, **sizes)]
    shown = {
        "mode": _find_mode(sightings),
        "attention": "sdpa" if any(is_attention(one, backward=False) for one in sightings) else "naive",
        "compile": any(one.name.library == "Inductor" for one in sightings),
    }
    programs = []
    if config is not None and claim.dtype in ("fp16", "bf16"):
        arguments = (("config", str(config)), ("dtype", claim.dtype), ("with_loss", shown["mode"] != "inference"))
        cast = Factory(target=CAST_MODEL, arguments=arguments)
        programs.append(Workload(model=cast, precision="fp32", **sizes, **shown))  # type: ignore[arg-type]
    programs.append(Workload(model=model, precision=claim.dtype, **sizes, **shown))  # type: ignore[arg-type]
    return programs


def describe_program(workload: Workload) -> str:
    what, weights = "the claimed config in transformers", str(workload.precision)
    if isinstance(workload.model, ModelShape):
        what = "the built-in decoder"
    elif isinstance(workload.model, Factory):
        weights = f"{dict(workload.model.arguments)['dtype']} weights"
    attention = [f"{workload.attention} attention"] if workload.attention else []
    compiled = ["compiled"] if workload.compile else []
    sizes = f"batch {workload.batch}, context {workload.context}"
    return ", ".join([what, weights, *attention, *compiled, f"mode {workload.mode}", sizes])


def _build_shape(claim: Claim, layers: int) -> ModelShape:
    if claim.gated is False or (claim.d_head or 0) * (claim.num_heads or 0) != claim.d_model:
        what = "its feed-forward layer has a gate" if claim.gated is False else "its heads have d_model / num_heads"
        raise StepscopeError(
            "the claimed model cannot be built for `--replay`",
            detail=f"claimed sizes are those of the built-in decoder, and {what}",
            hint="claim a transformers config.json",
        )
    return ModelShape(
        num_layers=layers,
        d_model=claim.d_model or 0,
        d_ff=claim.d_ff or 0,
        num_heads=claim.num_heads or 0,
        num_kv_heads=claim.num_kv_heads or 0,
        vocab=claim.vocab_size or 0,
        tie_embeddings=bool(claim.tied),
    )


def _check_kind(stated: ModelShape | Factory | HuggingFace, claimed: ModelShape | HuggingFace) -> None:
    if type(stated) is type(claimed):
        return
    if isinstance(stated, HuggingFace):
        what, hint = "a transformers model", "claim its config.json"
    else:
        what = "the built-in decoder" if isinstance(stated, ModelShape) else f"the prover's own `{stated.name}`"
        hint = "claim its sizes in a TOML file" if isinstance(stated, ModelShape) else "remove --replay"
    raise StepscopeError(f"the evidence was recorded with {what}, which the claim does not describe", hint=hint)


def _find_mode(sightings: Sequence[Sighting]) -> Literal["inference", "forward-backward", "train"]:
    if any(one.name.kernel_class == "optimizer" for one in sightings):
        return "train"
    return "forward-backward" if any(one.name.direction == "backward" for one in sightings) else "inference"
