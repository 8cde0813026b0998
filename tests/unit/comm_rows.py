"""Rows as `stepscope comm` would write them, for tests without ranks."""

from stepscope.recording.rows.bench import Doubt, Status, case_key
from stepscope.recording.rows.collective_case import CommCase, CommMeasurement, CommRow
from stepscope.recording.rows.links import Collective, Dtype
from tests.unit.rows import ENVIRONMENT

MS = 1_000_000
MB = 1_000_000


def communicate(
    collective: Collective = "all-reduce",
    status: Status = "ok",
    *,
    message_bytes: int = 8 * MB,
    ranks: int = 2,
    samples_ns: tuple[tuple[int, ...], ...] | None = None,
    dtype: Dtype = "fp32",
    interface: str | None = None,
    started: str = "2026-01-01T00:00:00+00:00",
    doubts: tuple[Doubt, ...] = (),
) -> CommRow:
    """By default 1 ms and 1 GB/s, the same on every rank."""
    case = CommCase(
        collective=collective,
        message_bytes=message_bytes,
        ranks=ranks,
        backend="nccl",
        device="cuda",
        dtype=dtype,
        interface=interface,
    )
    samples = samples_ns or ((MS + case.moved_bytes,) * 5,) * ranks
    measurement = CommMeasurement(clock="cuda events", samples_ns=samples, processor_ns=(MS,) * ranks)
    return CommRow(
        key=case_key(case, ENVIRONMENT, None),
        case=case,
        environment=ENVIRONMENT,
        status=status,
        reason="" if status == "ok" else f"the reason for {status}",
        started=started,
        wall_s=1.0,
        command="stepscope comm",
        measurement=measurement if status == "ok" else None,
        doubts=doubts,
    )
