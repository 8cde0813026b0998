"""Device limits: dense peaks per precision, bandwidth and memory, from the vendors' data sheets.

Peaks are for dense matrices (the sheets' figures with sparsity are halved), at boost clock, with fp32 accumulation, as
PyTorch uses it: on GeForce cards that is half of NVIDIA's headline number. A precision that a device does not support
is absent, not zero. Devices that are not listed are measured (`measure.environment`) and marked as such.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

Source = Literal["datasheet", "measured"]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """A device's limits. Rates are in operations and bytes per second, memory in bytes."""

    name: str
    peak_flops: Mapping[str, Rate]
    bandwidth: Rate | None = None
    memory_bytes: Annotated[int, msgspec.Meta(gt=0, le=2**62)] | None = None
    source: Source = "datasheet"


def _card(name: str, memory_gb: int, bandwidth_gb: float, **peak_tflops: float) -> Hardware:
    return Hardware(
        name=name,
        peak_flops={precision: tflops * 1e12 for precision, tflops in peak_tflops.items()},
        bandwidth=bandwidth_gb * 1e9,
        memory_bytes=memory_gb * 10**9,
    )


# Patterns are matched in order against the driver's device name, so variants come before the plain name.
# V100 and the Turing cards have neither bf16 nor tf32; the others run bf16 and fp16 at the same rate, and fp8 is twice
# as fast where they have it.
_CARDS: tuple[tuple[str, Hardware], ...] = (
    (r"V100.*PCIE", _card("V100 PCIe", 32, 900, fp32=14.0, fp16=112)),
    (r"V100", _card("V100 SXM2", 32, 900, fp32=15.7, fp16=125)),
    (
        r"A100.*(?:80GB.*PCIE|PCIE.*80GB)",
        _card("A100 PCIe 80GB", 80, 1935, fp32=19.5, tf32=156, bf16=312, fp16=312),
    ),
    (r"A100.*80GB", _card("A100 SXM 80GB", 80, 2039, fp32=19.5, tf32=156, bf16=312, fp16=312)),
    (r"A100", _card("A100 40GB", 40, 1555, fp32=19.5, tf32=156, bf16=312, fp16=312)),
    (r"H100.*PCIE", _card("H100 PCIe", 80, 2039, fp32=51.2, tf32=378, bf16=756, fp16=756, fp8=1513)),
    (r"H100.*NVL", _card("H100 NVL", 94, 3938, fp32=60.3, tf32=417.5, bf16=835, fp16=835, fp8=1670.5)),
    (r"H100", _card("H100 SXM", 80, 3352, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9)),
    (r"H200.*NVL", _card("H200 NVL", 141, 4800, fp32=60.3, tf32=417.5, bf16=835, fp16=835, fp8=1670.5)),
    (r"H200", _card("H200 SXM", 141, 4800, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9)),
    (r"B200", _card("B200", 180, 7700, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500)),
    (r"L40S", _card("L40S", 48, 864, fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733)),
    (r"T4", _card("T4", 16, 320, fp32=8.1, fp16=65)),
    (r"RTX 2080 Ti", _card("RTX 2080 Ti", 11, 616, fp32=13.4, fp16=53.8)),
    (r"RTX 3090(?! Ti)", _card("RTX 3090", 24, 936, fp32=35.6, tf32=35.6, bf16=71.2, fp16=71.2)),
    (r"RTX 4090 D|RTX 4090D", _card("RTX 4090D", 24, 1008, fp32=73.5, tf32=73.5, bf16=147, fp16=147)),
    (r"RTX 4090(?! Laptop)", _card("RTX 4090", 24, 1008, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3)),
    (r"MI300X", _card("MI300X", 192, 5300, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9)),
)


class Chip(msgspec.Struct, frozen=True):
    """The chip on a card of NVIDIA."""

    capability: tuple[int, int]
    multiprocessors: int


_CHIPS: dict[str, Chip] = {
    "V100 PCIe": Chip((7, 0), 80),
    "V100 SXM2": Chip((7, 0), 80),
    "A100 PCIe 80GB": Chip((8, 0), 108),
    "A100 SXM 80GB": Chip((8, 0), 108),
    "A100 40GB": Chip((8, 0), 108),
    "H100 PCIe": Chip((9, 0), 114),
    "H100 NVL": Chip((9, 0), 132),
    "H100 SXM": Chip((9, 0), 132),
    "H200 NVL": Chip((9, 0), 132),
    "H200 SXM": Chip((9, 0), 132),
    "B200": Chip((10, 0), 148),
    "L40S": Chip((8, 9), 142),
    "T4": Chip((7, 5), 40),
    "RTX 2080 Ti": Chip((7, 5), 68),
    "RTX 3090": Chip((8, 6), 82),
    "RTX 4090D": Chip((8, 9), 114),
    "RTX 4090": Chip((8, 9), 128),
}


def chip_of(card: Hardware) -> Chip | None:
    return _CHIPS.get(card.name)


def find(driver_name: str) -> Hardware | None:
    """Return the limits of the device that the driver calls `driver_name`, None if it is not in the list."""
    for pattern, card in _CARDS:
        if re.search(rf"\b(?:{pattern})(?!\w)", driver_name, re.IGNORECASE):
            return card
    return None


def known() -> tuple[Hardware, ...]:
    return tuple(card for _, card in _CARDS)


def read_proc_bytes(file: str, field: str) -> int:
    """Return a size in bytes from a file of Linux: `MemAvailable` in /proc/meminfo, `VmRSS` in /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    assert found, f"{file} has no {field}"
    return int(found[1]) * 1024


def available_bytes() -> int:
    """Return the memory that this machine can give to a program without swapping."""
    return read_proc_bytes("/proc/meminfo", "MemAvailable")
