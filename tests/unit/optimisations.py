"""Results of `stepscope optimise` as a worker would report them, for tests without a model."""

from stepscope.recording.rows.optimisation import ChangeStatus, GradientCheck, MeasuredChange, OptimiseReport
from stepscope.spec import Scalar, build_case
from tests.unit.rows import ENVIRONMENT

ATTENTION = "attention: 12 calls of scaled_dot_product_attention replaced with flash_attention"


def check(share: float | None = 0.5) -> GradientCheck:
    return GradientCheck(
        parameter="blocks.0.norm.weight",
        error=None if share is None else 0.01 * share,
        plain_error=0.005,
        share_of_limit=share,
        truth="float64",
        loss=4.25,
        plain_loss=4.25,
        true_loss=4.24,
    )


def change(
    name: str, status: ChangeStatus, step_ms: float | None = None, *notes: str, share: float | None = 0.5
) -> MeasuredChange:
    return MeasuredChange(
        name=name,
        title=f"the title of {name}",
        status=status,
        step_ns=None if step_ms is None else round(step_ms * 1e6),
        peak_bytes=None if step_ms is None else 2**30,
        prepare_s=None if step_ms is None else 12.345,
        notes=notes,
        check=None if step_ms is None else check(share),
    )


CHANGES = (
    change("start", "start", 60.0),
    change("compile", "kept", 40.0),
    change("graph", "not applied", None, "CUDA graphs need a GPU"),
    change("attention", "kept", 30.0, ATTENTION),
    change("optimizer", "no gain", 33.0, ATTENTION),
    change("norms", "failed", 20.0, ATTENTION, "norms: 25 fused", "gradient of norm: error 0.2", share=2.0),
)


def optimisation(
    changes: tuple[MeasuredChange, ...] = CHANGES, *, stopped: str = "", **settings: Scalar
) -> OptimiseReport:
    given: dict[str, Scalar] = {"size": "small", "context": 256, "precision": "bf16", "device": "cuda:0"}
    return OptimiseReport(
        case=build_case({**given, **settings}),
        environment=ENVIRONMENT,
        command="stepscope optimise",
        started="2026-01-01T00:00:00+00:00",
        changes=changes,
        stopped=stopped,
    )
