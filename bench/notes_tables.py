"""Counters of memory-efficient attention that were recorded before they could be explained, next to a model of them.

    python bench/notes_tables.py [--format md]

Two series of training runs of a GPT-2, with dropout: over the length at width 768, and over the width at length 128.
Only the sums over all launches were written down. Heads × batch × launches is the only unknown; a single integer
explains both tables. A third series, over the number of layers, shows that depth has no effect. Residuals are in parts
per million.
"""

import argparse
from typing import Literal

import msgspec

from stepscope.findings import Cell, Column, Table
from stepscope.recover.families.efficient_attention import InstructionCounts, choose_variant, count_head
from stepscope.render.formats import Format
from stepscope.render.tables import render

NUM_HEADS = 12
HEADS_BATCHES_LAUNCHES = 6144

Counter = Literal["fp32 operations", "fp64 operations", "fp32 fma", "fp64 fma"]


class Note(msgspec.Struct, frozen=True):
    """One number of the tables. `length` and `width` (of the model) are the run's."""

    length: int
    width: int
    counter: Counter
    measured: int

    @property
    def head_dim(self) -> int:
        return self.width // NUM_HEADS


_OVER_LENGTH: dict[Counter, dict[int, int]] = {
    "fp32 operations": {
        64: 643_694_621,
        128: 1_873_521_678,
        256: 6_091_597_777,
        512: 21_560_524_758,
        1024: 80_625_502_255,
    },
    "fp64 operations": {64: 8_650_768, 128: 25_952_264, 256: 86_507_544, 512: 311_427_031, 1024: 1_176_502_234},
    "fp32 fma": {64: 37_748_744, 128: 100_663_295, 256: 301_989_882, 512: 1_006_632_919},
    "fp64 fma": {64: 3_932_164, 128: 11_796_486, 256: 39_321_616},
}
_OVER_WIDTH: dict[Counter, dict[int, int]] = {
    "fp32 operations": {
        192: 1_647_049_723,
        384: 1_647_031_317,
        768: 1_873_502_200,
        1536: 3_289_645_067,
        3072: 5_277_745_136,
        6144: 9_732_096_043,
    },
    "fp64 operations": {
        192: 25_952_290,
        384: 25_952_265,
        768: 25_952_235,
        1536: 34_603_020,
        3072: 34_603_004,
        6144: 34_603_067,
    },
}
NOTES = (
    *(Note(length, 768, counter, number) for counter, row in _OVER_LENGTH.items() for length, number in row.items()),
    *(Note(128, width, counter, number) for counter, row in _OVER_WIDTH.items() for width, number in row.items()),
)


def predict(note: Note) -> float:
    counts = count_head(note.length, note.length, note.head_dim, mask="causal", dropout=True)
    return _pick(counts.times(HEADS_BATCHES_LAUNCHES), note.counter)


def _pick(counts: InstructionCounts, counter: Counter) -> float:
    match counter:
        case "fp32 operations":
            return counts.fp32_operations
        case "fp64 operations":
            return counts.fp64_operations
        case "fp32 fma":
            return counts.fma
        case "fp64 fma":
            return counts.double_fma


def formulas(note: Note) -> tuple[int | None, int | None]:
    """The two textbook formulas that the numbers were compared with, for one sequence: GEMMs and softmax under half a
    mask, and all GEMMs. For fused multiply-adds the first is 2·L²·d; for double precision there is none.
    """
    square = note.length**2
    match note.counter:
        case "fp32 operations":
            return NUM_HEADS * (2 * square * note.head_dim + 3 * square), NUM_HEADS * 4 * square * note.head_dim
        case "fp32 fma":
            return NUM_HEADS * 2 * square * note.head_dim, None
        case _:
            return None, None


def compare() -> Table:
    """Every number of the tables: measured, from the model, from the formulas."""
    return Table(
        title="Memory-efficient attention in fp32: counters, model and textbook formulas",
        columns=(
            Column(key="length", label="length", kind="count"),
            Column(key="width", label="hidden", kind="count"),
            Column(key="kernel", label="kernel", detail=True),
            Column(key="counter", label="counter"),
            Column(key="measured", label="measured", kind="count"),
            Column(key="model", label="model", kind="count"),
            Column(key="residual_ppm", label="residual, ppm", kind="number"),
            Column(key="formula", label="B·H·(2L²d+3L²)", kind="count"),
            Column(key="ratio", label="measured / formula", kind="ratio"),
            Column(key="products", label="B·H·4L²d", kind="count", detail=True),
            Column(key="products_ratio", label="measured / GEMMs", kind="ratio", detail=True),
        ),
        rows=tuple(_compare_one(note) for note in NOTES),
        notes=(
            f"the only unknown in the model: heads × batch × launches = {HEADS_BATCHES_LAUNCHES:,}",
            "the formula for fp32 fma is B·H·2L²d; formulas are for one sequence, B = 1",
            "the GEMMs run on the tensor cores as 3×TF32 and are in none of these counters",
        ),
    )


def _compare_one(note: Note) -> tuple[Cell, ...]:
    model = predict(note)
    formula, products = formulas(note)
    return (
        note.length,
        note.width,
        choose_variant(note.head_dim).name,
        note.counter,
        note.measured,
        round(model),
        1e6 * (note.measured / model - 1),
        formula,
        note.measured / formula if formula else None,
        products,
        note.measured / products if products else None,
    )


_LENGTH, _WIDTH = 128, 768
# By number of layers: fp64 and fp32 operations.
_OVER_LAYERS = {
    6: (25_952_253, 1_873_518_609),
    12: (25_952_235, 1_873_516_571),
    96: (25_952_253, 1_873_526_810),
}


def notes_tables() -> list[Table]:
    """Every number of the notes, with the prediction of the model."""
    return [compare(), _compare_layers()]


def _compare_layers() -> Table:
    rows = [_compare_layer(layers, note) for layers, measured in _OVER_LAYERS.items() for note in _notes(*measured)]
    return Table(
        title="The same counters for different numbers of layers",
        columns=(
            Column(key="num_layers", label="layers", kind="count"),
            Column(key="counter", label="counter"),
            Column(key="measured", label="measured", kind="count"),
            Column(key="model", label="model", kind="count"),
            Column(key="residual_ppm", label="residual, ppm", kind="number"),
        ),
        rows=tuple(rows),
        notes=(
            f"length {_LENGTH}, hidden {_WIDTH}; the model does not use the number of layers",
            "equal sums: every run counted the same number of launches, and another layer launches "
            "the same kernels again",
        ),
    )


def _notes(fp64: int, fp32: int) -> tuple[Note, Note]:
    return Note(_LENGTH, _WIDTH, "fp64 operations", fp64), Note(_LENGTH, _WIDTH, "fp32 operations", fp32)


def _compare_layer(layers: int, note: Note) -> tuple[Cell, ...]:
    model = predict(note)
    return layers, note.counter, note.measured, round(model), 1e6 * (note.measured / model - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", type=Format, default=Format.TEXT)
    asked = parser.parse_args()
    for table in notes_tables():
        print(render(table, asked.format))


if __name__ == "__main__":
    main()
