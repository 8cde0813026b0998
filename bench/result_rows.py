"""Rows of a results file, for benchmarks that print their tables from one."""

import json
import sys
from pathlib import Path
from typing import Any, NoReturn


def read_rows(path: Path, benchmark: str) -> list[dict[str, Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if rows and all(row["benchmark"] == benchmark for row in rows):
            return rows
    except (OSError, ValueError, KeyError, TypeError) as problem:
        fail(f"cannot read `{path}`: {problem!r}")
    return fail(f"not a results file of this benchmark: `{path}`")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
