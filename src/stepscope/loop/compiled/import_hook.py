"""Calls a function as soon as the user's program has imported a module, without importing it."""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function as soon as a module has been imported, at once if it was before. Returns a function that stops
    waiting."""
    if name in sys.modules:
        call()
        return lambda: None
    waiting = _Waiting(name, call)
    sys.meta_path.insert(0, waiting)
    return waiting.stop


class _Waiting(MetaPathFinder):
    """Finds a module like the other finders, and wraps its loader."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        """A program that only asks whether the module exists gets the wrapped loader, too: it may import it later."""
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, *where))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self._finish)
        return spec

    def _finish(self) -> None:
        self.stop()
        self._call()


class _Calling(Loader):
    """Loads a module with another loader, and then calls a function."""

    def __init__(self, loader: Loader, call: Callable[[], None]) -> None:
        self._loader = loader
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # as without this wrapper
        self._loader.exec_module(module)
        self._call()
