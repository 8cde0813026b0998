"""The commands in the documentation run, in the order in which a reader would type them.

A fence marked `console` holds commands after `$ `; one marked with `title=NAME` is a file that they need. Commands that
take a GPU or hours stand in fences marked `sh`. The Python of `python.md` is one script.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, stepscope

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What a course hands out, as far as the page needs it: the real package is the reader's.
COURSE_MODEL = """
from stepscope.nn import TransformerLM

class BasicsTransformerLM(TransformerLM):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__(vocab=vocab_size, max_context=context_length, d_model=d_model, num_layers=num_layers,
                         num_heads=num_heads, d_ff=d_ff, rope_theta=rope_theta)
"""


def commands(page: Path) -> list[str]:
    consoles = [body for kind, _, body in FENCE.findall(page.read_text()) if kind == "console"]
    return [line[2:] for body in consoles for line in body.splitlines() if line.startswith("$ stepscope")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.timeout(600)
def test_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "docs/examples")
    (tmp_path / "cs336_basics").mkdir()
    (tmp_path / "cs336_basics/model.py").write_text(COURSE_MODEL)
    for _, title, body in FENCE.findall(page.read_text()):
        if title:
            (tmp_path / title).write_text(body)
    for command in commands(page):
        done = stepscope(tmp_path, *shlex.split(command)[1:])
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(600)
def test_python_of_its_page_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "docs/examples")
    page = (ROOT / "docs/python.md").read_text()
    script = "\n".join(body for kind, title, body in FENCE.findall(page) if kind == "python" and not title)
    assert script.startswith("import stepscope")
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.html")} == {"report.html", "both.html"}
    assert (tmp_path / "runs/bench/results.jsonl").exists()


def test_every_verb_has_a_page_with_commands() -> None:
    from stepscope.cli.main import app

    verbs = [command.name for command in app.registered_commands]
    assert verbs
    for verb in verbs:
        assert any(f"stepscope {verb}" in line for line in commands(ROOT / "docs" / f"{verb}.md"))


def test_pages_point_at_files_that_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} points at {target}"
