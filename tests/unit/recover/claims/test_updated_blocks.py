"""An optimizer's blocks against those of the claimed weights."""

import msgspec
import pytest

from stepscope.recover.claims.refutation import RUNS_ONCE
from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.facts import Sighting
from tests.unit.recover.claimed_runs import spoil

LLAMA = "llama_fp32.train.json.gz"  # 343 blocks: 2 layers of 43 and two norms, twice 126, and a norm
LAYER = 43 + 2


def update_more(kernels: list[Sighting], blocks: int) -> list[Sighting]:
    """The same run, with more blocks in the first launch of the kernel that runs once per parameter that has room."""
    return [
        msgspec.structs.replace(one, grid=(one.grid[0] + blocks, *one.grid[1:]))
        if RUNS_ONCE.search(one.name.name) and one.grid[0] + blocks < 320
        else one
        for one in kernels
    ]


def test_a_layer_more_is_noticed() -> None:
    answer = spoil(LLAMA, lambda kernels: update_more(kernels, LAYER))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert f"the optimizer updates {343 + LAYER} blocks of up to 65,536 parameters" in answer.why


@pytest.mark.parametrize("blocks", [0, 14])
def test_a_few_biases_more_are_not_a_layer(blocks: int) -> None:
    assert spoil(LLAMA, lambda kernels: update_more(kernels, blocks)).verdict is ClaimVerdict.CONSISTENT
