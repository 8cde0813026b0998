"""How usual sizes are. It ranks what the evidence leaves open, and never decides anything alone.

The figure is a sum of surprises: nought for a model like those that people publish, more the odder it is.
"""

from stepscope.recover.shape import Core

_VOCABULARIES = frozenset((32_000, 50_257, 50_304, 128_256, 151_936, 256_000))
_OTHER_VOCABULARIES = frozenset(
    (10_000, 32_064, 32_768, 49_152, 50_272, 50_280, 50_432, 51_200, 64_000, 65_024, 92_544, 100_277, 100_352, 128_000,
     129_280, 151_552, 151_643, 152_064, 200_019, 262_144)
)  # fmt: skip


def surprise(core: Core) -> float:
    return (
        surprise_of_heads(core.batch, core.num_heads, core.d_head, core.context)
        + _of_groups(core.num_heads, core.num_kv_heads)
        + (0.0 if core.query_width == core.d_model else 2.5)
        + _of_width(core.d_model)
    )


def surprise_of_heads(batch: int, num_heads: int, d_head: int, context: int) -> float:
    odd = (0.5 if num_heads % 2 else 0.0) + (1.0 if num_heads > 128 else 0.0)
    return _of_head(d_head) + _of_context(context) + _of_batch(batch) + odd


def surprise_of_feed_forward(d_ff: int, d_model: int, *, gated: bool) -> float:
    usual = {4 * d_model, 8 * d_model // 3, 7 * d_model // 2}
    rounded = {-(-size // unit) * unit for size in usual for unit in (1, 64, 128, 256)}
    near = 0.0 if d_ff == 4 * d_model and not gated else 0.3 if d_ff in rounded else 1.0
    return near + _evenness(d_ff)


def surprise_of_vocabulary(size: int) -> float:
    known = 0.0 if size in _VOCABULARIES else 0.2
    return known if size in _VOCABULARIES | _OTHER_VOCABULARIES else 0.8 + _evenness(size) / 2


def _of_head(size: int) -> float:
    if size in (64, 128):
        return 0.0
    if size in (32, 80, 96, 256):
        return 0.7
    return 1.5 + (0.0 if size % 8 == 0 else 2.0) + (1.0 if size < 16 else 0.0)


def _of_groups(heads: int, kv_heads: int) -> float:
    if kv_heads == heads:
        return 0.0
    return 0.4 if (heads // kv_heads) in (2, 3, 4, 5, 6, 7, 8, 16) else 1.5


def _of_width(width: int) -> float:
    return _evenness(width)


def _of_context(context: int) -> float:
    if context & (context - 1) == 0:
        return 0.0 if context >= 64 else 1.0
    return 0.4 if context % 64 == 0 else 0.7 if context % 8 == 0 else 1.2


def _of_batch(batch: int) -> float:
    size = 0.0 if batch <= 64 else 0.8 if batch <= 512 else 2.0
    return size + (0.0 if batch & (batch - 1) == 0 else 0.3)


def _evenness(size: int) -> float:
    for step, cost in ((256, 0.0), (128, 0.1), (64, 0.2), (32, 0.6), (16, 0.9), (8, 1.2), (2, 1.8)):
        if size % step == 0:
            return cost
    return 2.4
