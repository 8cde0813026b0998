"""Rules about the step as a whole: communication, recomputation, and the measurement itself."""

import numpy as np
import polars as pl

from stepscope.explain.rules.evidence import Evidence, ms
from stepscope.explain.rules.replay import Floats
from stepscope.explain.rules.types import Hit, Rule, settle
from stepscope.explain.trace.accounting import account

LEAST_EXPOSED = 0.02
# PyTorch's checkpoint passes each saved tensor through a Python function, in forward and in backward. Of the host's
# time for the launches that are not repeated, what is left without: forward took 54.1 ms with it and 38.1 without
# (medium model, H200), a share of 0.7. The machine varied by 15 %: this is the cautious end.
UNHOOKED_HOST_SHARE = 0.8
_WITHOUT_HOOKS = "CheckpointFunction"  # the variant with use_reentrant=True
FEW_KERNELS, MOST_OF_TIME = 3, 0.6


def find_exposed_communication(evidence: Evidence) -> Hit | None:
    return _find_exposed(evidence, evidence.kernels, "communication runs", "backward")


def find_exposed_copies(evidence: Evidence) -> Hit | None:
    crossing = pl.col("name").str.contains(r"(?i)HtoD|DtoH|host to device|device to host").fill_null(value=False)
    marked = evidence.kernels.with_columns(
        pl.when(crossing).then(pl.lit("communication")).otherwise(pl.lit("other")).alias("class")
    )
    return _find_exposed(evidence, marked, "copies between host and GPU run", None)


def _find_exposed(evidence: Evidence, kernels: pl.DataFrame, what: str, phase: str | None) -> Hit | None:
    """What is of the class `communication` and runs alone on the device."""
    whole = account(kernels, evidence.window)
    exposed, hidden = (
        time / evidence.num_steps for time in (whole.communication_exposed_ns, whole.communication_hidden_ns)
    )
    if exposed < LEAST_EXPOSED * evidence.step_ns:
        return None
    computing = kernels.filter(pl.col("class") != "communication")
    in_phase = computing.filter(pl.col("phase") == phase) if phase else computing.head(0)
    room = max(0.0, evidence.per_step(in_phase if in_phase.height else computing) - hidden)
    text = f"{what} alone for {ms(exposed)} a step and beside other kernels for {ms(hidden)}"
    if room >= exposed:
        text += f"; {ms(room)} of other kernels could hide it"
    else:
        text += f"; only {ms(room)} of kernels are left to hide it: fewer bytes or a faster link would help more"
    return Hit(evidence=text, saving_ns=min(exposed, room))


def find_recomputation(evidence: Evidence) -> Hit | None:
    again = evidence.kernels.filter("recomputed")
    if not again.height:
        return None
    removed = np.zeros(evidence.kernels.height, dtype=np.bool_)
    removed[again["row"].to_numpy()] = True
    gain = evidence.gain_of(evidence.durations, removed, host_share=_unhooked(evidence, again))
    text = (
        f"{again.height / evidence.num_steps:,.0f} kernels a step compute activations a second time, "
        f"{ms(evidence.per_step(again))}"
    )
    return settle(evidence, gain, text)


def _unhooked(evidence: Evidence, again: pl.DataFrame) -> Floats:
    """The share of the host's time that stays in the modules which are called a second time."""
    if evidence.profile.ops["name"].str.contains(_WITHOUT_HOOKS).any():
        return np.ones(evidence.kernels.height)
    inside = evidence.kernels["module"].is_in(again["module"].drop_nulls().unique().to_list())
    hooked = inside.fill_null(value=False).to_numpy() & evidence.replay.is_launching
    return np.where(hooked, UNHOOKED_HOST_SHARE, 1.0)


def find_dominant_kernels(evidence: Evidence) -> Hit | None:
    total = float(evidence.kernels["time_ns"].sum())
    by_name = evidence.kernels.group_by("short").agg(pl.col("time_ns").sum()).sort("time_ns", "short", descending=True)
    top = by_name.head(FEW_KERNELS)
    if not total or by_name.height <= FEW_KERNELS or top["time_ns"].sum() < MOST_OF_TIME * total:
        return None
    named = ", ".join(f"{short} ({time / total:.0%})" for short, time in top.iter_rows())
    return Hit(evidence=f"{named}: together {float(top['time_ns'].sum()) / total:.0%} of the GPU time")


def report_doubts(evidence: Evidence) -> Hit | None:
    doubts = evidence.profile.recording.manifest.doubts
    return Hit(evidence="; ".join(doubt.text for doubt in doubts)) if doubts else None


RULES = (
    Rule(code="SS011", check=find_exposed_communication),
    Rule(code="SS013", check=find_recomputation, on_cpu=True),
    Rule(code="SS014", check=find_dominant_kernels, on_cpu=True),
    Rule(code="SS016", check=report_doubts, on_cpu=True),
    Rule(code="SS020", check=find_exposed_copies),
)
