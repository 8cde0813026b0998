"""Settings for all tests."""

import signal

import pytest
from hypothesis import settings

from stepscope.jobs.workers.cpu_limits import limit_instructions

# Before any test imports torch, and for every command that a test starts.
limit_instructions()

# How long an example takes says more about the machine than about the code.
settings.register_profile("stepscope", deadline=None)
settings.load_profile("stepscope")

# Whoever runs the tests in the background may have Ctrl-C ignored, and whether it works is one of the things tested.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Ranks wait for each other with a patience that more ranks on the same cores would exhaust.
_TOGETHER = {"tests/cpu/parallel/": "ranks", "tests/cli/test_train.py": "ranks", "tests/cli/test_comm.py": "ranks"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says which tests run in one process, one after another, and starts those first.

    That is ranks, and the tests of a file that share a fixture: it is made once in every process that needs it, and
    these are the expensive ones (a cluster, a report, a trained model). All other tests go wherever there is room.
    """
    for item in items:
        file = item.location[0]
        together = [group for start, group in _TOGETHER.items() if file.startswith(start)]
        if together or _shares_fixture(item):
            item.add_marker(pytest.mark.xdist_group(together[0] if together else file))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def _shares_fixture(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    definitions = item._fixtureinfo.name2fixturedefs.values()
    # Those of pytest and its plugins have no place in the tree.
    return any(one.baseid and one.scope != "function" for several in definitions for one in several)
