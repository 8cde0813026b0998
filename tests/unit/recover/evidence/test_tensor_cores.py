"""Operations per tensor core instruction, compared with runs that counted both."""

import msgspec
import pytest

from stepscope.recover.evidence.order import is_product
from stepscope.recover.evidence.recording import count_operations, operations_each
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.evidence_runs import COUNTERS, read_evidence, recovered, with_kernels


@pytest.mark.parametrize("file", COUNTERS)
def test_operations_follow_from_instructions_and_the_name(file: str) -> None:
    counted = [one for one in read_evidence(file).sightings if one.counters["tensor_ops"] and is_product(one)]
    for one in counted:
        assert operations_each(one) == one.counters["tensor_ops"] / one.counters["tensor_instructions"], one.name.name


@pytest.mark.parametrize(
    "file", ["gpt2_bf16_odd.csv.gz", "llama_bf16.csv.gz", "gpt2_tf32.csv.gz", "gpt2_head80.csv.gz"]
)
def test_a_file_with_only_instructions_gives_the_same_result(file: str) -> None:
    evidence = read_evidence(file)
    without = []
    for one in evidence.sightings:
        counters = {key: value for key, value in one.counters.items() if key != "tensor_ops"}
        bare = msgspec.structs.replace(one, counters=counters)
        operations = count_operations(bare)
        if operations is not None:
            bare = msgspec.structs.replace(bare, counters={**counters, "tensor_ops": operations})
        without.append(bare)
    assert recover([with_kernels(evidence, without)]).fields == recovered(file).fields


def test_unknown_operations_stay_unknown() -> None:
    (one, *_) = (one for one in read_evidence("llama_ours.csv.gz").sightings if one.name.kernel_class == "attention")
    assert operations_each(one) is None
