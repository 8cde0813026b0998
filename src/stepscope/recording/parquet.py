"""Tables as Parquet files with a digest, decoded only if that cannot crash the process.

Polars trusts what a file says about itself. On a damaged file it panics, which prints a backtrace and is not an
`Exception`, or allocates more memory than there is, which kills the process. A digest detects damage before decoding.
Files without a digest, from earlier versions, are first decoded in another process, which takes a third of a second and
contains any crash.

Checking the sizes in the file instead was tried: they are spread over the footer and every page, and the contents of
the pages can be wrong too.
"""

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from stepscope.recording.tables import SCHEMAS, TABLES, conform

_DIGEST_BYTES = 16
# Real tables reach 1.2 rows per byte: counters that are mostly zero. A file that claims many more is not decoded.
_ROWS_OF_ANY_FILE, _MOST_ROWS_PER_BYTE = 1 << 20, 8
_TRIAL_BYTES, _TRIAL_BYTES_PER_BYTE = 1 << 30, 64
_TRIAL_S, _TRIAL_BYTES_PER_S = 10, 10_000_000


class DamagedTableError(Exception):
    """The file is not as it was written; the message names it and says what is wrong."""


def write_table(frame: pl.DataFrame, path: Path) -> str:
    """Write a table and return the digest of the file."""
    frame.write_parquet(path, compression="zstd", compression_level=1)
    return _digest(path)


def read_tables(paths: Mapping[str, Path], digests: Mapping[str, str]) -> dict[str, pl.DataFrame]:
    """Return the tables by name, unchecked. Raise DamagedTableError or OSError."""
    for name, path in paths.items():
        if name in digests and _digest(path) != digests[name]:
            raise DamagedTableError(f"`{path.name}`: changed or damaged after it was written")
    _require_survival([path for name, path in paths.items() if name not in digests])
    return {name: _decode(name, path) for name, path in paths.items()}


def pack(frame: pl.DataFrame, path: Path) -> None:
    """Write a private cache file: the digest, then the Parquet data."""
    write_table(frame, path)
    content = path.read_bytes()
    path.write_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content)


def unpack(path: Path) -> pl.DataFrame:
    """Read a file that `pack` wrote. Raise DamagedTableError or OSError."""
    packed = path.read_bytes()
    content = packed[_DIGEST_BYTES:]
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() != packed[:_DIGEST_BYTES]:
        raise DamagedTableError(f"`{path.name}`: changed or damaged after it was written")
    return pl.read_parquet(content)


def try_decoding(paths: Sequence[str]) -> None:
    """Decode files in a separate process, printing the name of each before decoding it. Errors that polars raises are
    ignored here: the caller gets them when it decodes the file itself."""
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
        scanned = pl.scan_parquet(path)
        rows = scanned.select(pl.len()).collect().item()
        if rows > _ROWS_OF_ANY_FILE + _MOST_ROWS_PER_BYTE * path.stat().st_size:
            raise DamagedTableError(f"`{path.name}`: {rows:,} rows do not fit in {path.stat().st_size:,} bytes")
        written = set(scanned.collect_schema())
        new = [column for column, rule in TABLES[name].items() if rule.is_new and column not in written]
        columns = [column for column in SCHEMAS[name] if column not in new]
        frame = pl.read_parquet(path, columns=columns).select(columns)
        return conform(name, frame) if new else frame
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
        raise DamagedTableError(f"`{last[0]}`: cannot be decoded")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
