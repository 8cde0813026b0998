"""Softmax compared with the two GEMMs of attention, in time and FLOPs.

A GEMM has two FLOPs per multiply-add over the full square, because unfused attention computes all of it. A softmax has
five per element (maximum, subtract, exponential, sum, divide). Estimates by hand often count three (exponential, sum,
divide), so that figure is included too.
"""

import json
from dataclasses import dataclass

import polars as pl

from stepscope.explain.questions.answers import Answer, in_phases, missing, share_by, stepped, time_of, why_unknown
from stepscope.explain.questions.product_roles import SCORES, SOFTMAX, VALUES, Extent, extents, find_products
from stepscope.explain.trace.profile import Profile, device_word
from stepscope.findings import Cell, Column, Table
from stepscope.spec import ModelShape
from stepscope.units import count_noun, say_factor, say_flops, say_share, say_time

_KEY = "softmax"
_QUESTION = "How expensive is softmax compared with the GEMMs of attention?"
_SOFTMAX_OPS, _SOFTMAX_OPS_BY_HAND = 5, 3
_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_RECORD = "stepscope profile --attention naive"
# In a trace of the user's own code: PyTorch's attention in separate kernels.
_RECORD_OWN = "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): train_step()"
_CONVENTION = (
    f"FLOP: 2 per multiply-add over the full square, {_SOFTMAX_OPS} per element of softmax (maximum, subtract, "
    f"exponential, sum, divide); estimates by hand often use {_SOFTMAX_OPS_BY_HAND} (exponential, sum, divide)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Times, kernels and GEMM sizes per step."""

    products_ns: float
    softmax_ns: float
    other_ns: float  # scaling and masking
    softmax_kernels: float
    scores: tuple[Extent, ...]
    values: tuple[Extent, ...]
    product_bytes: int  # per element of the GEMMs
    softmax_bytes: int  # per element; autocast runs softmax in fp32 and GEMMs in half precision
    precision: str | None

    @property
    def product_flops(self) -> int:
        return sum(one.flops for one in (*self.scores, *self.values))

    @property
    def elements(self) -> int:
        return sum(one.elements for one in self.scores)

    @property
    def product_intensity(self) -> float:
        """FLOPs per byte if every factor and result moves once."""
        return self.product_flops / max(1, self.product_bytes * sum(o.moved for o in (*self.scores, *self.values)))

    @property
    def softmax_intensity(self) -> float:
        """FLOPs per byte if every element is read and written once. Softmax in several kernels moves more."""
        return _SOFTMAX_OPS / (2 * self.softmax_bytes)


def softmax_against_products(profile: Profile) -> Answer:
    if reason := why_unknown(profile, "forward"):
        return missing(_KEY, _QUESTION, reason, _RECORD)
    found = _find(profile)
    if found is None:
        return _without_parts(profile)
    ratio = found.softmax_ns / max(1.0, found.products_ns)
    sentence = (
        f"Softmax takes {say_factor(ratio)} the time of the two GEMMs: {say_time(found.softmax_ns)} and "
        f"{say_time(found.products_ns)} in forward, {profile.clock.say_per_step}"
    )
    if not found.product_flops or not found.elements:
        return Answer(
            key=_KEY,
            question=_QUESTION,
            figure=f"{say_factor(ratio)} the GEMM time",
            sentence=sentence + ". Shapes were not recorded, so FLOPs are unknown.",
            evidence=_table(found, profile.clock.say_per_step),
            command="torch.profiler.profile(record_shapes=True)",
        )
    softmax_flops = _SOFTMAX_OPS * found.elements
    by_hand = found.product_flops / (_SOFTMAX_OPS_BY_HAND * found.elements)
    sentence += (
        f". It has 1/{found.product_flops / softmax_flops:.3g} of their FLOPs (1/{by_hand:.3g} at three per element), "
        f"but {_reason(profile, found)}"
    )
    return Answer(
        key=_KEY,
        question=_QUESTION,
        figure=f"{say_factor(ratio)} the time, 1/{found.product_flops / softmax_flops:.3g} of the FLOPs",
        sentence=sentence + ".",
        evidence=_table(found, profile.clock.say_per_step),
    )


def _reason(profile: Profile, found: _Attention) -> str:
    low, high = found.softmax_intensity, found.product_intensity
    said = f"only {low:.2g} FLOPs per byte; the GEMMs have {high:.3g}"
    hardware = profile.hardware
    peak = hardware.peak_flops.get(found.precision or "") if hardware else None
    if hardware is None or not peak or not hardware.bandwidth:
        return f"{said}. The limits of the device are unknown"
    balance = peak / hardware.bandwidth
    said += f", and {hardware.name} needs {balance:.3g} to be compute-bound in {found.precision}"
    if high > balance:
        return f"{said}: softmax is memory-bound, the GEMMs are compute-bound"
    return f"{said}: both are memory-bound"


def _find(profile: Profile) -> _Attention | None:
    """By the annotated parts of attention, or else by the sequence bmm, softmax, bmm."""
    forward, steps = stepped(profile).filter(pl.col("phase") == "forward"), profile.num_steps
    products = find_products(profile).filter((pl.col("phase") == "forward") & pl.col("role").is_in([SCORES, VALUES]))
    in_parts = forward.filter(pl.col("part").is_in([SCORES, SOFTMAX, VALUES]))
    softmax = in_parts.filter(pl.col("part") == SOFTMAX)
    if not softmax.height:
        softmax = forward.filter(pl.col("class") == "softmax")
    if not softmax.height or not products.height:
        return None
    other = in_parts.filter((pl.col("part") != SOFTMAX) & (pl.col("class") != "GEMM"))
    by_role = {role: _extents(profile, products.filter(pl.col("role") == role), role) for role in (SCORES, VALUES)}
    return _Attention(
        products_ns=time_of(products) / steps,
        softmax_ns=time_of(softmax) / steps,
        other_ns=time_of(other) / steps,
        softmax_kernels=softmax.height / steps,
        scores=by_role[SCORES],
        values=by_role[VALUES],
        product_bytes=_element_bytes(profile, products),
        softmax_bytes=_element_bytes(profile, softmax),
        precision=_precision(profile, forward),
    )


def _extents(profile: Profile, products: pl.DataFrame, role: str) -> tuple[Extent, ...]:
    """The GEMM sizes of one step: as recorded, or else from the case."""
    recorded = [one for one in extents(profile, products["op_row"].to_list()) if one is not None]
    if recorded and len(recorded) == products.height:
        return tuple(recorded[:: profile.num_steps]) if _repeats(recorded, profile.num_steps) else ()
    case = profile.recording.manifest.case
    if case is None or not isinstance(case.workload.model, ModelShape):
        return ()
    shape, length = case.workload.model, case.workload.context
    k, n = (shape.head_dim, length) if role == SCORES else (length, shape.head_dim)
    one = Extent(case.workload.micro_batch * shape.num_heads, length, k, n)
    return (one,) * shape.num_layers * case.workload.passes


def _repeats(recorded: list[Extent], steps: int) -> bool:
    return len(recorded) % steps == 0 and all(recorded.count(one) % steps == 0 for one in set(recorded))


def _element_bytes(profile: Profile, calls: pl.DataFrame) -> int:
    rows = calls["op_row"].drop_nulls()
    recorded = (
        profile.recording.ops["dtypes"].gather(rows).drop_nulls() if len(rows) else pl.Series([], dtype=pl.String)
    )
    sizes = [_BYTES[kind] for text in recorded.unique() for kind in _dtypes(text) if kind in _BYTES]
    case = profile.recording.manifest.case
    return max(sizes) if sizes else _BYTES[case.workload.precision] if case else 4


def _dtypes(text: str) -> list[str]:
    try:
        return [kind for kind in json.loads(text) if isinstance(kind, str)]
    except ValueError:
        return []


def _precision(profile: Profile, forward: pl.DataFrame) -> str | None:
    case = profile.recording.manifest.case
    if case is not None:
        return case.workload.precision
    dtypes = share_by(forward.filter(pl.col("class") == "GEMM"), "name", "dtype")["dtype"].drop_nulls()
    return dtypes[0] if dtypes.len() else None


def _without_parts(profile: Profile) -> Answer:
    forward = in_phases(profile, "forward")
    fused = forward.filter(pl.col("class") == "attention")
    if fused.height:
        per_step, share = time_of(fused) / profile.num_steps, time_of(fused) / max(1, time_of(forward))
        short = share_by(fused, "short")["short"][0]
        return Answer(
            key=_KEY,
            question=_QUESTION,
            figure=f"one kernel, {say_time(per_step)}",
            sentence=f"Softmax cannot be timed separately: attention is one fused kernel (`{short}`), "
            f"{say_time(per_step)} {profile.clock.say_per_step} and {say_share(share)} of forward.",
            command=_record(profile),
        )
    reason = f"no softmax runs between two batched GEMMs on the {device_word(profile)} in forward"
    if profile.recording.manifest.compiled:
        return missing(_KEY, _QUESTION, f"{reason}; the compiler fused it", f"{_RECORD} --compile no")
    return missing(_KEY, _QUESTION, reason, _record(profile))


def _record(profile: Profile) -> str:
    return _RECORD if profile.recording.manifest.case is not None else _RECORD_OWN


def _table(found: _Attention, say_per_step: str) -> Table:
    scores, values = (sum(one.flops for one in group) for group in (found.scores, found.values))
    rows: list[tuple[Cell, ...]] = [
        ("the two GEMMs", found.products_ns / 1e6, scores + values or None, None, found.product_intensity or None),
        (
            f"softmax ({count_noun(round(found.softmax_kernels), 'kernel')})",
            found.softmax_ns / 1e6,
            _SOFTMAX_OPS * found.elements or None,
            _SOFTMAX_OPS_BY_HAND * found.elements or None,
            found.softmax_intensity,
        ),
    ]
    if found.other_ns:
        rows.append(("scaling and masking", found.other_ns / 1e6, None, None, None))
    shapes = sorted({str(one) for one in found.scores})
    notes = [_CONVENTION, "FLOP/byte: each element is read and written once; several kernels move more"]
    notes += (
        [f"scores: {', '.join(shapes[:3])}; {say_flops(scores)} in {count_noun(len(found.scores), 'GEMM')}"]
        if shapes
        else []
    )
    return Table(
        title=f"Attention in forward, {say_per_step}",
        columns=(
            Column(key="part", label="part"),
            Column(key="per_step_ms", label="time", kind="ms"),
            Column(key="flops", label="FLOP", kind="count"),
            Column(key="flops_by_hand", label="FLOP at three per element", kind="count"),
            Column(key="flop_per_byte", label="FLOP/byte", kind="number"),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )
