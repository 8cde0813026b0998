"""Rows as a sweep would write them, for tests without a model."""

from stepscope.hardware import Hardware
from stepscope.recording.rows.bench import BenchRow, Doubt, Environment, Measurement, Status, case_key
from stepscope.spec import Scalar, build_case

ENVIRONMENT = Environment(
    device="cuda:0",
    hardware=Hardware(name="Test GPU", peak_flops={"fp32": 50e12, "bf16": 500e12}),
    driver_name="Test GPU",
    python="3.11.7",
    torch="2.13.0",
    triton="3.7.1",
    cuda="13.0",
    driver="580.1",
    threads=2,
    stepscope="0.1.0",
    commit=None,
)


def row(
    status: Status = "ok",
    *,
    step_ns: tuple[int, ...] = (100_000_000,) * 10,
    doubts: tuple[Doubt, ...] = (),
    **settings: Scalar,
) -> BenchRow:
    case = build_case({"device": "cuda:0", **settings})
    measurement = Measurement(
        clock="cuda events",
        phases_ns={
            "forward": tuple(ns // 4 for ns in step_ns),
            "backward": tuple(ns // 2 for ns in step_ns),
            "optimizer": tuple(ns // 4 for ns in step_ns),
        },
        step_ns=step_ns,
        host_step_ns=step_ns,
        enqueue_ns=step_ns,
        warmup_ns=(),
        parameters=1000,
        forward_flops=10**12,
        flops_source="closed form",
        peak_bytes=2**30,
        peak_kind="cuda allocator",
    )
    return BenchRow(
        key=case_key(case, ENVIRONMENT, None),
        case=case,
        environment=ENVIRONMENT,
        status=status,
        reason="" if status == "ok" else f"the reason for {status}",
        started="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
        command="stepscope bench",
        measurement=measurement if status == "ok" else None,
        doubts=doubts,
    )
