"""The commands in the documentation run, in the order in which a reader would type them.

A fence marked `console` holds commands after `$ `; one marked with `title=NAME` is a file that they need. Commands that
take a GPU or hours are in fences marked `sh`. The Python of `python.md` is one script.
"""

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt

from tests.cli.command import PATIENCE_S, stepscope

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?stepscope ([a-z]+)(.*)$", re.MULTILINE)
SCRIPT = re.compile(r"(?<=\s)(?:\S+\.py|-m \S+)")  # of `stepscope run`; what follows belongs to the script
# What a browser would fetch from the network: scripts, images and style sheets, but not links that a reader follows.
FETCHED = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']*""")
FETCHED_BY_STYLE = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//""")

# What a course hands out, as far as the page needs it: the real package is the reader's.
COURSE_MODEL = """
from stepscope.nn import TransformerLM

class BasicsTransformerLM(TransformerLM):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta):
        super().__init__(vocab=vocab_size, max_context=context_length, d_model=d_model, num_layers=num_layers,
                         num_heads=num_heads, d_ff=d_ff, rope_theta=rope_theta)
"""


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


PROGRAMS = {"stepscope": stepscope, "python": python}


def commands(page: Path) -> list[str]:
    consoles = [body for kind, _, body in FENCE.findall(page.read_text()) if kind == "console"]
    return [line[2:] for body in consoles for line in body.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.timeout(600)
def test_commands_of_a_docs_page_run(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "docs/examples")
    (tmp_path / "cs336_basics").mkdir()
    (tmp_path / "cs336_basics/model.py").write_text(COURSE_MODEL)
    for _, title, body in FENCE.findall(page.read_text()):
        if title:
            (tmp_path / title).write_text(body)
    for command in commands(page):
        program, *arguments = shlex.split(command)
        done = PROGRAMS[program](tmp_path, *arguments)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(600)
def test_python_page_runs_as_one_script(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs/examples", tmp_path / "docs/examples")
    page = (ROOT / "docs/python.md").read_text()
    script = "\n".join(body for kind, title, body in FENCE.findall(page) if kind == "python" and not title)
    assert script.startswith("import stepscope")
    done = python(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.html")} == {"report.html", "both.html"}
    assert (tmp_path / "runs/bench/results.jsonl").exists()


@pytest.mark.timeout(600)
def test_quoted_tables_are_what_the_commands_print() -> None:
    page = (ROOT / "docs/worked-example.md").read_text()
    fill_in = runpy.run_path(str(ROOT / "tools/quoted_output.py"))["fill_in"]
    assert page == fill_in(page), "out of date: python tools/quoted_output.py"


def test_every_verb_has_a_page_with_commands() -> None:
    from stepscope.cli.main import app

    verbs = [command.name for command in app.registered_commands]
    assert verbs
    for verb in verbs:
        assert any(f"stepscope {verb}" in line for line in commands(ROOT / "docs" / f"{verb}.md"))


def code_of(page: Path) -> Iterator[str]:
    """What a page shows as commands: fences of a shell, and code in running text."""
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        if token.type == "fence" and token.info.split()[:1] in (["sh"], ["console"]):
            yield token.content
        yield from (inline.content for inline in token.children or [] if inline.type == "code_inline")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    """Also those that are not run: verbs and flags in running text and in fences marked `sh`."""
    from stepscope.cli.main import app

    verbs = typer.main.get_group(app).commands
    for verb, rest in COMMAND.findall("\n".join(code_of(page))):
        assert verb in verbs, f"{page.name} names `stepscope {verb}`"
        flags = {flag for option in verbs[verb].params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
        own = SCRIPT.split(rest)[0] if verb == "run" else rest
        unknown = set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", own.partition(" #")[0])) - flags
        assert not unknown, f"{page.name}: `stepscope {verb}` does not take {unknown}"


@pytest.mark.timeout(600)
def test_site_builds_offline_without_warnings(tmp_path: Path) -> None:
    """Sphinx resolves links itself: a dead link, a missing anchor or a page outside the navigation is a warning."""
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-d", str(tmp_path / "state"), "docs"]
    done = subprocess.run(
        [*build, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    assert {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert {name: found for name, text in pages.items() if (found := FETCHED.findall(text))} == {}
    styles = list((tmp_path / "site/_static").rglob("*.css"))
    assert styles
    assert [sheet.name for sheet in styles if FETCHED_BY_STYLE.search(sheet.read_text())] == []
