"""A causal language model from `transformers`, with random weights and without the network.

`--hf gpt2` takes a model type's default config, `--hf path/to/config.json` a file; `--set` overrides fields of either.
`transformers` is an optional extra and is imported here only.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.errors import StepscopeError, nearest
from stepscope.spec import Attention, HuggingFace, Workload
from stepscope.step.own import Parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def build_hf(workload: Workload, spec: HuggingFace) -> Parts:
    config = load_config(spec)
    _check_context(config, workload)
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32}
    if workload.attention is not None:
        options["attn_implementation"] = _attention_name(workload.attention)
    try:
        model = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise StepscopeError(
            f"transformers cannot build a causal language model of `{spec.config}`",
            detail=str(error).splitlines()[0][:200],
            hint="--hf gpt2, or --model package.module:factory for any other kind of model",
        ) from None
    tokens_BL = torch.randint(config.get_text_config().vocab_size, (workload.batch, workload.context))
    labels = {} if workload.mode == "inference" else {"labels": tokens_BL}
    return Parts(
        module=model,
        call=lambda run: run(input_ids=tokens_BL, use_cache=False, **labels),
        loss=_loss_of,
    )


def _attention_name(attention: Attention) -> str:
    """What our names are called there. `eager` is their attention written out, as `naive` is ours."""
    if attention in ("naive", "sdpa"):
        return "eager" if attention == "naive" else attention
    from stepscope.kernels.attention.transformers import register

    return register("auto" if attention == "flash" else attention)


def check_config(workload: Workload, spec: HuggingFace) -> str:
    """Refuses, before anything runs, what can never be built; returns the digest of the whole config."""
    config = load_config(spec)
    _check_context(config, workload)
    return hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]


def load_config(spec: HuggingFace) -> "PretrainedConfig":
    """The config with its overrides applied; a name that is no field of it is an error, not an extra attribute."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ModuleNotFoundError:
        raise StepscopeError(
            "`--hf` needs transformers, which is not installed", hint="pip install 'stepscope[hf]'"
        ) from None
    path = Path(spec.config)
    if path.exists():
        fields = _read_config(path / "config.json" if path.is_dir() else path)
    else:
        fields = {"model_type": spec.config}
    kind = fields.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        close = nearest(str(kind), CONFIG_MAPPING)
        raise StepscopeError(
            f"no config file and no model type of transformers: `{spec.config}`",
            detail=f"did you mean `{close}`?" if close else "weights and configs are not fetched from the network",
            hint=f"--hf {close or 'llama'}",
        )
    _check_names(AutoConfig.for_model(kind, **fields), spec)
    # Built with the overrides in place, because some fields follow from others: heads give the head size.
    return AutoConfig.for_model(kind, **fields | dict(spec.arguments))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StepscopeError(f"not a transformers config: `{path}`", detail=str(error), hint="--hf gpt2") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise StepscopeError(f"not a transformers config: `{path}`", detail="it has no `model_type`", hint="--hf gpt2")
    return fields


def _check_names(config: "PretrainedConfig", spec: HuggingFace) -> None:
    for name, value in spec.arguments:
        if not hasattr(config, name):
            close = nearest(name, config.to_dict())
            raise StepscopeError(
                f"the config of `{spec.config}` has no `{name}`",
                detail=f"did you mean `{close}`?" if close else "",
                hint=f"--set {close or 'num_hidden_layers'}={value}",
            )


def _check_context(config: "PretrainedConfig", workload: Workload) -> None:
    """Learned positions end somewhere; beyond it a CPU raises an IndexError and a GPU an assertion in a kernel."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < workload.context:
        raise StepscopeError(
            f"context `{workload.context}` is longer than the model's `{longest}` positions",
            hint=f"--context {longest}, or --set max_position_embeddings={workload.context}",
        )


def _loss_of(output: object) -> Tensor:
    loss = getattr(output, "loss", None)
    assert isinstance(loss, Tensor), "a causal language model that was given labels returns its loss"
    return loss
