"""Tiles that `tune` found on the user's own GPU, kept in `tiles.json` in the user's cache folder, by the GPU's name.

They come before the table in `tiles.py`. Nothing is measured when a kernel first runs: a file that is not there is the
usual case, and one that cannot be read is an error, because to pass over it would run other tiles than the user chose.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import decode, read_plain, write_atomically, writing
from stepscope.folders import cache_folder
from stepscope.kernels.attention.tiles import Tile, TileKey


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the file."""

    gpu: str
    key: TileKey
    tile: Tile


def tiles_path() -> Path:
    return cache_folder() / "tiles.json"


@cache
def tuned_tiles(gpu: str) -> Mapping[TileKey, Tile]:
    """What was found for this GPU, read once in a process."""
    return {entry.key: entry.tile for entry in _read(tiles_path()) if entry.gpu == gpu}


def keep(gpu: str, found: Mapping[TileKey, Tile]) -> Path:
    """Write what was found for this GPU over what was known of the same keys; returns the file."""
    path = tiles_path()
    known = {(entry.gpu, entry.key): entry for entry in _read(path)}
    known |= {(gpu, key): _Entry(gpu=gpu, key=key, tile=tile) for key, tile in found.items()}
    with writing(path, if_full="the tiles are not kept", hint="STEPSCOPE_CACHE=FOLDER stepscope tune"):
        write_atomically(path, msgspec.json.format(msgspec.json.encode(list(known.values())), indent=1))
    tuned_tiles.cache_clear()
    return path


def _read(path: Path) -> list[_Entry]:
    try:
        return decode(read_plain(path), list[_Entry])
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, msgspec.DecodeError) as problem:
        raise StepscopeError(
            f"cannot read the tuned tiles: `{path}`",
            detail=str(problem),
            hint=f"rm {path}    # the built-in tiles are used again",
        ) from problem
