"""Settings of runs that do not know their own, from a file: names of runs, and under each what it was."""

from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, open_plain
from stepscope.recover.study.runs import Settings

_MOST_BYTES = 16 * 2**20
_EXAMPLE = '{"a": {"d_model": 768, "num_heads": 12, "context": 128}}, where the counters are in a.csv.gz'


def read_truths(path: Path) -> dict[str, Settings]:
    """By name of the run, without folder and endings."""
    with open_plain(path, what="a file of settings") as (file, _):
        content = file.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise msgspec.DecodeError(f"more than {_MOST_BYTES >> 20} MiB")
        decoded = decode(content, dict[str, dict[str, object]])
    except msgspec.DecodeError as error:
        raise StepscopeError(
            f"`{path}` is no file of settings: {error}", detail=f"expected JSON such as\n{_EXAMPLE}"
        ) from None
    return dict(decoded)
