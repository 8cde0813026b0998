"""A table as a Parquet file, with a digest, and decoded only where that cannot end the process.

Polars believes what a file says of itself. Of a damaged one it panics, which prints a backtrace and is no Exception, or
asks for more memory than there is, which ends the process without a word to Python. Of a file whose digest is known,
damage shows before it is decoded. One without, from before digests were kept, is decoded by another process first: a
third of a second, and no damage to a file can break that out of its own process.

Looking at the file's own sizes instead was tried: they are spread over its footer and every page, and what the pages
hold inside can be wrong as well.
"""

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from stepscope.recording.tables import SCHEMAS

_DIGEST_BYTES = 16
# Tables of ours reach 1.2 rows per byte: counters that are mostly zero. What says that it has more is not decoded.
_ROWS_OF_ANY_FILE, _MOST_ROWS_PER_BYTE = 1 << 20, 8
_TRIAL_BYTES, _TRIAL_BYTES_PER_BYTE = 1 << 30, 64
_TRIAL_S, _TRIAL_BYTES_PER_S = 10, 10_000_000


class DamagedTableError(Exception):
    """The file is not as it was written; the text names it and says how that shows."""


def write_table(frame: pl.DataFrame, path: Path) -> str:
    """Returns the digest of the file."""
    frame.write_parquet(path, compression="zstd", compression_level=1)
    return _digest(path)


def read_tables(paths: Mapping[str, Path], digests: Mapping[str, str]) -> dict[str, pl.DataFrame]:
    """Tables by name, their columns as they stand in the files. Raises DamagedTableError, or OSError."""
    for name, path in paths.items():
        if name in digests and _digest(path) != digests[name]:
            raise DamagedTableError(f"`{path.name}`: it was changed or damaged after it was written")
    _require_survival([path for name, path in paths.items() if name not in digests])
    return {name: _decode(name, path) for name, path in paths.items()}


def pack(frame: pl.DataFrame, path: Path) -> None:
    """A file of its own kind, digest first, for what is kept for the next look alone."""
    write_table(frame, path)
    content = path.read_bytes()
    path.write_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content)


def unpack(path: Path) -> pl.DataFrame:
    """Raises DamagedTableError, or OSError."""
    packed = path.read_bytes()
    content = packed[_DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != packed[:_DIGEST_BYTES]:
        raise DamagedTableError(f"`{path.name}` is not as it was written")
    return pl.read_parquet(content)


def try_decoding(paths: Sequence[str]) -> None:
    """In a process of its own: names each file before it is decoded. What polars itself refuses is left to the one
    that asked, which meets it again."""
    size = sum(Path(path).stat().st_size for path in paths)
    limit = _TRIAL_BYTES + _TRIAL_BYTES_PER_BYTE * size
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for path in paths:
        sys.stdout.write(f"{Path(path).name}\n")
        sys.stdout.flush()
        try:
            _decode(Path(path).stem, Path(path))
        except DamagedTableError:
            return


def _decode(name: str, path: Path) -> pl.DataFrame:
    try:
        rows = pl.scan_parquet(path).select(pl.len()).collect().item()
        if rows > _ROWS_OF_ANY_FILE + _MOST_ROWS_PER_BYTE * path.stat().st_size:
            raise DamagedTableError(f"`{path.name}`: it cannot hold {rows:,} rows in {path.stat().st_size:,} bytes")
        columns = list(SCHEMAS[name])
        return pl.read_parquet(path, columns=columns).select(columns)
    except pl.exceptions.PolarsError as error:
        raise DamagedTableError(f"`{path.name}`: {str(error).partition(chr(10))[0][:200]}") from None


def _require_survival(paths: list[Path]) -> None:
    if not paths:
        return
    code = "import sys; from stepscope.recording.parquet import try_decoding; try_decoding(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code, *(str(path.absolute()) for path in paths)]
    seconds = _TRIAL_S + sum(path.stat().st_size for path in paths) / _TRIAL_BYTES_PER_S
    environment = os.environ | {"POLARS_MAX_THREADS": "1"}
    try:
        tried = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, timeout=seconds, check=False
        )
        said, survived = tried.stdout, tried.returncode == 0
    except subprocess.TimeoutExpired as late:
        said, survived = late.stdout or b"", False
    if not survived:
        last = said.decode().splitlines()[-1:] or [paths[0].name]
        raise DamagedTableError(f"`{last[0]}`: it cannot be decoded")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
