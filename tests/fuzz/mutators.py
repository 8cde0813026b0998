"""Mutators by format: each takes the bytes of a valid file and a random generator, and returns damaged bytes.

Half of all damage happens to values (a later version, another tool, a manual edit) and half to bytes (a disk, a
transfer, an attacker). So most formats are decoded, changed in a few places and encoded again; the rest of the time,
bytes are changed in place.
"""

import csv
import gzip
import io
import json
import math
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from random import Random
from typing import Any

import polars as pl

DEEP = 100_000  # levels: far beyond the limit of any recursive parser
LONG = 5_000
_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30),
    *(0.5, -0.0, -1.5, 1e-320, 1e19, 1e308, math.nan, math.inf, -math.inf),
)
_TEXTS = (
    *("", "x", " ", "0", "-1", "1e999", "nan", "true", "9" * LONG, "a" * LONG, "\x00", "\x1b[31m", "\u202ereversed"),
    *("\ud800", "=1+1", "cuda:99", "fp8", "a\nb", "../../x", "\N{SNOWMAN}", "module:" + "9" * LONG, "step:-1"),
)
_STRUCTURES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], [1, "a"], {"a": {}}, [0] * 1000, [[2**40] * 4])
_MARK = "deep-nesting-goes-here"
_DEEP_TEXTS = ("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * DEEP, "[" * 600 + "]" * 600)


def mutate(name: str, content: bytes, chance: Random) -> bytes:
    """Return damaged bytes for the file `name`, whose suffix defines the format."""
    if name.endswith(".gz"):
        if chance.random() < 0.2:
            return damage_bytes(content, chance)
        return gzip.compress(mutate(name.removesuffix(".gz"), gzip.decompress(content), chance), 1, mtime=0)
    if chance.random() < 0.15:
        return damage_bytes(content, chance)
    by_ending: dict[str, Callable[[bytes, Random], bytes]] = {
        "json": damage_json,
        "jsonl": damage_lines,
        "csv": damage_csv,
        "sqlite": damage_sqlite,
        "pickle": damage_pickle,
        "parquet": damage_parquet,
        "toml": damage_toml,
    }
    return by_ending.get(name.rpartition(".")[2], damage_bytes)(content, chance)


# --- Bytes ------------------------------------------------------------------------------------------------------------


def damage_bytes(content: bytes, chance: Random) -> bytes:
    if not content:
        return b"\x00"
    data = bytearray(content)
    at = chance.randrange(len(data))
    length = min(chance.choice((1, 2, 8, 64, 1000)), len(data) - at)
    match chance.randrange(8):
        case 0:
            del data[at:]
        case 1:
            for _ in range(chance.choice((1, 4, 32))):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 2:
            data[at : at + length] = chance.randbytes(length)
        case 3:
            data[at:at] = chance.choice((b"\xff\xfe", b"\xc3\x28", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf"))
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = data[at : at + length]
        case 6:
            data[at:at] = chance.choice(_DEEP_TEXTS).encode()
        case _:
            data[at : at + length] = b"\x00" * length
    return bytes(data)


# --- Trees: JSON and pickles ------------------------------------------------------------------------------------------


def damage_json(content: bytes, chance: Random) -> bytes:
    tree = [json.loads(content)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage_tree(tree, chance, (*_NUMBERS, *_TEXTS, *_STRUCTURES, 10**400, _MARK))
    return _encode(tree[0], chance)


def damage_lines(content: bytes, chance: Random) -> bytes:
    lines = content.splitlines()
    at = chance.randrange(len(lines))
    match chance.randrange(8):
        case 0:
            lines.insert(at, lines[chance.randrange(len(lines))])
        case 1:
            del lines[at]
        case 2:
            lines[at] = damage_bytes(lines[at], chance)
        case _:
            lines[at] = damage_json(lines[at], chance)
    return b"".join(line + b"\n" for line in lines)


def damage_pickle(content: bytes, chance: Random) -> bytes:
    tree = [pickle.loads(content)]
    more: tuple[Any, ...] = (b"", b"\xff" * 10, (), (1, 2), {1, 2}, 1j, bytearray(b"a"), 2**200, {(1, 2): 3}, {None: 1})
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage_tree(tree, chance, (*_NUMBERS, *_TEXTS, *_STRUCTURES, *more))
    return pickle.dumps(tree[0], protocol=chance.randrange(2, 6))


def _damage_tree(tree: list[Any], chance: Random, values: tuple[Any, ...]) -> None:
    places = _places(tree)
    container, key = chance.choice(places)
    value = container[key]
    match chance.randrange(10):
        case 0 if container is not tree:
            del container[key]
        case 1:
            other, place = chance.choice(places)
            container[key] = other[place]
        case 2:
            other, place = chance.choice(places)
            if container is not tree and other is not tree:
                container[key], other[place] = other[place], value
        case 3 if isinstance(container, list) and container is not tree:
            container.insert(key, value)
        case 3 if isinstance(container, dict):
            container[chance.choice(("", "a", f"{key}", f"{key}_", "9" * 50))] = value
        case 4 if isinstance(value, int | float) and not isinstance(value, bool):
            container[key] = chance.choice((-value, value * 1000, value + 1, value * 10**15, float(value), str(value)))
        case 5 if isinstance(value, str):
            container[key] = chance.choice((value[:-1], value + value, value.upper(), value + "\u202e", value * 500))
        case 6 if isinstance(value, list) and value:
            container[key] = chance.choice((value[0], value[::-1], value * 20, [value], [*value, None]))
        case 7 if isinstance(container, dict):  # the same change everywhere, like in another version of a tool
            value = deepcopy(chance.choice(values))  # later changes must not affect the pool
            for other, place in places:
                if isinstance(other, dict) and place == key:
                    other[place] = value
        case _:
            container[key] = deepcopy(chance.choice(values))


def _places(tree: list[Any]) -> list[tuple[Any, Any]]:
    """Return every value in it, as container and key. Not recursive: an earlier change may have made a cycle."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [tree]
    seen = set()
    while waiting and len(found) < 20_000:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        for key in range(len(container)) if isinstance(container, list) else list(container):
            found.append((container, key))
            if isinstance(container[key], list | dict):
                waiting.append(container[key])
    return found


def _encode(tree: object, chance: Random) -> bytes:
    """Encode a tree, sometimes with a duplicate key, which no decoded object can have. A circular tree becomes text."""
    try:
        text = json.dumps(tree, ensure_ascii=chance.random() < 0.7)
    except ValueError:
        text = "{}"
    if _MARK in text:
        text = text.replace(f'"{_MARK}"', chance.choice(_DEEP_TEXTS), 1)
    if chance.random() < 0.05 and text.startswith("{") and len(text) > 2:
        first = text[1:].partition(",")[0]
        text = f"{text[:-1]}, {first}}}" if ":" in first and not first.endswith(("{", "[")) else text
    return text.encode("utf-8", "surrogatepass")


# --- Tables -----------------------------------------------------------------------------------------------------------


def damage_csv(content: bytes, chance: Random) -> bytes:
    text = content.decode()
    head, quote, body = text.partition('"')
    rows = list(csv.reader(io.StringIO(quote + body)))
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage_cells(rows, chance)
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    whole = head + written.getvalue()
    if chance.random() < 0.1:
        at = whole.find('"', chance.randrange(max(1, len(whole))))
        whole = whole[:at] + whole[at + 1 :]
    return whole.encode("utf-8", "surrogatepass")


def _damage_cells(rows: list[list[str]], chance: Random) -> None:
    if len(rows) < 3:
        rows.append(["x"])
    at = chance.randrange(len(rows))
    column = chance.randrange(max(1, len(rows[0])))
    cells = ("", "inf", "-inf", "nan", "1e999", "1e308", "-1", "0", "n/a", "1,234", "9" * 400, "0x10", "(1, 1", *_TEXTS)
    match chance.randrange(9):
        case 0:
            for row in rows:
                del row[column : column + 1]
        case 1:
            rows.insert(at, list(rows[at]))
        case 2:
            del rows[at]
        case 3:
            rows[1] = [chance.choice(("", "second", "byte", "%", "furlong", "nsecond", cell)) for cell in rows[1]]
        case 4:
            value = chance.choice(cells)
            for row in rows[2:]:
                row[column : column + 1] = [value]
        case 5:
            other = chance.randrange(max(1, len(rows[0])))
            if max(column, other) < len(rows[0]):
                rows[0][column], rows[0][other] = rows[0][other], rows[0][column]
        case 6:
            rows[at] = rows[at][:column]
        case _:
            rows[at][column : column + 1] = [chance.choice(cells)]


def damage_sqlite(content: bytes, chance: Random) -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(content)
        for _ in range(chance.choice((1, 1, 2, 4))):
            _damage_database(connection, chance)
        connection.commit()
        return connection.serialize()


def _damage_database(connection: sqlite3.Connection, chance: Random) -> None:
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
    if not names:
        return
    table = chance.choice(names)
    columns = [column for _, column, *_ in connection.execute(f'PRAGMA table_info("{table}")')]
    column = chance.choice(columns)
    numbers = tuple(one for one in _NUMBERS if isinstance(one, float) or abs(one) < 2**63)
    texts = tuple(text for text in _TEXTS if text != "\ud800")
    value = chance.choice((None, *numbers, *texts, b"\xff\xfe", b""))
    match chance.randrange(8):
        case 0:
            connection.execute(f'DROP TABLE "{table}"')
        case 1 if len(columns) > 1:
            connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
        case 2:
            connection.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}_"')
        case 3:
            connection.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
        case 4:
            connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
        case 5:
            connection.execute(f'DELETE FROM "{table}" WHERE rowid % 2 = ?', (chance.randrange(2),))
        case _:
            query = f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = 1 + ? % (SELECT COUNT(*) FROM "{table}")'
            connection.execute(query, (value, chance.randrange(100)))


def damage_parquet(content: bytes, chance: Random) -> bytes:
    frame = pl.read_parquet(io.BytesIO(content))
    for _ in range(chance.choice((1, 1, 2, 3))):
        frame = _damage_frame(frame, chance)
    written = io.BytesIO()
    frame.write_parquet(written, compression="zstd", compression_level=1)
    return written.getvalue()


def _damage_frame(frame: pl.DataFrame, chance: Random) -> pl.DataFrame:
    if not frame.width:
        return pl.DataFrame({"a": [1]})
    name = chance.choice(frame.columns)
    column = frame[name]
    match chance.randrange(10):
        case 0:
            return frame.drop(name)
        case 1:
            return frame.with_columns(pl.lit(1).alias(chance.choice(("more", "", f"{name}_", "9"))))
        case 2:
            return frame.rename({name: f"{name}{'_' * frame.width}"})
        case 3:
            others: tuple[Any, ...] = ("x", "1", 1.5, -1, True, None, b"a", [1], ["a"], {"a": 1}, math.nan)
            return frame.with_columns(pl.Series(name, [chance.choice(others)] * frame.height))
        case 4:
            kinds = (pl.Int8, pl.Int16, pl.UInt32, pl.UInt64, pl.Float32)
            if column.dtype.is_numeric():
                return frame.with_columns(column.cast(chance.choice(kinds), strict=False))
        case 5:
            return frame.sample(
                frame.height * chance.choice((1, 3)), with_replacement=True, seed=chance.randrange(2**31)
            )
        case 6:
            return frame.clear() if chance.random() < 0.3 else frame.reverse()
    values = column.to_list()
    fitting: list[Any] = [None]
    if column.dtype.is_integer():
        fitting += [0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 2**40, -5]
    elif column.dtype.is_float():
        fitting += [value for value in _NUMBERS if isinstance(value, float)]
    elif column.dtype == pl.String:
        fitting += [*(text for text in _TEXTS if text != "\ud800"), "[" * 5000, "[[1, 2], 3]", '{"a": 1}', "[[true]]"]
    elif column.dtype == pl.Boolean:
        fitting += [True, False]
    for _ in range(chance.choice((1, 1, 3, len(values)))):
        if values:
            value = chance.choice(fitting)
            values[chance.randrange(len(values))] = value
    kept = pl.Series(name, values, dtype=column.dtype, strict=False)
    return frame.with_columns(kept)


def damage_toml(content: bytes, chance: Random) -> bytes:
    lines = content.decode().splitlines()
    at = chance.randrange(len(lines))
    key = lines[at].partition("=")[0]
    values = (
        *("-1", "0", "1.5", "nan", "inf", "1e999", "true", '""', '"x"', "[]", "{}", "[[1]]", "2020-01-01", "9" * LONG),
        *(f'"{"9" * LONG}"', str(2**63), str(10**30), "'=1+1'", "[" * 500 + "]" * 500, "[1, 'a', 2]", '"\\u202e"'),
        *("{a = {b = 1}}", "0x7fffffffffffffffffff", '"""a\nb"""'),
    )
    match chance.randrange(7):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            name = chance.choice(("unknown", '""', "a.b.c", "set", "size"))
            lines[at] = f"{name} = {chance.choice(values)}"
        case 3:
            lines.insert(at, chance.choice(("[set]", "[[a]]", "[a", "= 1", "# \udc80", "a = [" + "[" * DEEP)))
        case _:
            lines[at] = f"{key}= {chance.choice(values)}"
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")
