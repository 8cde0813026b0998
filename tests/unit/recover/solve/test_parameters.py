"""The exact parameters of known models."""

from stepscope.recover.shape import Core
from stepscope.recover.solve.parameters import Style, itemise, total

GPT2 = Style(
    norm="layer",
    has_rotary=False,
    positions=1024,
    has_projection_bias=True,
    has_output_bias=True,
    has_feed_forward_bias=True,
    has_head_norms=False,
    is_tied=True,
    is_gated=False,
)
LLAMA = Style(
    norm="rms",
    has_rotary=True,
    positions=0,
    has_projection_bias=False,
    has_output_bias=False,
    has_feed_forward_bias=False,
    has_head_norms=False,
    is_tied=False,
    is_gated=True,
)


def _core(d_model: int, heads: int, kv_heads: int, d_head: int) -> Core:
    return Core(batch=1, context=1, d_model=d_model, num_heads=heads, num_kv_heads=kv_heads, d_head=d_head)


def test_gpt2_small() -> None:
    items = itemise(_core(768, 12, 12, 64), num_layers=12, d_ff=3072, vocab_size=50257, style=GPT2)
    assert total(items) == 124_439_808
    counts = {item.name: item.count for item in items}
    assert counts["feed-forward biases"] == 12 * (3072 + 768)
    assert counts["last norm"] == 2 * 768


def test_llama_3_8b() -> None:
    items = itemise(_core(4096, 32, 8, 128), num_layers=32, d_ff=14336, vocab_size=128256, style=LLAMA)
    assert total(items) == 8_030_261_248
