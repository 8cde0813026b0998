"""`stepscope recover --study`: which kernel's counter depends on which field of the model, over runs of known settings.

Recovery goes from counters to a model; this goes the other way, to see what there is to recover from. A counter that
follows one field and no other reveals it. Most follow several, and many follow none: kernels work on whole tiles, and
a layer more is the same kernels once more.
"""

from collections.abc import Mapping, Sequence

from stepscope.errors import StepscopeError
from stepscope.findings import Figure, Table
from stepscope.recording.store import Recording
from stepscope.recover.study.design import Design, make_design
from stepscope.recover.study.elasticity import make_sensitivity
from stepscope.recover.study.runs import Settings, read_runs, read_truths
from stepscope.recover.study.tables import components_tables, make_figures, reveals_table, sensitivity_table

_HINT = "stepscope profile --counters --size small --num-layers 2 --context 128,256,512 --out runs/grid"


def study(
    recordings: Sequence[Recording], *, names: Sequence[str] = (), truths: Mapping[str, Settings] | None = None
) -> list[Table | Figure]:
    """Sensitivity, what reveals what, and principal components; then a figure for each field with three values or more.

    `names` are the recordings' own for messages, their files' by default. `truths` are the settings of those that do
    not know theirs, by name without folder and endings.
    """
    if len(recordings) < 2:
        raise StepscopeError(
            f"a study compares runs, and there {'is one' if recordings else 'are none'}",
            detail="expected two or more that differ in a setting",
            hint=_HINT,
        )
    asked = names or [recording.manifest.file or f"run {i}" for i, recording in enumerate(recordings, start=1)]
    design = make_design(read_runs(recordings, asked, truths or {}))
    _require_difference(design)
    sensitivity = make_sensitivity(design)
    return [
        sensitivity_table(design, sensitivity),
        reveals_table(design, sensitivity),
        *components_tables(design),
        *make_figures(design),
    ]


def _require_difference(design: Design) -> None:
    if design.units:
        return
    common = ", ".join(f"{name} {design.runs[0].numbers[name]}" for name in design.constant)
    raise StepscopeError(
        f"the {len(design.runs)} runs differ in no field that is a number",
        detail=f"all have {common}" if common else "they have no field in common",
        hint=_HINT,
    )


__all__ = ["Settings", "read_truths", "study"]
