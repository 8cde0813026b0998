"""The summary compared with NumPy-style quantiles calculated by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.explain.statistics import summarise


def test_quantiles_interpolate_between_neighbors() -> None:
    summary = summarise([4.0, 1.0, 3.0, 2.0])
    assert (summary.min, summary.max, summary.median) == (1.0, 4.0, 2.5)
    assert summary.p20 == pytest.approx(1.6)
    assert summary.p80 == pytest.approx(3.4)
    assert summary.mean == 2.5
    assert summary.sd == pytest.approx((5 / 3) ** 0.5)
    assert summary.spread == pytest.approx(1.8 / 2.5)


def test_one_sample_has_no_deviation() -> None:
    assert summarise([7.0]).sd is None


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        summarise([])


@given(st.lists(st.integers(1, 10**12), min_size=1))
def test_order_of_quantiles(samples: list[int]) -> None:
    s = summarise(samples)
    assert s.min <= s.p20 <= s.median <= s.p80 <= s.max
