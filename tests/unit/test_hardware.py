"""Driver names map to the right data sheet, or to none."""

import pytest

from stepscope.hardware import find, known


@pytest.mark.parametrize(
    ("driver_name", "card"),
    [
        ("Tesla V100-SXM2-16GB", "V100 SXM2"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090D"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_known_devices_are_found(driver_name: str, card: str) -> None:
    found = find(driver_name)
    assert found is not None
    assert found.name == card
    assert found.source == "datasheet"


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_similar_device_name_does_not_match(name: str) -> None:
    assert find(name) is None


def test_sheets_are_plausible() -> None:
    for card in known():
        peaks = card.peak_flops
        assert peaks["fp32"] <= peaks.get("tf32", peaks["fp16"]) <= peaks["fp16"]
        assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
        assert card.bandwidth is not None
        assert 1e11 < card.bandwidth < 1e13
    volta = find("Tesla V100-SXM2-32GB")
    assert volta is not None
    assert set(volta.peak_flops) == {"fp32", "fp16"}


def test_fp8_is_twice_as_fast_as_bf16() -> None:
    peaks = [card.peak_flops for card in known()]
    assert all(one["fp8"] == pytest.approx(2 * one["bf16"], rel=0.02) for one in peaks if "fp8" in one)
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA B200", "AMD Instinct MI300X"):
        found = find(name)
        assert found is not None
        assert "fp8" in found.peak_flops
