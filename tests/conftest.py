"""Settings for all tests."""

import gc
import os
import signal

import pytest
from hypothesis import settings

from stepscope.jobs.workers.cpu_limits import limit_instructions

# Before any test imports torch, and for every command that a test starts.
limit_instructions()

# Inductor would start a process that imports torch again, for every test and command that compiles.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The time that an example takes depends more on the machine than on the code.
settings.register_profile("stepscope", deadline=None)
settings.load_profile("stepscope")

# Collecting creates no garbage worth looking for, and looking for it takes a tenth of the time.
gc.disable()

# Tests that are started in the background would ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests with ranks run one after another: more ranks on the same cores would run into their timeouts.
_TOGETHER = dict.fromkeys(
    (
        "tests/cpu/parallel/",
        "tests/cli/test_train.py",
        "tests/cli/test_comm.py",
        "tests/cli/loops/test_run_libraries.py",
    ),
    "ranks",
)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests that must run one after another in one process, and start those first.

    These are the tests with ranks, and the tests of a file that share a fixture: each process that needs a fixture
    creates it, and shared ones are expensive (a cluster, a report, a trained model). All other tests run anywhere.
    """
    for item in items:
        file = item.nodeid.partition("::")[0]
        together = [group for start, group in _TOGETHER.items() if file.startswith(start)]
        if together or _shares_fixture(item):
            item.add_marker(pytest.mark.xdist_group(together[0] if together else file))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_collection_finish() -> None:
    """What the test modules have imported is never garbage. To scan it takes a second, and many tests collect garbage,
    or measure steps, before which it is collected."""
    gc.freeze()
    gc.enable()


def _shares_fixture(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    # Options of pytest and its plugins have no path.
    return any(one.baseid and one.scope != "function" for several in definitions for one in several)
