"""Rows as `stepscope attention` would write them, for tests without kernels."""

from stepscope.cost.attention import need_of_attention
from stepscope.recording.rows.attention_case import (
    Accuracy,
    AttentionCase,
    AttentionMeasurement,
    AttentionMemory,
    AttentionRow,
)
from stepscope.recording.rows.bench import Doubt, Status, case_key
from stepscope.spec import Precision
from stepscope.spec.backends import Implementation
from tests.unit.rows import ENVIRONMENT

MS = 1_000_000


def attend(
    implementation: Implementation = "triton",
    status: Status = "ok",
    *,
    length: int = 1024,
    head_dim: int = 64,
    precision: Precision = "bf16",
    causal: bool = True,
    batch: int = 8,
    forward_ns: tuple[int, ...] = (MS,) * 10,
    backward_ns: tuple[int, ...] = (2 * MS,) * 10,
    reason: str = "",
    doubts: tuple[Doubt, ...] = (),
) -> AttentionRow:
    case = AttentionCase(
        implementation=implementation,
        length=length,
        head_dim=head_dim,
        precision=precision,
        causal=causal,
        batch=batch,
        device="cuda:0",
    )
    need = need_of_attention(case)
    memory = AttentionMemory(
        counter="cuda allocator",
        input_bytes=4 * case.tensor_bytes,
        before_backward_bytes=need.before_backward_bytes + 512,
        forward_peak_bytes=need.before_backward_bytes + 512,
        peak_bytes=need.peak_bytes + 1024,
        before_backward_allocated_bytes=need.before_backward_bytes + 512 + 4 * case.tensor_bytes,
        before_backward_reserved_bytes=2 * need.peak_bytes,
        peak_allocated_bytes=need.peak_bytes + 1024 + 4 * case.tensor_bytes,
        peak_reserved_bytes=3 * need.peak_bytes,
    )
    measurement = AttentionMeasurement(
        clock="cuda events",
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        both_ns=tuple(one + other for one, other in zip(forward_ns, backward_ns, strict=True)),
        memory=memory,
        accuracies=tuple(
            Accuracy(result=result, error=0.001, plain_error=0.002, limit=0.03)
            for result in ("output", "dq", "dk", "dv")
        ),
    )
    return AttentionRow(
        key=case_key(case, ENVIRONMENT, None),
        case=case,
        environment=ENVIRONMENT,
        status=status,
        reason=reason or ("" if status == "ok" else f"the reason for {status}"),
        started="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
        command="stepscope attention",
        measurement=measurement if status == "ok" else None,
        doubts=doubts,
    )
