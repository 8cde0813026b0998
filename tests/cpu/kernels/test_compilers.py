"""What compilers are told of the operators."""

import torch
from torch._inductor import lowering
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope import kernels


def test_inductor_learns_that_an_operator_stays_a_call_when_it_is_traced() -> None:
    operator = torch.ops.stepscope.cross_entropy.default
    lowering.lowerings.pop(operator, None)
    with FakeTensorMode():
        kernels.cross_entropy(torch.empty(4, 8), torch.empty(4, dtype=torch.int64))
    assert operator in lowering.lowerings
