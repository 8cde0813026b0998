"""The kernels of AdamW and of gradient sums in Triton's interpreter. `test_triton_attention.py` runs this file in its
own process.
"""

import numpy as np
import pytest
import torch

from stepscope.kernels import Accumulator, AdamWUpdates, Hyper, adamw, adamw_kernels, tensor_lists
from tests.cpu.accuracy import normal
from tests.cpu.kernels.interpreter import prepare
from tests.cpu.kernels.parameter_lists import HYPERS, MAX_NORM, MIXED, check_list, make_list, take_steps

prepare()


@pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
def test_steps_match_torch(clip: bool) -> None:
    check_list(AdamWUpdates.launch_kernels, clip=clip)


def test_layout_of_the_tables_is_that_of_the_kernels() -> None:
    assert adamw_kernels.COLUMNS.value == tensor_lists.COLUMNS
    assert adamw_kernels.GRADIENT.value == tensor_lists.GRADIENT
    assert (adamw_kernels.COUNT.value, adamw_kernels.GROUP.value) == (
        tensor_lists.NUM_ADDRESSES,
        tensor_lists.NUM_ADDRESSES + 1,
    )
    assert adamw_kernels.FACTORS.value == adamw.NUM_FACTORS


def test_each_combination_of_dtypes_is_one_launch() -> None:
    made = make_list()
    updates = AdamWUpdates(made.updates, HYPERS)
    updates.bind(made.gradients)
    launches = updates._list.launches
    assert len(launches) == 5
    assert sum(launch.kind.is_aligned for launch in launches) == 4
    chunks = sum(-(-update.master.numel() // tensor_lists.CHUNK) for update in made.updates)
    assert sum(launch.num_chunks for launch in launches) == chunks


def test_steps_repeat_bit_for_bit() -> None:
    results = []
    for _ in range(2):
        made = make_list()
        take_steps(made, AdamWUpdates.launch_kernels, AdamWUpdates(made.updates, HYPERS, max_norm=MAX_NORM))
        results.append([update.master.clone() for update in made.updates])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_steps_continue_from_a_given_one() -> None:
    """In the first steps the corrections dominate, so a wrong count is visible."""
    half, whole = make_list(MIXED[:4]), make_list(MIXED[:4])
    once = AdamWUpdates(whole.updates, HYPERS)
    once.bind(whole.gradients)
    for _ in range(4):
        once.launch_kernels()
    for step in (0, 2):
        again = AdamWUpdates(half.updates, HYPERS, step=step)
        again.bind(half.gradients)
        again.launch_kernels()
        again.launch_kernels()
    for a, b in zip(half.updates, whole.updates, strict=True):
        torch.testing.assert_close(a.master, b.master, rtol=1e-6, atol=1e-7)


def test_norm_forgets_launches_that_are_gone() -> None:
    made = make_list(MIXED[:2])
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=1.0)
    updates.bind(made.gradients)
    updates.launch_kernels()
    for launches, gradients in ((2, made.gradients), (2, [gradient.float() for gradient in made.gradients])):
        updates.bind(gradients)
        updates.launch_kernels()
        assert len(updates._list.launches) == launches
        expected = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().item()
        assert updates.grad_norm.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_reaches_every_clipped_parameter(value: float) -> None:
    """As with `clip_grad_norm_`: a step that went wrong must be visible."""
    made = make_list(MIXED[:2])
    made.gradients[1][7] = value
    updates = AdamWUpdates(made.updates, HYPERS, max_norm=1.0)
    updates.bind(made.gradients)
    with np.errstate(invalid="ignore"):
        updates.launch_kernels()
    assert not updates.grad_norm.isfinite()
    assert made.updates[1].master[7].isnan()
    if value != value:
        assert made.updates[0].master.isnan().all()


def test_huge_and_tiny_gradients_do_not_overflow_in_the_update() -> None:
    made = make_list(MIXED[1:2])
    made.gradients[0].fill_(1e-30)
    made.gradients[0][0] = 1e15
    updates = AdamWUpdates(made.updates, [Hyper(lr=0.1)])
    updates.bind(made.gradients)
    before = made.updates[0].master.clone()
    updates.launch_kernels()
    torch.testing.assert_close(made.updates[0].master[0], before[0] * (1 - 0.001) - 0.1)
    assert made.updates[0].master.isfinite().all()


@pytest.mark.parametrize("shift", [0, 3])
def test_sums_of_gradients_match_fp32(shift: int) -> None:
    shapes = [(5, 1000), (7,), (0,), (4096,)]
    totals = Accumulator(shapes, device="cpu")
    expected = [torch.zeros(shape) for shape in shapes]
    for micro_batch in range(3):
        gradients = []
        for index, shape in enumerate(shapes):
            dtype = torch.float32 if index == 1 else torch.bfloat16
            values = normal(*shape, seed=10 * micro_batch + index).to(dtype)
            padded = torch.empty(values.numel() + shift, dtype=dtype)
            gradients.append(padded[shift:].view(shape).copy_(values))
            expected[index] += values.float()
        if micro_batch == 0:
            for total in totals.sums:
                total.fill_(torch.nan)
        totals.bind(gradients)
        totals.launch_kernels(overwrite=micro_batch == 0)
    assert all(torch.equal(a, b) for a, b in zip(totals.sums, expected, strict=True))
