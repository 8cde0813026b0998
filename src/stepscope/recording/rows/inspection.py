"""The state of a machine's GPUs and software, as a worker finds it."""

import msgspec


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU now. None is what the driver does not tell."""

    name: str
    capability: str
    free_bytes: int
    total_bytes: int
    sm_mhz: int | None
    max_sm_mhz: int | None
    throttled_by: tuple[str, ...] | None
    other_processes: tuple[int, ...] | None


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    torch: str
    torch_problem: str  # empty when its version is in range
    triton: str | None
    cuda: str | None
    driver: str | None
    threads: int
    devices: tuple[DeviceState, ...]
