"""Fills in the tables that docs/worked-example.md quotes from commands: `python tools/quoted_output.py`.

A quote follows the fence with its command, between `<!-- output N -->` and `<!-- end of output -->`. N is the number in
a table's title, or the table's position where titles have no numbers. A test checks that the page is up to date.
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
    r"(?P<head>```sh\n(?P<command>[^\n]+)\n```\n\n<!-- output (?P<number>\d+) -->\n).*?(?P<end><!-- end of output -->)",
    re.DOTALL,
)


def fill_in(page: str) -> str:
    """Return the page with every quote replaced by what its command prints now."""
    return _QUOTE.sub(
        lambda quote: f"{quote['head']}\n{_pick(quote['command'], quote['number'])}\n\n{quote['end']}", page
    )


def _pick(command: str, number: str) -> str:
    tables = re.split(r"^(?=\*\*)", _run(command), flags=re.MULTILINE)[1:]
    numbered = [table for table in tables if table.startswith(f"**{number}. ")]
    table = numbered[0].replace(f"**{number}. ", "**", 1) if numbered else tables[int(number) - 1]
    return table.strip()


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
