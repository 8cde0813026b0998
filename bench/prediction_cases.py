"""The workloads of `prediction.py`. Each is the settings of a `stepscope plan` command.

`tuned-on` and `held-out` were fixed before anything was measured. The prediction was tuned on the first; the second
only scores it. `frozen` was measured, and `chosen-later` even chosen, after the code of the prediction was finished.
`proposals` are changes that `stepscope plan --fit` proposes, and run with no more memory than it was asked to fit, and
the next larger batches of two, which must run out of it.
"""

from typing import Any, NamedTuple

Settings = dict[str, Any]


class Truth(NamedTuple):
    """A workload to measure and predict. A compiled one prepares for a long time; the others start at once."""

    group: str
    name: str
    settings: Settings

    @property
    def is_compiled(self) -> bool:
        return bool(self.settings.get("compile")) or "preset" in self.settings

    @property
    def fits(self) -> bool:
        """Whether it is expected to fit into its memory limit, or into the GPU."""
        return self.name not in _TOO_LARGE


def _own(family: str, config: Settings, *, optimizer: str, batch: int, context: int, **more: Any) -> Settings:
    """A model of `prediction_models.py`. `more` has settings of the workload."""
    chosen: Settings = {key: more.pop(key) for key in ("recompute", "weights") if key in more}
    arguments: Settings = {"family": family, "optimizer": optimizer, **chosen, **config}
    return {
        "model": "bench/prediction_models.py:build",
        "set": arguments,
        "batch": batch,
        "context": context,
        "attention": "sdpa",
        **more,
    }


def _hf(config: str, fields: Settings, **settings: Any) -> Settings:
    return {"hf": config, "set": fields, **settings}


GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
TINY_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
ODD_LLAMA = {
    "hidden_size": 1080,
    "intermediate_size": 2936,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 32003,
}
QWEN2_HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QWEN2_LARGER = QWEN2_HALF | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
PYTHIA_70M = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
PYTHIA_160M = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
PYTHIA_410M = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
OPT_1B = {
    "hidden_size": 2048,
    "ffn_dim": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "word_embed_proj_dim": 2048,
}
GEMMA_SHORT = {
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GEMMA_2B = GEMMA_SHORT | {"num_hidden_layers": 18}
MISTRAL_SHORT = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MISTRAL_3B = {
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
}
BERT_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
PHI_SHORT = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
ODD_BUILTIN = {"d_model": 1000, "d_ff": 2700, "num_layers": 20, "num_heads": 10, "num_kv_heads": 10, "vocab": 10_007}
SLIM_BUILTIN = {"d_model": 520, "d_ff": 1384, "num_layers": 14, "num_heads": 10, "num_kv_heads": 5, "vocab": 32_003}
GROUPED = {"d_model": 1024, "d_ff": 2816, "num_layers": 12, "num_heads": 16, "num_kv_heads": 4, "vocab": 32_000}

_TUNED_ON: dict[str, Settings] = {
    "small fp32": {"size": "small", "batch": 4, "context": 256},
    "small bf16 1024": {"size": "small", "batch": 4, "context": 1024, "precision": "bf16"},
    "small inference bf16": {"size": "small", "batch": 8, "context": 1024, "precision": "bf16", "mode": "inference"},
    "medium flash fused": {
        "size": "medium",
        "batch": 4,
        "context": 1024,
        "precision": "bf16",
        "attention": "flash",
        "optimizer": "adamw-fused",
    },
    "odd widths sdpa": ODD_BUILTIN
    | {"batch": 3, "context": 384, "precision": "bf16", "attention": "sdpa", "optimizer": "adamw-torch"},
    "large fp32 recomputed": {"size": "large", "batch": 2, "context": 512, "checkpoint": "1"},
    "xl recomputed by 4": {
        "size": "xl",
        "batch": 4,
        "context": 1024,
        "precision": "bf16",
        "attention": "flash",
        "checkpoint": "4",
        "optimizer": "adamw-fused",
    },
    "grouped tied sgd, 4 passes": GROUPED
    | {
        "tie_embeddings": True,
        "batch": 8,
        "context": 512,
        "precision": "bf16",
        "grad_accumulation": 4,
        "optimizer": "sgd",
    },
    "gpt2 sdpa": _own("gpt2", {}, optimizer="adamw-foreach", batch=8, context=1024, precision="bf16"),
    "llama 1.1B fused": _own("llama", TINY_LLAMA, optimizer="adamw-fused", batch=4, context=1024, precision="bf16"),
    "qwen2 0.5B recomputed": _own(
        "qwen2", QWEN2_HALF, optimizer="adamw-foreach", recompute=True, batch=2, context=1024, precision="bf16"
    ),
    "gpt_neox 160M eager": _own(
        "gpt_neox", PYTHIA_160M, optimizer="sgd-momentum", attention="naive", batch=4, context=512
    ),
    "opt 1.3B fp32": _own("opt", OPT_1B, optimizer="adamw-foreach", batch=2, context=512),
    "gemma, 6 layers": _own("gemma", GEMMA_SHORT, optimizer="sgd-momentum", batch=2, context=1024, precision="bf16"),
    "mistral, bf16 weights": _own(
        "mistral",
        MISTRAL_SHORT,
        optimizer="adam-loop",
        weights="bfloat16",
        attention="naive",
        batch=2,
        context=1024,
    ),
    "bert": _hf("bert", {}, batch=16, context=256, optimizer="adamw-fused"),
    "t5 small": _hf("t5", {}, batch=8, context=512, precision="bf16"),
}
_HELD_OUT: dict[str, Settings] = {
    "medium fp32": {"size": "medium", "batch": 2, "context": 512, "optimizer": "adamw-torch"},
    "2.7B one launch": {
        "size": "2.7B",
        "batch": 4,
        "context": 512,
        "precision": "bf16",
        "attention": "flash",
        "optimizer": "adamw-onelaunch",
    },
    "slim tf32": SLIM_BUILTIN | {"batch": 8, "context": 300, "precision": "tf32"},
    "large nested": {
        "size": "large",
        "batch": 4,
        "context": 512,
        "precision": "bf16",
        "checkpoint": "nested:6",
        "optimizer": "adamw-fused",
    },
    "small fp16 flash": {
        "size": "small",
        "batch": 8,
        "context": 512,
        "precision": "fp16",
        "attention": "flash",
        "optimizer": "adamw-torch",
    },
    "xl forward": {"size": "xl", "batch": 2, "context": 512, "mode": "forward"},
    "gpt2 medium eager": _own("gpt2", GPT2_MEDIUM, optimizer="adamw-fused", attention="naive", batch=4, context=512),
    "llama odd rmsprop": _own("llama", ODD_LLAMA, optimizer="rmsprop", recompute=True, batch=3, context=700),
    "llama inference": _hf(
        "llama", TINY_LLAMA, batch=4, context=2048, precision="bf16", mode="inference", attention="sdpa"
    ),
    "qwen2 1.5B eager": _own(
        "qwen2",
        QWEN2_LARGER,
        optimizer="adamw-foreach",
        recompute=True,
        attention="naive",
        batch=1,
        context=1536,
        precision="bf16",
    ),
    "gpt_neox 410M": _own("gpt_neox", PYTHIA_410M, optimizer="adamw-fused", batch=8, context=1024, precision="bf16"),
    "gpt_neox 70M": _own("gpt_neox", PYTHIA_70M, optimizer="adamw-foreach", batch=16, context=256),
    "opt 125M eager": _own(
        "opt", {}, optimizer="sgd-momentum", attention="naive", batch=8, context=512, precision="bf16"
    ),
    "mistral 3B recomputed": _own(
        "mistral", MISTRAL_3B, optimizer="adamw-fused", recompute=True, batch=2, context=2048, precision="bf16"
    ),
    "gemma 2B": _own("gemma", GEMMA_2B, optimizer="adamw-fused", batch=1, context=1024, precision="bf16"),
    "bert large forward": _hf("bert", BERT_LARGE, batch=16, context=512, precision="bf16", mode="forward"),
    "t5 base": _hf("t5", T5_BASE, batch=8, context=256, attention="sdpa", optimizer="adamw-torch"),
}
_FAST = {"preset": "fast", "batch": 4, "context": 1024}
_COMPILED_TUNED_ON: dict[str, Settings] = {
    "small compiled": {
        "size": "small",
        "batch": 4,
        "context": 1024,
        "precision": "bf16",
        "attention": "flash",
        "optimizer": "adamw-fused",
        "compile": True,
    },
    "small fast": {"size": "small", **_FAST},
    "medium graph": {
        "size": "medium",
        "batch": 4,
        "context": 512,
        "precision": "bf16",
        "attention": "flash",
        "optimizer": "adamw-fused",
        "compile": True,
        "graph": True,
    },
    "gpt_neox 410M compiled": _own(
        "gpt_neox", PYTHIA_410M, optimizer="adamw-fused", batch=4, context=1024, precision="bf16", compile=True
    ),
}
_COMPILED_HELD_OUT: dict[str, Settings] = {
    "medium fast": {"size": "medium", **_FAST},
    "gpt2 compiled": _own("gpt2", {}, optimizer="adamw-fused", batch=8, context=1024, precision="bf16", compile=True),
    "small fp32 compiled": {"size": "small", "batch": 4, "context": 512, "compile": True, "optimizer": "adamw-torch"},
    "qwen2 0.5B fast": _hf("qwen2", QWEN2_HALF, **_FAST | {"batch": 2}),
}
_FROZEN: dict[str, Settings] = {
    "qwen3 0.6B": _own("qwen3", QWEN3, optimizer="adamw-fused", batch=4, context=1024, precision="bf16"),
    "phi, 10 layers": _own("phi", PHI_SHORT, optimizer="adamw-foreach", batch=4, context=512, precision="bf16"),
    "gpt2 odd fp32": _own(
        "gpt2", {"n_embd": 984, "n_layer": 18, "n_head": 12}, optimizer="sgd-momentum", batch=5, context=600
    ),
    "llama 1.1B eager recomputed": _own(
        "llama",
        TINY_LLAMA,
        optimizer="adamw-foreach",
        recompute=True,
        attention="naive",
        batch=4,
        context=1024,
        precision="bf16",
    ),
    "opt 1.3B bf16": _own("opt", OPT_1B, optimizer="adamw-fused", batch=4, context=1024, precision="bf16"),
    "large flash": {
        "size": "large",
        "batch": 6,
        "context": 768,
        "precision": "bf16",
        "attention": "flash",
        "optimizer": "adamw-torch",
    },
    "grouped fp32": GROUPED | {"batch": 4, "context": 640, "attention": "sdpa"},
}
_CHOSEN_LATER: dict[str, Settings] = {
    "falcon 0.5B": _own(
        "falcon",
        {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16},
        optimizer="adamw-fused",
        batch=4,
        context=1024,
        precision="bf16",
    ),
    "starcoder2 eager fp32": _own(
        "starcoder2",
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 18,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
        optimizer="sgd-momentum",
        attention="naive",
        batch=2,
        context=512,
    ),
    "gpt2 large": _own(
        "gpt2",
        {"n_embd": 1280, "n_layer": 36, "n_head": 20},
        optimizer="adamw-foreach",
        batch=4,
        context=512,
        precision="bf16",
    ),
    "llama 2.6B recomputed": _own(
        "llama",
        {
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
        },
        optimizer="adamw-fused",
        recompute=True,
        batch=2,
        context=1024,
        precision="bf16",
    ),
    "olmo2 tied": _own(
        "olmo2",
        {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        optimizer="rmsprop",
        batch=6,
        context=768,
        precision="bf16",
    ),
    "medium sdpa, 2 passes": {
        "size": "medium",
        "batch": 8,
        "context": 768,
        "precision": "bf16",
        "attention": "sdpa",
        "grad_accumulation": 2,
        "optimizer": "adamw-fused",
    },
}
_FASTER = {"precision": "bf16", "attention": "flash", "optimizer": "adamw-fused", "context": 1024}
_PROPOSALS: dict[str, Settings] = {
    "xl in 48 GB, batch 2": {"size": "xl", "batch": 2, "memory_limit": 48_000_000_000} | _FASTER,
    "2.7B in 80 GB, batch 4": {"size": "2.7B", "batch": 4, "memory_limit": 80_000_000_000} | _FASTER,
    "xl in 48 GB, checkpoints, batch 26": {"size": "xl", "batch": 26, "checkpoint": "4", "memory_limit": 48_000_000_000}
    | _FASTER,
    "xl in 48 GB, fp32, checkpoints": {
        "size": "xl",
        "context": 1024,
        "checkpoint": "7",
        "memory_limit": 48_000_000_000,
    },
}
_TOO_LARGE: dict[str, Settings] = {
    "xl in 48 GB, batch 3, does not fit": {"size": "xl", "batch": 3, "memory_limit": 48_000_000_000} | _FASTER,
    "2.7B in 80 GB, batch 5, does not fit": {"size": "2.7B", "batch": 5, "memory_limit": 80_000_000_000} | _FASTER,
}
_GROUPS: dict[str, tuple[dict[str, Settings], ...]] = {
    "tuned-on": (_TUNED_ON, _COMPILED_TUNED_ON),
    "held-out": (_HELD_OUT, _COMPILED_HELD_OUT),
    "frozen": (_FROZEN,),
    "chosen-later": (_CHOSEN_LATER,),
    "proposals": (_PROPOSALS, _TOO_LARGE),
}
TRUTHS: dict[str, Truth] = {
    name: Truth(group, name, settings)
    for group, parts in _GROUPS.items()
    for cases in parts
    for name, settings in cases.items()
}
GROUPS = tuple(_GROUPS)


# --- The same in miniature, to see on a CPU that everything runs ---

_TINY = {
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "vocab_size": 500,
    "vocab": 500,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "head_dim": 8,
}
_WIDTHS = {"hidden_size": "num_attention_heads", "n_embd": "n_head", "d_model": "num_heads"}
_DEFAULT_SHAPE = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},
    "opt": {"hidden_size": 64, "num_attention_heads": 4, "word_embed_proj_dim": 64, "num_hidden_layers": 2},
    "bert": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96},
    "t5": {"d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 96},
}


def shrink(settings: Settings) -> Settings:
    """The same settings with two layers, short sequences and narrow widths; heads stay."""
    small = settings | {"batch": settings.get("grad_accumulation", 1) * 2, "context": 32}
    if settings.get("precision") == "tf32":  # no CPU has it
        small["precision"] = "fp32"
    if "size" in settings:
        return {key: value for key, value in small.items() if key != "size"} | {
            "d_model": 64, "d_ff": 96, "num_layers": 8, "num_heads": 4, "num_kv_heads": 4, "vocab": 500,
        }  # fmt: skip
    if "set" not in settings:
        return small | _narrow(settings)
    family = settings["set"].get("family", settings.get("hf"))
    arguments = settings["set"] | _narrow(settings["set"])
    if family in _DEFAULT_SHAPE:
        arguments |= _DEFAULT_SHAPE[family]
    extra = {} if family in ("t5", "bert") else {"bos_token_id": 0, "eos_token_id": 0}
    return small | {"set": arguments | {"vocab_size": 500} | extra | ({"pad_token_id": 1} if family != "t5" else {})}


def _narrow(shape: Settings) -> Settings:
    narrow = {key: value for key, value in _TINY.items() if key in shape}
    for width, heads in _WIDTHS.items():
        if width in shape and heads in shape:
            narrow[width] = 8 * shape[heads]
    return narrow
