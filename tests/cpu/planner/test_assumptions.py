"""Which kernel a GPU takes for attention."""

import msgspec
import pytest

from stepscope import hardware
from stepscope.errors import StepscopeError
from stepscope.planner.assumptions import Accelerator, AttentionCall, SdpaKernel, accelerator_of, choose_sdpa

ALL: frozenset[SdpaKernel] = frozenset({"cudnn", "flash", "efficient", "math"})
CALL = AttentionCall(
    dtype="bfloat16",
    same_dtype=True,
    num_dims=4,
    batches=(2, 2, 2),
    heads=(8, 8, 8),
    lengths=(128, 128),
    dims=(64, 64, 64),
    packed=True,
    has_mask=False,
    mask_fits=True,
    mask_learns=False,
    is_causal=True,
    dropout=0.0,
    enable_gqa=False,
    needs_grad=True,
)


def gpu(name: str) -> Accelerator:
    card = hardware.find(name)
    assert card is not None
    return accelerator_of(card)


@pytest.mark.parametrize(
    ("name", "change", "kernel"),
    [
        ("H200", {}, "cudnn"),
        ("H200", {"dtype": "float32"}, "efficient"),
        ("H200", {"dropout": 0.1}, "flash"),  # cuDNN takes sixteenths
        ("H200", {"dropout": 0.125}, "cudnn"),
        ("H200", {"dims": (256, 256, 256)}, "flash"),
        ("H200", {"dims": (60, 60, 60)}, "flash"),
        ("H200", {"has_mask": True, "dropout": 0.1}, "efficient"),
        ("H200", {"has_mask": True}, "cudnn"),
        ("H200", {"enable_gqa": True, "heads": (8, 2, 2)}, "cudnn"),
        ("H200", {"enable_gqa": True, "heads": (8, 2, 2), "dtype": "float32"}, "math"),
        ("H200", {"num_dims": 0}, "math"),
        ("H200", {"dtype": "float64"}, "math"),
        ("A100-SXM4-80GB", {}, "flash"),
        ("A100-SXM4-80GB", {"lengths": (64, 128)}, "efficient"),
        ("RTX 4090", {"dims": (224, 224, 224)}, "efficient"),
        ("RTX 4090", {"dims": (224, 224, 224), "needs_grad": False}, "flash"),
        ("V100", {}, "math"),
        ("V100", {"dtype": "float16"}, "efficient"),
    ],
)
def test_kernel_of(name: str, change: dict[str, object], kernel: str) -> None:
    assert choose_sdpa(msgspec.structs.replace(CALL, **change), gpu(name), ALL) == kernel


def test_a_kernel_that_is_turned_off_is_not_taken() -> None:
    assert choose_sdpa(CALL, gpu("H200"), ALL - {"cudnn"}) == "flash"
    assert choose_sdpa(CALL, gpu("H200"), frozenset({"math"})) == "math"


def test_every_listed_nvidia_gpu_is_known() -> None:
    for card in hardware.known():
        if card.name != "MI300X":
            assert accelerator_of(card).multiprocessors >= 40


def test_a_gpu_with_another_allocator_is_refused() -> None:
    card = hardware.find("MI300X")
    assert card is not None
    with pytest.raises(StepscopeError, match="`MI300X` cannot be predicted"):
        accelerator_of(card)
