"""Lists every sentence a person reads, and finds phrases this project does not use: `python tools/voice.py --check`.

    python tools/voice.py                            # every string of src: file, line, kind, text
    python tools/voice.py --kind docstring src/stepscope/cli
    python tools/voice.py --sample 200 --seed 7      # a random sample to read aloud
    python tools/voice.py --check                    # exits 1 and names what PHRASES rules out

Python is read with `ast` and `tokenize`, Markdown with markdown-it, scripts and style sheets with one pattern. A string
counts as a sentence if it has two words with a space between them: names, codes and keys are left out.
"""

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PLACES = ("src", "README.md", "CHANGELOG.md", "docs", "Makefile", "tests", "bench", "tools")

# What is not written here, with what to write instead. Each was once in the product and made somebody stumble.
PHRASES = {
    r"(?:kernels|launches|calls|copies|tokens|bytes|[KMGT]i?B|FLOPs?|ms|µs|times|once|\d|\}) an? "
    r"(?:step|second|parameter|token|rank|layer|kernel|element|iteration)\b": "per step, per second, per parameter",
    r"(?<!there )\bis no (?!longer\b|more than\b|less than\b|faster\b|slower\b|greater\b)": "is not a",
    r"\bare no (?!longer\b|more than\b)(?=\w+s\b)": "are not",
    r"\b(?:is|are) of (?!interest\b|the form\b)": "belongs to, holds, needs",
    r"(?<!there )\b(?:is|are) nothing\b": "is not",
    r"\bbeside\b": "next to, compared with, in addition to",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bwhoever\b|\bwhosoever\b|\bwherein\b|\bwhereof\b|\bthereof\b": "who, where, which",
    r"\b(?:goes|go|went|going|gone) on (?:from|with|to|as|where)\b": "resumes from, continues",
    r"\bto doubt\b": "unreliable, noisy",
    r"\bwas not looked for\b": "was not measured",
    r"\bmatrix products?\b": "GEMM",
    r"(?<![\w.:/`_-])gemms?(?![\w:/`_.-])": "GEMM",
    r"\bwarm ?ups?\b(?! must)": "warm-up steps",
    r"(?<=[\d}]) %": "18%, without a space",
    r"\bhost is away\b": "CPU stall",
    r"\bfolders?\b": "directory",
    r"\bhand(?:s|ed)? back\b|\bgives? back\b": "return",
    r"\bas people (?:count|say|call)\b": "say it directly",
    r"\b1 (?:chains|kernels|steps|cases|files|layers|ranks)\b": "one chain",
    r"\bso called\b|\bso-called\b": "say the name",
    r"\bheld against\b": "compared with",
    r"\btold apart\b|\btells? apart\b": "distinguished",
    r"(?<!the )\b(?:in|out)side of\b": "inside, outside",
    r"\bmost usual\b|\bby custom\b|\bfor want of\b": "usual, by default, without",
    r"\bset aside\b": "skipped, ignored",
    r"(?<!retry )\bdoubtful\b|\bin doubt\b": "unreliable",
    r"\bclosed form and\b|\bwhat autograd keeps\b": "saved for backward",
}


class Sentence(NamedTuple):
    path: str
    line: int
    kind: str
    text: str


def read(path: Path) -> Iterator[Sentence]:
    """What a person reads in one file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".py":
        found = _read_python(text)
    elif path.suffix == ".md":
        found = _read_markdown(text)
    elif path.suffix in (".js", ".css"):
        found = _read_script(text)
    else:
        found = _read_makefile(text)
    for line, kind, said in found:
        words = " ".join(said.split())
        if kind == "test" or re.search(r"[A-Za-z]{2,}\W* +\W*[A-Za-z]{2,}", words):
            yield Sentence(name, line, kind, words)


def _read_python(text: str) -> Iterator[tuple[int, str, str]]:
    tree = ast.parse(text)
    yield from _read_strings(tree)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:noqa|type:|fmt:|!)", token.string):
            yield token.start[0], "comment", token.string.lstrip("# ")


def _read_strings(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    docstrings: set[int] = set()
    inside: set[int] = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, "test", node.name.removeprefix("test_").replace("_", " ")
        if isinstance(node, ast.JoinedStr):
            inside.update(id(child) for child in ast.walk(node) if child is not node)
            yield node.lineno, "string", _spell(node)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, "docstring" if id(node) in docstrings else "string", node.value


def _spell(node: ast.JoinedStr) -> str:
    """An f-string as in its source: `{count} kernels per step`."""
    parts = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            parts.append(str(value.value))
        elif isinstance(value, ast.FormattedValue):
            parts.append("{" + ast.unparse(value.value) + "}")
    return "".join(parts)


def _read_markdown(text: str) -> Iterator[tuple[int, str, str]]:
    for token in MarkdownIt().enable("table").parse(text):
        if token.type == "inline" and token.map:
            yield token.map[0] + 1, "prose", "".join(map(_spell_markdown, token.children or ()))


def _spell_markdown(token: Token) -> str:
    if token.type == "code_inline":
        return f"`{token.content}`"
    return token.content if token.type == "text" else " " * (token.type == "softbreak")


def _read_script(text: str) -> Iterator[tuple[int, str, str]]:
    pattern = re.compile(
        r"/\*(.*?)\*/|(?<![:'\"`])//([^\n]*)|'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"|`([^`]*)`", re.S
    )
    for match in pattern.finditer(text):
        comment = match[1] or match[2]
        said = comment or match[3] or match[4] or match[5] or ""
        yield text.count("\n", 0, match.start()) + 1, "comment" if comment else "script", said


def _read_makefile(text: str) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"#+ ?(.*)|echo '(.*?)'", line):
            yield number, "string" if "##" in line or match[2] else "comment", match[1] or match[2]


def list_sentences(places: list[str]) -> Iterator[Sentence]:
    for place in places:
        path = (ROOT / place).resolve()
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            if (file.suffix in (".py", ".md", ".js", ".css") or file.name == "Makefile") and file.name != "voice.py":
                yield from read(file)


def find_phrases(sentence: Sentence) -> Iterator[tuple[str, str]]:
    """What the sentence says that PHRASES rules out, and what to write instead."""
    prose = re.sub(r"\{[^{}]*\}", "{}", re.sub(r"`[^`]*`", "`…`", sentence.text))
    for pattern, instead in PHRASES.items():
        # The name of a function has no capitals and no hyphens.
        if (match := re.search(pattern, prose)) and not (
            sentence.kind == "test" and match[0] in ("gemm", "gemms", "warm up")
        ):
            yield match[0], instead


def main() -> int:
    parser = argparse.ArgumentParser(description="every sentence a person reads, and the phrases not to use")
    parser.add_argument(
        "places", nargs="*", default=list(PLACES), help="files or directories, from the root of the project"
    )
    parser.add_argument(
        "--kind", action="append", help="string, docstring, comment, test, prose or script; may be repeated"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="print N at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="print what PHRASES rules out, and exit 1 if there is any")
    options = parser.parse_args()
    found = [one for one in list_sentences(options.places) if not options.kind or one.kind in options.kind]
    if options.check:
        # What tests feed to the product is not what the product says.
        said_by_us = [one for one in found if not (one.path.startswith("tests/") and one.kind == "string")]
        marks = [(one, said, instead) for one in said_by_us for said, instead in find_phrases(one)]
        for one, said, instead in marks:
            print(f"{one.path}:{one.line}: {one.kind}: `{said}` (write: {instead}) in: {one.text[:160]}")
        return int(bool(marks))
    if options.sample is not None:
        found = random.Random(options.seed).sample(found, min(options.sample, len(found)))
    for one in found:
        print(f"{one.path}:{one.line}\t{one.kind}\t{one.text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
