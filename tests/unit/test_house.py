"""What docs/architecture.md promises about the source tree: unique class names and short files."""

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepscope
from tests.cli.warm import Server

SOURCE = Path(stepscope.__file__).parent
LONGEST = 600
MOST_SIDE_BY_SIDE = 16
# One file per verb, and what verbs share.
WIDE = {"cli"}


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")


def test_a_class_name_exists_once() -> None:
    places = defaultdict(list)
    for name, text in modules():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_is_too_long() -> None:
    assert [name for name, text in modules() if text.count("\n") > LONGEST] == []


def test_no_exported_name_is_a_package() -> None:
    """Importing `stepscope.x` sets the attribute `x` of the package, and a function of that name would be gone."""
    inside = {name.split("/")[0].removesuffix(".py") for name, _ in modules()}
    imported_first = {"annotate"}  # its module defines it, and is never imported again
    assert inside & {*stepscope.__all__} == imported_first


def test_no_package_has_too_many_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for name, _ in modules():
        folder, _, file = name.rpartition("/")
        counts[folder] += file != "__init__.py"
    assert {name: count for name, count in counts.items() if count > MOST_SIDE_BY_SIDE and name not in WIDE} == {}


def test_the_map_names_every_package() -> None:
    text = (SOURCE.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    packages = {name.split("/")[-2] for name, _ in modules() if name.endswith("/__init__.py")}
    assert {name for name in packages if f"{name}/" not in text} == set()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="without processes there are no groups")
@pytest.mark.xdist_group("house")
def test_groups_of_tests_are_known_to_xdist(request: pytest.FixtureRequest) -> None:
    """Otherwise every process repeats expensive fixtures, and ranks of several tests share the cores."""
    assert request.node.nodeid.endswith("@house")


def test_commands_of_tests_are_forks() -> None:
    """A variable that a library sets in the process of the tests would make every later command a new process."""
    assert Server.would_differ_in(dict(os.environ)) == set()
