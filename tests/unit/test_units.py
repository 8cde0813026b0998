"""Numbers in words."""

import pytest

from stepscope.units import say_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1023, "1023 bytes"),
        (5 * GIB + 123_456_789, "5.115 GiB"),
        (int(999.94 * 2**20), "999.9 MiB"),
        (1000 * 2**20, "1,000 MiB"),
        (1242 * GIB, "1,242 GiB"),
        (12380 * GIB, "12,380 GiB"),
    ],
)
def test_bytes_have_four_digits_and_no_exponent(size: int, said: str) -> None:
    assert say_bytes(size) == said
