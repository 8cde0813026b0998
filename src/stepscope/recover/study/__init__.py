"""`stepscope recover --study`: which counter of which kernel depends on which field, over runs with known settings.

Recovery infers the model from counters. A study goes the other way and shows what counters can reveal. A counter that
depends on one field only reveals it. Most depend on several, and many on none: kernels work on whole tiles, and another
layer only repeats the same kernels.
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
    """Return tables of sensitivity, of what reveals each field, and of principal components; then a figure for each
    field with three or more values.

    `names` are used in messages and default to the file names. `truths` are the settings of recordings that do not
    include them, by name without directory and extensions.
    """
    if len(recordings) < 2:
        raise StepscopeError(
            f"a study requires at least two runs, got {len(recordings)}",
            detail="expected runs that differ in a setting",
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
        f"the {len(design.runs)} runs do not differ in any numeric field",
        detail=f"all have {common}" if common else "they have no field in common",
        hint=_HINT,
    )


__all__ = ["Settings", "read_truths", "study"]
