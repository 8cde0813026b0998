"""Settings for the tests of the fast step."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_code_is_forgotten() -> Iterator[None]:
    """Compiled code keeps its models, which tests of memory in the same process would count."""
    yield
    torch.compiler.reset()
