"""A function runs when a module has been imported, however the program gets there."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.loop.compiled.import_hook import after_import

NAME = "imported_later"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    finders = list(sys.meta_path)
    yield path
    sys.meta_path[:] = finders
    sys.modules.pop(NAME, None)


def count_calls() -> tuple[list[str], Callable[[], None]]:
    calls: list[str] = []
    return calls, lambda: calls.append("called")


def test_function_runs_once_after_the_import(module: Path) -> None:
    before = list(sys.meta_path)
    calls, call = count_calls()
    after_import(NAME, lambda: calls.append(f"value {sys.modules[NAME].value}"))
    assert calls == []
    imported = importlib.import_module(NAME)
    assert calls == ["value 1"]
    assert type(imported.__loader__).__module__ == "_frozen_importlib_external"  # as without the hook
    assert sys.meta_path == before
    after_import(NAME, call)
    assert calls == ["value 1", "called"]


def test_asking_for_a_module_does_not_use_up_the_hook(module: Path) -> None:
    """As `transformers` does, which may be imported before torch."""
    calls, call = count_calls()
    after_import(NAME, call)
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_filename(NAME) == str(module)  # type: ignore[attr-defined]
    assert calls == []
    importlib.import_module(NAME)
    assert calls == ["called"]


def test_import_that_fails_may_be_tried_again(module: Path) -> None:
    calls, call = count_calls()
    after_import(NAME, call)
    module.write_text("raise RuntimeError('not yet')\n")
    with pytest.raises(RuntimeError):
        importlib.import_module(NAME)
    assert calls == []
    module.write_text("value = 'now it works'\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert calls == ["called"]


def test_nothing_runs_after_the_wait_has_stopped(module: Path) -> None:
    calls, call = count_calls()
    after_import(NAME, call)()
    importlib.import_module(NAME)
    assert calls == []


def test_module_that_does_not_exist_is_still_an_import_error() -> None:
    stop = after_import("does_not_exist_anywhere", lambda: None)
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("does_not_exist_anywhere")
        assert importlib.util.find_spec("does_not_exist_anywhere") is None
    finally:
        stop()
