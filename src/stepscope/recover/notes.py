"""The tables of counters that this part of the software began with, explained: `bench/notes_tables.py` prints them.

`families.fmha_notes` has the numbers over length and width, beside the model. Here are those over the number of layers,
which were taken to see what depth does. It does nothing.
"""

from stepscope.findings import Cell, Column, Table
from stepscope.recover.families import fmha_notes
from stepscope.recover.families.fmha_notes import Note, predict

_LENGTH, _WIDTH = 128, 768
# By number of layers: operations in fp64 and in fp32.
_OVER_LAYERS = {
    6: (25_952_253, 1_873_518_609),
    12: (25_952_235, 1_873_516_571),
    96: (25_952_253, 1_873_526_810),
}


def notes_tables() -> list[Table]:
    """Every number of the notes, with what the model says of it."""
    return [fmha_notes.compare(), _compare_layers()]


def _compare_layers() -> Table:
    rows = [_row(layers, note) for layers, measured in _OVER_LAYERS.items() for note in _notes(*measured)]
    return Table(
        title="The same over the number of layers",
        columns=(
            Column(key="num_layers", label="layers", kind="count"),
            Column(key="counter", label="counter"),
            Column(key="measured", label="measured", kind="count"),
            Column(key="model", label="model", kind="count"),
            Column(key="residual_ppm", label="residual, ppm", kind="number"),
        ),
        rows=tuple(rows),
        notes=(
            f"length {_LENGTH}, hidden {_WIDTH}; the model does not know the number of layers",
            "equal sums: as many launches were counted in every run, and a layer more is the same kernels once more",
        ),
    )


def _notes(fp64: int, fp32: int) -> tuple[Note, Note]:
    return Note(_LENGTH, _WIDTH, "fp64 operations", fp64), Note(_LENGTH, _WIDTH, "fp32 operations", fp32)


def _row(layers: int, note: Note) -> tuple[Cell, ...]:
    model = predict(note)
    return layers, note.counter, note.measured, round(model), 1e6 * (note.measured / model - 1)
