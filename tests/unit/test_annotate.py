"""`stepscope.annotate` in its three forms, with and without a recorder."""

import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import stepscope

layer = sys.modules["stepscope.annotate"]  # the attribute of this name is the public object


@contextmanager
def recording() -> Iterator[list[str]]:
    """A recorder that lists `+name` when a range opens and `-name` when it closes."""
    log: list[str] = []

    def open_range(name: str) -> Callable[[], None]:
        log.append(f"+{name}")
        return lambda: log.append(f"-{name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_profiler_opener", lambda: open_range)
        with layer.activate("profiler"):
            yield log


@stepscope.annotate("double")
def double(x: int, *, times: int = 1) -> int:
    """Twice as much."""
    return 2 * x * times


def test_import_does_not_import_torch() -> None:
    code = "import sys, stepscope; stepscope.annotate('x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_range_opens_without_a_recorder() -> None:
    assert double(2, times=3) == 12
    with stepscope.annotate("x"):
        stepscope.annotate.push("y")
        assert layer._opened.ranges == []
        stepscope.annotate.pop()


def test_every_form_opens_and_closes_in_order() -> None:
    with recording() as log, stepscope.annotate("outer"):
        stepscope.annotate.push("pushed")
        double(1)
        stepscope.annotate.pop()
    assert log == ["+outer", "+pushed", "+double", "-double", "-pushed", "-outer"]


def test_decorated_function_keeps_its_name_signature_and_docstring() -> None:
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice as much."
    assert list(inspect.signature(double).parameters) == ["x", "times"]


def test_an_exception_closes_the_range_and_passes() -> None:
    with recording() as log, pytest.raises(ZeroDivisionError), stepscope.annotate("x"):
        stepscope.annotate("y")(lambda: 1 // 0)()
    assert log == ["+x", "+y", "-y", "-x"]


def test_a_range_entered_before_the_recorder_is_not_closed_in_it() -> None:
    before = stepscope.annotate("before")
    stepscope.annotate.push("early")
    before.__enter__()
    with recording() as log, stepscope.annotate("inside"):
        stepscope.annotate.pop()
        before.__exit__(None, None, None)
        assert log == ["+inside"]
    assert log == ["+inside", "-inside"]


def test_one_range_nests_in_itself() -> None:
    same = stepscope.annotate("x")
    with recording() as log, same, same:
        pass
    assert log == ["+x", "+x", "-x", "-x"]


def test_ranges_without_a_pop_close_with_the_recorder() -> None:
    with recording() as log:
        stepscope.annotate.push("a")
        stepscope.annotate.push("b")
    assert log == ["+a", "+b", "-b", "-a"]
    assert layer._opened.ranges == []


def test_a_pop_closes_only_what_its_own_thread_pushed() -> None:
    with recording() as log:
        stepscope.annotate.push("main")
        other = threading.Thread(target=stepscope.annotate.pop)
        other.start()
        other.join()
        assert log == ["+main"]


def test_range_without_a_name_is_rejected() -> None:
    with pytest.raises(TypeError, match="expects a name"):
        stepscope.annotate(double)  # type: ignore[arg-type]


def test_two_recorders_at_once_fail_an_assertion() -> None:
    with recording(), pytest.raises(AssertionError, match="two recorders"), layer.activate("nvtx"):
        pass
