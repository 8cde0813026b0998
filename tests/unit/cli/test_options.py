"""Flags that may be given without a value."""

import pytest

from stepscope.cli.options import fill_bare_flags


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["bench", "--compile"], ["bench", "--compile=yes"]),
        (["bench", "--compile", "--size", "nano"], ["bench", "--compile=yes", "--size", "nano"]),
        (["bench", "--compile", "no,yes"], ["bench", "--compile", "no,yes"]),
        (["bench", "--compile=no"], ["bench", "--compile=no"]),
        (["bench", "--tie-embeddings", "-h"], ["bench", "--tie-embeddings=yes", "-h"]),
        (["bench", "--retry"], ["bench", "--retry=failed"]),
        (["comm", "--retry", "doubtful"], ["comm", "--retry", "doubtful"]),
        ([], []),
    ],
)
def test_flag_without_a_value_gets_its_default(given: list[str], meant: list[str]) -> None:
    assert fill_bare_flags(given) == meant
