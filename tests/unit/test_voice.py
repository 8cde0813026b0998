"""tools/voice.py reads what a person reads, and its check can fail. `make check` runs it over the whole project."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def voice() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/voice.py"))


def sentences(voice: dict[str, Any], directory: Path, name: str, text: str) -> list[tuple[str, str]]:
    voice["read"].__globals__["ROOT"] = directory
    (directory / name).write_text(text, encoding="utf-8")
    return [(one.kind, one.text) for one in voice["read"](directory / name)]


def test_python_strings_docstrings_comments_and_tests_are_listed(voice: dict[str, Any], tmp_path: Path) -> None:
    text = '''"""What it is."""
KEY = "step_ms"
def test_one_case_fails(count: int) -> str:
    # Counted per step.
    return f"{count + 1} kernels " "per step"
'''
    assert sentences(voice, tmp_path, "x.py", text) == [
        ("test", "one case fails"),
        ("string", "{count + 1} kernels per step"),
        ("docstring", "What it is."),
        ("comment", "Counted per step."),
    ]


def test_markdown_is_listed_without_its_code_blocks(voice: dict[str, Any], tmp_path: Path) -> None:
    text = "# The title\n\n```sh\nls of code\n```\n\nSome *plain* words.\n\n| a cell here | b |\n| --- | --- |\n"
    found = [words for _, words in sentences(voice, tmp_path, "x.md", text)]
    assert found == ["The title", "Some plain words.", "a cell here"]


def test_scripts_are_listed_with_their_comments(voice: dict[str, Any], tmp_path: Path) -> None:
    text = "// Drawn once per frame.\nlabel.textContent = `${count} kernels per step`; const key = 'step_ms';\n"
    assert sentences(voice, tmp_path, "x.js", text) == [
        ("comment", "Drawn once per frame."),
        ("script", "${count} kernels per step"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{count} kernels a step",
        "`x` is no directory",
        "`--perfetto` is of time",
        "shown beside the chart",
        "resumed, and goes on from step 3",
        "18 % of the step",
        "{part / whole} % of the step",
        "time in matrix products",
        "the folder is missing",
        "one gemm per layer",
    ],
)
def test_phrases_that_are_ruled_out_are_found(voice: dict[str, Any], text: str) -> None:
    assert list(voice["find_phrases"](voice["Sentence"]("x.py", 1, "string", text)))


@pytest.mark.parametrize(
    "text",
    [
        "{count} kernels per step",
        "a step that is no longer marked",
        "{folder} is not a directory",
        "`gemm` in any case",
        "besides torch, this needs numpy",
        "cutlass_80_simt_sgemm",
    ],
)
def test_plain_sentences_pass(voice: dict[str, Any], text: str) -> None:
    assert not list(voice["find_phrases"](voice["Sentence"]("x.py", 1, "string", text)))
