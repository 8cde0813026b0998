"""The block sizes that `recover` assumes for compiled kernels, compared with those of the installed PyTorch."""

from typing import Any

import pytest
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint

from stepscope.explain.kernel_names import decode
from stepscope.recover.facts import Elements, Rows, Sighting
from stepscope.recover.families.compiled import read_compiled

HEURISTICS: Any = triton_heuristics  # without types
_NORM = "triton_{}_fused_add_native_layer_norm_view_7"
_LONGEST_KEPT = 1024  # longer rows are reduced in a loop


def _meta(major: int) -> dict[str, Any]:
    device = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=10 * major,
        major=major,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
    )
    return {"device": device}


def _round(size: int) -> int:
    return int(1 << (size - 1).bit_length())


def _launch(name: str, size: int, config: Any) -> Sighting:
    blocks = -(-size // config.kwargs["XBLOCK"])
    return Sighting(index=0, name=decode(name), grid=(blocks, 1, 1), block=(32 * config.num_warps, 1, 1))


@pytest.mark.parametrize("count", [100, 1000, 5000, 32_768, 40_000, 70_000, 131_073, 999_999, 3_145_728, 12_345_677])
def test_pointwise_kernels(count: int) -> None:
    sizes = {"x": _round(count)}
    configs = HEURISTICS.pointwise(sizes, _meta(9), inductor_meta={}, return_configs=True)
    for config in configs:
        launch = _launch("triton_poi_fused_add_mul_4", count, config)
        choices = read_compiled(launch, usual=True)
        assert any(count in choice.count for choice in choices if isinstance(choice, Elements))
        assert len(choices) <= 4


@pytest.mark.parametrize("major", [8, 9, 10])
@pytest.mark.parametrize("rows", [37, 128, 600, 1024, 1025, 4096, 10_000])
@pytest.mark.parametrize("width", [256, 300, 512, 640, 768, 1024, 1152, 2048, 2560, 4096, 8192])
def test_reductions_along_rows(monkeypatch: pytest.MonkeyPatch, major: int, rows: int, width: int) -> None:
    monkeypatch.setattr(HEURISTICS.torch.cuda, "is_available", lambda: True)
    sizes, meta = {"x": _round(rows), "r0_": _round(width)}, _meta(major)
    hint = {"reduction_hint": ReductionHint.INNER}
    looped = HEURISTICS._reduction_configs(size_hints=dict(sizes), inductor_meta=dict(hint), triton_meta=meta)
    kept = HEURISTICS._persistent_reduction_configs(dict(sizes), ReductionHint.INNER, {}, meta)
    kinds = [("red", looped), *([("per", kept)] if width <= _LONGEST_KEPT else [])]
    for kind, configs in kinds:
        for config in configs:
            choices = read_compiled(_launch(_NORM.format(kind), rows, config), usual=True)
            assert any(
                isinstance(choice, Rows) and rows in choice.rows and choice.width is not None and width in choice.width
                for choice in choices
            ), (kind, config)
