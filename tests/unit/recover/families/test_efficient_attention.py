"""The model of memory-efficient attention in fp32 compared with counters, to parts per million."""

import pytest

from notes_tables import HEADS_BATCHES_LAUNCHES, NOTES, compare, predict
from stepscope.recover.families import efficient_attention
from stepscope.recover.families.efficient_attention import (
    MIDDLE,
    NARROW,
    WIDE,
    InstructionCounts,
    Mask,
    choose_variant,
    count_head,
)

# (length, hidden): operations in fp32 and fp64, fused multiply-adds in fp32 and fp64, if they were recorded.
MEASURED: dict[tuple[int, int], tuple[tuple[int | None, ...], ...]] = {
    (64, 768): ((643_694_621, 8_650_768, 37_748_744, 3_932_164),),
    (128, 768): ((1_873_521_678, 25_952_264, 100_663_295, 11_796_486), (1_873_502_200, 25_952_235)),
    (256, 768): ((6_091_597_777, 86_507_544, 301_989_882, 39_321_616),),
    (512, 768): ((21_560_524_758, 311_427_031, 1_006_632_919),),
    (1024, 768): ((80_625_502_255, 1_176_502_234),),
    (128, 192): ((1_647_049_723, 25_952_290),),
    (128, 384): ((1_647_031_317, 25_952_265),),
    (128, 1536): ((3_289_645_067, 34_603_020),),
    (128, 3072): ((5_277_745_136, 34_603_004),),
    (128, 6144): ((9_732_096_043, 34_603_067),),
}
# The accuracy of sums over rows whose maximum changes at random.
LIMIT_PPM, CHANCE_LIMIT_PPM = 2, 14
BY_CHANCE = {6_091_597_777, 21_560_524_758, 80_625_502_255, 1_647_049_723, 1_873_502_200}


def residuals_ppm() -> dict[int, float]:
    """Return the counts of a freshly computed model by measured quantity."""
    count_head.cache_clear()
    found: dict[int, float] = {}
    for (length, hidden), series in MEASURED.items():
        head = count_head(length, length, hidden // 12, mask="causal", dropout=True).times(HEADS_BATCHES_LAUNCHES)
        model = (head.fp32_operations, head.fp64_operations, head.fma, head.double_fma)
        for numbers in series:
            found |= {
                number: 1e6 * (number / expected - 1)
                for number, expected in zip(numbers, model, strict=False)
                if number is not None
            }
    return found


def exceeds(residuals: dict[int, float]) -> list[int]:
    limits = {number: CHANCE_LIMIT_PPM if number in BY_CHANCE else LIMIT_PPM for number in residuals}
    return [number for number, residual in residuals.items() if abs(residual) > limits[number]]


def test_the_model_explains_every_number_of_the_tables() -> None:
    residuals = residuals_ppm()
    assert len(residuals) == 29
    assert exceeds(residuals) == []


TERMS = (
    "_RESULTS", "_SPLIT", "_TO_BASE_2", "_ROW_SUM", "_MINUS_MAXIMUM", "_DROPPED_AT_A_TIME", "_DROPOUT_PLAIN",
    "_DROPOUT_DOUBLE_FMA", "_DROPOUT_DOUBLE_ADD", "_ROW_FMA", "_ROW_PLAIN",
)  # fmt: skip


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("change", [-1, 1])
def test_every_term_is_needed(monkeypatch: pytest.MonkeyPatch, term: str, change: int) -> None:
    monkeypatch.setattr(efficient_attention, term, getattr(efficient_attention, term) + change)
    assert exceeds(residuals_ppm())
    count_head.cache_clear()


@pytest.mark.parametrize(
    ("sizes", "mask", "plain", "fma", "tensor_ops"),
    [
        # batch, heads, length, head size; the third got its mask as a tensor
        ((1, 12, 128, 64), "causal", 2_427_133 + 543_997, 49_152, 113_246_208),
        ((2, 16, 512, 64), "causal", 77_118_979 + 15_252_995, 524_288, 3_623_878_656),
        ((2, 8, 256, 128), "tensor", 31_298_167 + 4_203_127, 131_072, 1_610_612_736),
    ],
)
def test_the_model_predicts_runs_without_dropout(
    sizes: tuple[int, int, int, int], mask: Mask, plain: int, fma: int, tensor_ops: int
) -> None:
    batch, heads, length, head_dim = sizes
    counts = count_head(length, length, head_dim, mask=mask).times(batch * heads)
    assert abs(plain / counts.plain - 1) < 10e-6
    assert (counts.fma, counts.tensor_operations) == (fma, tensor_ops)
    least, most = (count_head(length, length, head_dim, mask=mask, share=share) for share in (0.0, 1.0))
    assert least.times(batch * heads).plain < plain < most.times(batch * heads).plain


def test_the_head_size_determines_the_kernel() -> None:
    assert [choose_variant(size) for size in (16, 64, 65, 128, 129, 512)] == [
        NARROW, NARROW, MIDDLE, MIDDLE, WIDE, WIDE,
    ]  # fmt: skip
    assert (NARROW.name, MIDDLE.name, WIDE.name) == ("64x64_rf", "64x128_rf", "32x128_gmem")


def test_closed_form_of_the_narrow_kernel() -> None:
    """n tiles of queries, T = n(n+1)/2 pairs of tiles: 128·11·T in fp64, 128·(32T+16n) fused multiply-adds."""
    for tiles in (1, 3, 7):
        pairs = tiles * (tiles + 1) // 2
        counts = count_head(64 * tiles, 64 * tiles, 64, mask="causal", dropout=True)
        assert counts.fp64_operations == 128 * 11 * pairs
        assert counts.fma == 128 * (32 * pairs + 16 * tiles)


def test_counts_add_up() -> None:
    one = InstructionCounts(plain=1, fma=2, double_fma=3, double_plain=4, tensor=5)
    assert one + one == one.times(2)
    assert (one.fp32_operations, one.fp64_operations, one.tensor_operations) == (5, 10, 5 * 2048)


def test_the_table_has_model_residual_and_formula() -> None:
    table = compare()
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    assert sorted(row["measured"] for row in rows) == sorted(residuals_ppm())  # type: ignore[type-var]
    first = rows[0]
    assert (first["length"], first["width"], first["kernel"], first["counter"]) == (
        64, 768, "64x64_rf", "fp32 operations",
    )  # fmt: skip
    assert (first["model"], first["formula"], first["products"]) == (643_694_592, 6_438_912, 12_582_912)
    assert first["residual_ppm"] == pytest.approx(0.045, abs=0.001)
    assert first["ratio"] == pytest.approx(99.969, abs=0.001)
    ratios = [row[key] for row in rows for key in ("ratio", "products_ratio") if row["counter"] == "fp32 operations"]
    assert max(ratio for ratio in ratios if isinstance(ratio, float)) == pytest.approx(239.35, abs=0.01)
    assert all((row["formula"] is None) == (row["ratio"] is None) for row in rows)
    assert all(predict(note) == pytest.approx(note.measured, rel=14e-6) for note in NOTES)
