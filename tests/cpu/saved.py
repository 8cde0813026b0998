"""Tensors saved for backward after a forward pass, listed as the memory recorder does."""

from collections.abc import Iterable
from dataclasses import asdict

import polars as pl
import torch

from stepscope.measure.memory.marks import Places
from stepscope.measure.memory.saved_tensors import SavedTensor, audit
from stepscope.recording.tables import conform
from stepscope.spec import Workload
from stepscope.step import Step, build
from stepscope.step.annotation import annotated


def audit_forward(step: Step) -> tuple[SavedTensor, ...]:
    places = Places()
    with annotated(step, backend=places.open):
        step.phases[0][1]()
    return audit(step, places)


def frame_of(rows: Iterable[SavedTensor]) -> pl.DataFrame:
    """The rows as the table `saved` of a recording."""
    return conform("saved", pl.DataFrame([asdict(row) for row in rows]))


def saved_by(workload: Workload) -> pl.DataFrame:
    return frame_of(audit_forward(build(workload, torch.device("cpu"))))
