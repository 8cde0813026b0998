"""The result of `recover` as tables: fields with their evidence, candidates, and parameters by item.

Fields have the names that a claim uses, so that what `recover` prints can be claimed in `verify`.
"""

from stepscope.findings import Cell, Column, Page, Table
from stepscope.recover.shape import SIZES
from stepscope.recover.solve.recovery import FIELDS, Candidate, Field, Recovery
from stepscope.units import say_parameters

_LISTED = 6
_SHOWN_CANDIDATES = 8


def answer_page(answer: Recovery, *, files: str) -> Page:
    tables = [fields_table(answer)]
    if len(answer.candidates) > 1:
        tables.append(candidates_table(answer))
    if answer.items:
        tables.append(parameters_table(answer))
    return Page(headline=_headline(answer, files), tables=tuple(tables), findings=None)


def _headline(answer: Recovery, files: str) -> str:
    kind = f"{answer.family} Transformer" if answer.family else "Transformer"
    certain = [name for name in FIELDS if answer.fields[name].certain]
    lines = [f"{files}: {kind}, {len(certain)} of {len(FIELDS)} fields certain"]
    if answer.candidates:
        lines.insert(1, _spell_model(answer.candidates[0]))
    if answer.counts:
        fits, explains = (
            ("one set of sizes fits", ", and explains")
            if answer.num_consistent == 1
            else (f"{answer.num_consistent:,} sets of sizes fit", "; the best explains")
        )
        lines.append(
            f"{fits} all GEMM and attention kernels{explains} {answer.explained} of {answer.counts} element counts"
        )
    return "\n".join(lines)


def _spell_model(best: Candidate) -> str:
    shown = [name for name in SIZES if name != "num_kv_heads" or best.num_kv_heads != best.num_heads]
    sizes = [f"{name} {size:,}" for name in shown if (size := getattr(best, name))]
    sizes.append(f"dtype {best.dtype or 'unknown'}")
    sizes += [f"{say_parameters(best.parameters)} parameters"] if best.parameters else []
    return ", ".join(sizes)


def fields_table(answer: Recovery) -> Table:
    rows = tuple(_row(name, answer.fields[name]) for name in FIELDS)
    decide = tuple(f"to narrow this down: {one}" for one in answer.would_decide)
    return Table(
        title="Recovered fields",
        columns=(
            Column(key="field", label="field"),
            Column(key="value", label="value"),
            Column(key="certain", label="certain"),
            Column(key="alternatives", label="alternatives"),
            Column(key="evidence", label="evidence"),
        ),
        rows=rows,
        notes=(*answer.notes, *decide),
    )


def _row(name: str, field: Field) -> tuple[Cell, ...]:
    value = f"{field.value:,}" if isinstance(field.value, int) else field.value
    return (name, value, "yes" if field.certain else "no", _alternatives(field), "; ".join(field.evidence))


def _alternatives(field: Field) -> str:
    if field.low is not None:
        if field.high is not None:
            return f"{field.low:,} to {field.high:,}"
        return "or more" if field.low == field.value else f"{field.low:,} or more"
    words = [f"{one:,}" if isinstance(one, int) else str(one) for one in field.alternatives]
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more


def candidates_table(answer: Recovery) -> Table:
    keys = [name for name in FIELDS if name != "dtype"]
    shown = answer.candidates[:_SHOWN_CANDIDATES]
    return Table(
        title="Candidates, most common first",
        columns=tuple(Column(key=key, label=key, kind="count") for key in keys),
        rows=tuple(tuple(getattr(candidate, key) for key in keys) for candidate in shown),
        notes=(f"{len(answer.candidates) - len(shown)} more in --format json",)
        if len(answer.candidates) > len(shown)
        else (),
    )


def parameters_table(answer: Recovery) -> Table:
    count = sum(item.count for item in answer.items)
    rows = (*((item.name, item.count, item.count / count) for item in answer.items), ("total", count, 1.0))
    return Table(
        title="Parameters of the first candidate",
        columns=(
            Column(key="item", label="item"),
            Column(key="parameters", label="parameters", kind="count"),
            Column(key="share", label="share", kind="share"),
        ),
        rows=rows,
    )
