"""Lines of the user's code behind operators, from a profiler with stacks."""

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._profiler import RecordScope, _EventType

from stepscope.loop import source_lines
from stepscope.loop.line_marks import LineMarks
from stepscope.loop.profiler import LoopProfiler, OtherProfilers
from stepscope.loop.source_lines import classify_file, find_caller, read_lines, shorten_path

USER = """\
import torch

from helping_library.layers import apply, scale_all

def call(x):
    y = torch.mm(x, x)
    return torch.relu(y)

def add(x):
    y = 1
    return x + y

def through_library(x):
    return apply(x)

def only_library(x):
    return scale_all(x)

def multiply_later(x):
    return -absolute(x)

def absolute(x):
    return abs(x)
"""
LIBRARY = """\
import torch

def apply(x):
    return torch.sigmoid(x)

def scale_all(x):
    y = torch.tanh(x)
    z = torch.exp(y)
    return torch.sin(z)

def call_back(function):
    return function()
"""


def _forget() -> None:
    for function in (classify_file, source_lines._find_file, source_lines._library_folders):
        function.cache_clear()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A file of the user, and a library that is installed somewhere."""
    (tmp_path / "site-packages/helping_library").mkdir(parents=True)
    (tmp_path / "site-packages/helping_library/layers.py").write_text(LIBRARY)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/user_code.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(tmp_path / "project")
    _forget()
    yield importlib.import_module("user_code")
    for name in [name for name in sys.modules if name.startswith(("user_code", "helping_library"))]:
        del sys.modules[name]
    _forget()


def lines_of(*calls: Callable[[torch.Tensor], Any], marked: bool = False) -> dict[str, str | None]:
    """The line of each operator that is called once."""
    x = torch.ones(2, 2)
    profiler = LoopProfiler([torch.profiler.ProfilerActivity.CPU], OtherProfilers(lambda: None), with_stack=True)
    with profiler:
        profiler.keep_events()
        with LineMarks() if marked else nullcontext():
            for call in calls:
                call(x)
    found = read_lines(profiler.results)
    assert len(found.names) == len(found.places)
    return {
        name: found.lines[place] if place >= 0 else None for name, place in zip(found.names, found.places, strict=True)
    }


def test_an_operator_has_the_line_that_calls_it(user: ModuleType) -> None:
    lines = lines_of(user.call)
    assert lines["aten::mm"] == "user_code.py:6"
    assert lines["aten::relu"] == "user_code.py:7"


def test_arithmetic_has_the_line_of_its_function(user: ModuleType) -> None:
    """It is not a call, so the stack does not have its line."""
    assert lines_of(user.add)["aten::add"] == "user_code.py:9 (add)"


def test_marks_have_the_line_of_arithmetic(user: ModuleType) -> None:
    lines = lines_of(user.add, user.call, user.multiply_later, marked=True)
    assert lines["aten::add"] == "user_code.py:11"
    assert lines["aten::mm"] == "user_code.py:6"
    assert lines["aten::relu"] == "user_code.py:7"
    assert lines["aten::neg"] == "user_code.py:20"  # after a call of the user's own code on the same line
    assert lines["aten::abs"] == "user_code.py:23"


def test_lines_are_not_traced_afterwards(user: ModuleType) -> None:
    lines_of(user.add, marked=True)
    assert sys.gettrace() is None
    assert sys._getframe().f_trace is None


def test_a_debugger_keeps_its_tracing_function(user: ModuleType) -> None:
    def trace(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with LineMarks():
            assert sys.gettrace() is trace
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


def test_the_innermost_line_of_the_user_counts(user: ModuleType) -> None:
    lines = lines_of(user.call, user.through_library)
    assert lines["aten::sigmoid"] == "user_code.py:14"


def test_a_line_behind_most_of_a_step_says_nothing_and_the_library_does(user: ModuleType) -> None:
    lines = lines_of(user.only_library, user.through_library)
    assert lines["aten::tanh"] == "helping_library/layers.py:7"
    assert lines["aten::sin"] == "helping_library/layers.py:9"
    assert lines["aten::sigmoid"] == "user_code.py:14"


class Freed:
    """A frame whose code no longer exists: its name is whatever is in memory there."""

    line_number = 0

    @property
    def file_name(self) -> str:
        return b"\xdb\x04".decode()


def test_code_that_no_longer_exists_has_no_line(user: ModuleType) -> None:
    """The code of a module that the step imports is freed when it has run."""
    known = SimpleNamespace(file_name="user_code.py", line_number=6, function_name="call")
    scope = SimpleNamespace(scope=RecordScope.FUNCTION)
    operator = SimpleNamespace(
        tag=_EventType.TorchOp, name="aten::mm", extra_fields=scope, start_tid=1, start_time_ns=5, children=[]
    )
    frames = SimpleNamespace(caller=known, callsite=Freed())
    inner = SimpleNamespace(tag=_EventType.PyCall, extra_fields=frames, start_time_ns=3, children=[operator])
    freed = SimpleNamespace(caller=Freed())
    outer = SimpleNamespace(tag=_EventType.PyCCall, extra_fields=freed, start_time_ns=1, children=[inner])
    found = read_lines(SimpleNamespace(experimental_event_tree=lambda: [outer]))
    assert (found.names, found.lines) == (("aten::mm",), ("user_code.py:6",))


def test_operators_of_the_backward_pass_are_left_out(user: ModuleType) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    lines = lines_of(lambda x: user.call(x * weight).sum().backward())
    assert "aten::relu" in lines
    assert not [name for name in lines if "backward" in name.lower()]


def test_the_caller_is_the_nearest_line_of_the_user(user: ModuleType, tmp_path: Path) -> None:
    layers = importlib.import_module("helping_library.layers")
    (tmp_path / "project/calls.py").write_text("\n\ndef call(function):\n    return function()\n")
    calls: Any = importlib.import_module("calls")
    assert calls.call(find_caller) == "calls.py:4"
    assert "test_source_lines.py:" in calls.call(lambda: layers.call_back(find_caller))  # not the library's line
    del sys.modules["calls"]


def test_files_belong_to_the_user_a_library_or_neither(
    user: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    (tmp_path / "compiled/xj").mkdir(parents=True)
    (tmp_path / "compiled/xj/cxj4zglwc3ui.py").touch()
    kinds = {
        str(tmp_path / "compiled/xj/cxj4zglwc3ui.py"): "other",  # code that the compiler generated
        str(tmp_path / "project/user_code.py"): "user",
        "user_code.py": "user",  # as the profiler shortens it
        str(tmp_path / "site-packages/helping_library/layers.py"): "library",
        "helping_library/layers.py": "library",
        torch.nn.modules.__file__: "other",
        "torch/nn/modules/module.py": "other",
        threading.__file__: "other",
        source_lines.__file__: "other",
        "<string>": "other",
        "": "other",
        "missing.py": "other",
        "/": "other",  # what PyTorch may say about code that no longer exists
        "/x\0y" * 2000: "other",
    }
    assert {name: classify_file(name) for name in kinds} == kinds


def test_paths_show_nothing_of_the_machine(user: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("project/deep/model.py", "data/reader.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert shorten_path(str(tmp_path / "project/deep/model.py")) == "deep/model.py"
    assert shorten_path(str(tmp_path / "site-packages/helping_library/layers.py")) == "helping_library/layers.py"
    assert shorten_path("/home/someone/secret/other.py") == "other.py"
    monkeypatch.chdir(tmp_path)
    assert shorten_path(str(tmp_path / "data/reader.py")) == "data/reader.py"
