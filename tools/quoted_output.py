"""Fills in the tables that docs/worked-example.md quotes from commands: `python tools/quoted_output.py`.

A quote follows the fence with its command, between `<!-- output N -->` and `<!-- end of output -->`; with `table N` it
has no notes. N is the number in a table's title, or the table's position where titles have no numbers. A test checks
that the page is up to date.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/worked-example.md"
_QUOTE = re.compile(
    r"(?P<head>```sh\n(?P<command>[^\n]+)\n```\n\n<!-- (?P<what>output|table) (?P<number>\d+) -->\n)"
    r".*?(?P<end><!-- end of output -->)",
    re.DOTALL,
)


def fill_in(page: str) -> str:
    """Return the page with every quote replaced by what its command prints now."""
    return _QUOTE.sub(_update, page)


def _update(quote: re.Match[str]) -> str:
    tables = re.split(r"^(?=\*\*)", _run(quote["command"]), flags=re.MULTILINE)[1:]
    number = f"**{quote['number']}. "
    numbered = [table for table in tables if table.startswith(number)]
    table = numbered[0].replace(number, "**", 1) if numbered else tables[int(quote["number"]) - 1]
    if quote["what"] == "table":
        table = table.partition("\n\n- ")[0]
    return f"{quote['head']}\n{table.strip()}\n\n{quote['end']}"


@cache
def _run(command: str) -> str:
    program, *arguments = shlex.split(command)
    module = ["-m", "stepscope"] if program == "stepscope" else []
    with tempfile.TemporaryDirectory() as scratch:  # in place of docs/figures: only the tables are wanted
        arguments = [scratch if argument == "docs/figures" else argument for argument in arguments]
        done = subprocess.run(
            [sys.executable, *module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=600
        )
    return done.stdout


if __name__ == "__main__":
    PAGE.write_text(fill_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
