"""The models that `collect_evidence.py` runs, and how each is built. All have random weights."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Run:
    family: str  # gpt2, llama, neox, qwen2, qwen3, builtin, mixtral, qwen3_moe, deepseek, t5
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    batch: int
    context: int
    dtype: str = "bf16"  # fp32, tf32, fp16, bf16, or autocast: bf16 GEMMs with fp32 weights
    attention: str = "sdpa"  # naive, sdpa, efficient, flash, cudnn, ours
    compile: bool = False
    modes: tuple[str, ...] = ("forward",)  # forward, train: the modes that are traced
    snapshot: bool = False
    held_out: bool = False
    # Of a mixture of experts, whose d_ff is the width of one expert. The first `dense_layers` have none, but a
    # feed-forward layer of this width.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    shared_d_ff: int = 0
    dense_layers: int = 0
    dense_d_ff: int = 0
    lora_rank: int = 0  # of adapters next to the query and value projections
    # Of the decoder, if num_layers, batch and context are those of an encoder before it.
    decoder_layers: int = 0
    decoder_context: int = 0


def load(name: str) -> Any:
    """Runs on the measuring machine; untyped, like most of these libraries."""
    return importlib.import_module(name)


def _run(family: str, shape: str, batch: int, context: int, **more: Any) -> Run:
    """`shape`: num_layers, d_model, num_heads, num_kv_heads, head_dim, d_ff, vocab_size."""
    layers, width, heads, kv, head, ff, vocabulary = map(int, shape.split())
    return Run(
        family=family, num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=kv, d_head=head, d_ff=ff,
        vocab_size=vocabulary, batch=batch, context=context, **more,
    )  # fmt: skip


BOTH = ("forward", "train")
RUNS = {
    "gpt2_fp32_efficient": _run("gpt2", "3 768 12 12 64 3072 50257", 1, 128, dtype="fp32", modes=BOTH, snapshot=True),
    "gpt2_bf16_odd": _run("gpt2", "4 640 10 10 64 2560 32003", 3, 200, modes=BOTH),
    "gpt2_fp16_naive": _run("gpt2", "3 384 6 6 64 1536 50304", 2, 256, dtype="fp16", attention="naive"),
    "gpt2_tf32": _run("gpt2", "2 1024 16 16 64 4096 50257", 2, 512, dtype="tf32", attention="efficient"),
    "gpt2_compiled": _run("gpt2", "4 768 12 12 64 3072 50257", 4, 256, compile=True, modes=BOTH),
    "gpt2_head80": _run("gpt2", "3 1200 15 15 80 4800 20011", 2, 384, attention="flash"),
    "llama_bf16": _run("llama", "3 1024 16 4 64 2816 32000", 2, 512, modes=BOTH, snapshot=True),
    "llama_fp16_naive": _run("llama", "2 768 12 4 64 2048 32000", 2, 192, dtype="fp16", attention="naive"),
    "llama_compiled": _run("llama", "4 2048 32 8 64 5632 32000", 2, 1024, compile=True, modes=BOTH),
    "llama_fp32": _run("llama", "2 512 8 2 64 1408 16001", 3, 160, dtype="fp32", modes=BOTH),
    "llama_ours": _run("llama", "2 1280 10 5 128 3456 32064", 1, 768, attention="ours"),
    "qwen2_bf16": _run("qwen2", "2 896 14 2 64 4864 151936", 1, 384),
    "qwen3_cudnn": _run("qwen3", "2 1024 16 8 128 3072 151936", 2, 256, attention="cudnn"),
    "neox_fp16": _run("neox", "3 512 8 8 64 2048 50304", 4, 128, dtype="fp16", modes=BOTH),
    "neox_compiled": _run("neox", "3 1024 8 8 128 4096 50304", 2, 256, dtype="fp32", compile=True),
    "builtin_autocast": _run(
        "builtin", "3 768 12 12 64 3072 10000", 4, 256, dtype="autocast", attention="naive", modes=BOTH
    ),
    "builtin_fp32": _run("builtin", "4 512 16 16 32 1344 10000", 8, 64, dtype="fp32", attention="naive", modes=BOTH),
    "builtin_hopper": _run("builtin", "2 1024 8 8 128 2752 32000", 2, 1024, attention="ours", dtype="autocast"),
    # Held out: not looked at while the kernel models were made.
    "held_gpt2": _run("gpt2", "5 1280 20 20 64 5120 40478", 2, 320, attention="flash", modes=BOTH, held_out=True),
    "held_llama": _run("llama", "3 1536 12 3 128 4224 49152", 3, 448, dtype="fp16", held_out=True),
    "held_qwen2": _run("qwen2", "4 1152 9 3 128 3008 60001", 2, 300, compile=True, held_out=True),
    "held_neox": _run(
        "neox", "3 640 10 10 64 2400 33001", 2, 224, dtype="fp32", attention="naive", modes=BOTH, held_out=True
    ),
    # Held out later: collected after the first four had been looked at.
    "held_smol": _run("llama", "2 960 15 5 64 2560 49152", 1, 1000, held_out=True),
    "held_gpt2_fp16": _run("gpt2", "3 512 8 8 64 2048 12345", 5, 96, dtype="fp16", modes=BOTH, held_out=True),
}  # fmt: skip

# Held out, and not plain decoders except for the last. Nothing in `recover` was measured on such models. They have few
# layers, because ncu takes 0.2 to 0.5 s per kernel, and there are about 900 kernels.
VARIANTS = {
    "held_mixtral": _run(
        "mixtral", "2 1024 16 4 64 1792 32000", 2, 320, num_experts=8, num_experts_per_tok=2, held_out=True
    ),
    "held_qwen3_moe": _run(
        "qwen3_moe", "2 768 12 4 64 384 151936", 1, 500, num_experts=60, num_experts_per_tok=4, held_out=True
    ),
    "held_deepseek": _run(
        "deepseek", "2 1280 10 10 128 640 102400", 2, 256, num_experts=32, num_experts_per_tok=6, shared_d_ff=1280,
        dense_layers=1, dense_d_ff=3456, held_out=True,
    ),
    "held_t5": _run(
        "t5", "2 640 10 10 64 1920 32128", 3, 240, decoder_layers=2, decoder_context=72, held_out=True
    ),
    "held_lora": _run("llama", "2 1152 9 3 128 3136 32000", 2, 384, lora_rank=16, held_out=True),
    "held_odd": _run("gpt2", "2 808 8 8 101 3000 50259", 3, 171, held_out=True),
}  # fmt: skip


def build(run: Run, device: str) -> Any:
    torch = load("torch")

    if run.family == "builtin":
        return _build_builtin(run).to(device)
    hf = load("transformers")
    implementation = {"naive": "eager"}.get(run.attention, "sdpa")
    if run.attention == "ours":
        from stepscope.kernels.attention.transformers import register

        implementation = register("auto")
    kind = hf.AutoModelForSeq2SeqLM if run.decoder_layers else hf.AutoModelForCausalLM
    model = kind.from_config(_configure(run, hf), attn_implementation=implementation)
    if run.lora_rank:
        _adapt(model, run.lora_rank)
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    return model.to(device=device, dtype=kinds.get(run.dtype, torch.float32))


def _configure(run: Run, hf: Any) -> Any:
    """What the config's names mean is not derived twice: each family has its own."""
    common = {
        "num_hidden_layers": run.num_layers, "hidden_size": run.d_model, "num_attention_heads": run.num_heads,
        "intermediate_size": run.d_ff, "vocab_size": run.vocab_size, "max_position_embeddings": 2048,
    }  # fmt: skip
    grouped = {**common, "num_key_value_heads": run.num_kv_heads, "head_dim": run.d_head}
    routed = {"num_experts_per_tok": run.num_experts_per_tok}
    makers: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: hf.GPT2Config(
            n_layer=run.num_layers, n_embd=run.d_model, n_head=run.num_heads, n_inner=run.d_ff,
            vocab_size=run.vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        "neox": lambda: hf.GPTNeoXConfig(**common),
        "llama": lambda: hf.LlamaConfig(**grouped),
        "qwen2": lambda: hf.Qwen2Config(**grouped),
        "qwen3": lambda: hf.Qwen3Config(**grouped),
        "mixtral": lambda: hf.MixtralConfig(**grouped, **routed, num_local_experts=run.num_experts),
        "qwen3_moe": lambda: hf.Qwen3MoeConfig(
            **grouped, **routed, num_experts=run.num_experts, moe_intermediate_size=run.d_ff
        ),
        # Latent attention: queries and keys have 64 more elements per head, for positions.
        "deepseek": lambda: hf.DeepseekV3Config(
            **{**common, "intermediate_size": run.dense_d_ff}, **routed, num_key_value_heads=run.num_kv_heads,
            n_routed_experts=run.num_experts, moe_intermediate_size=run.d_ff,
            n_shared_experts=run.shared_d_ff // run.d_ff, first_k_dense_replace=run.dense_layers, n_group=4,
            topk_group=2, q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=run.d_head, qk_rope_head_dim=64,
            v_head_dim=run.d_head,
        ),
        "t5": lambda: hf.T5Config(
            num_layers=run.num_layers, num_decoder_layers=run.decoder_layers, d_model=run.d_model, d_kv=run.d_head,
            d_ff=run.d_ff, num_heads=run.num_heads, vocab_size=run.vocab_size, dropout_rate=0.0,
        ),
    }  # fmt: skip
    return makers[run.family]()


def _adapt(model: Any, rank: int) -> None:
    """Put an adapter next to the query and value projections, with the operations that the `peft` library uses."""
    torch = load("torch")

    class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, projection: Any) -> None:
            super().__init__()
            self.projection = projection
            self.down = torch.nn.Linear(projection.in_features, rank, bias=False)
            self.up = torch.nn.Linear(rank, projection.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.projection(x) + self.up(self.down(x)) * 2.0

    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)


def _build_builtin(run: Run) -> Any:
    from stepscope.spec import ModelShape, Workload
    from stepscope.step.builtin import build_model, choose_operations

    shape = ModelShape(
        num_layers=run.num_layers, d_model=run.d_model, num_heads=run.num_heads, num_kv_heads=run.num_kv_heads,
        d_ff=run.d_ff, vocab=run.vocab_size,
    )  # fmt: skip
    attention = {"ours": "flash"}.get(run.attention, run.attention)
    workload = Workload(model=shape, batch=run.batch, context=run.context, attention=attention)  # type: ignore[arg-type]
    return build_model(workload, shape, choose_operations(workload))
