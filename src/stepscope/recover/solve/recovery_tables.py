"""The answer as tables: fields with what shows them, candidates, parameters item by item."""

from stepscope.findings import Cell, Column, Page, Table
from stepscope.recover.solve.recovery import FIELDS, Candidate, Field, Recovery

_LABELS = {
    "num_layers": "layers",
    "d_model": "width",
    "num_heads": "heads",
    "num_kv_heads": "key-value heads",
    "d_head": "head size",
    "d_ff": "feed-forward width",
    "vocab_size": "vocabulary",
    "batch": "batch",
    "context": "context",
    "dtype": "data type",
    "parameters": "parameters",
}
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
    kind = f"a Transformer, {answer.family}" if answer.family else "a Transformer"
    certain = [name for name in FIELDS if answer.fields[name].certain]
    lines = [f"{files}: {kind}; {len(certain)} of {len(FIELDS)} fields are certain"]
    if answer.candidates:
        lines.insert(1, _spell_model(answer.candidates[0]))
    if answer.counts:
        lines.append(
            f"{answer.explained} of {answer.counts} counts of elements explained; "
            f"{_spell_sets(answer.num_consistent)} all products and attentions"
        )
    return "\n".join(lines)


def _spell_model(best: Candidate) -> str:
    grouped = f" ({best.num_kv_heads} for keys and values)" if best.num_kv_heads != best.num_heads else ""
    sizes = [f"{best.num_layers} layers of width {best.d_model:,}", f"{best.num_heads} heads of {best.d_head}{grouped}"]
    sizes += [f"feed-forward {best.d_ff:,}"] if best.d_ff else []
    sizes += [f"vocabulary {best.vocab_size:,}"] if best.vocab_size else []
    sizes.append(f"{best.batch} × {best.context:,} tokens in {best.dtype or 'an unknown data type'}")
    sizes += [f"{best.parameters / 1e6:,.1f} M parameters"] if best.parameters else []
    return "; ".join(sizes)


def _spell_sets(count: int) -> str:
    return "one set of sizes fits" if count == 1 else f"{count:,} sets of sizes fit"


def fields_table(answer: Recovery) -> Table:
    rows = tuple(_row(name, answer.fields[name]) for name in FIELDS)
    decide = tuple(f"would decide: {one}" for one in answer.would_decide)
    return Table(
        title="What ran",
        columns=(
            Column(key="field", label="field"),
            Column(key="value", label="value"),
            Column(key="certain", label="certain"),
            Column(key="alternatives", label="or"),
            Column(key="evidence", label="because"),
        ),
        rows=rows,
        notes=(*answer.notes, *decide),
    )


def _row(name: str, field: Field) -> tuple[Cell, ...]:
    value = f"{field.value:,}" if isinstance(field.value, int) else field.value
    return (_LABELS[name], value, "yes" if field.certain else "no", _alternatives(field), "; ".join(field.evidence))


def _alternatives(field: Field) -> str:
    if field.low is not None:
        return f"{field.low:,} to {field.high:,}" if field.high is not None else "or more"
    words = [f"{one:,}" if isinstance(one, int) else str(one) for one in field.alternatives]
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more


def candidates_table(answer: Recovery) -> Table:
    keys = [name for name in FIELDS if name != "dtype"]
    shown = answer.candidates[:_SHOWN_CANDIDATES]
    return Table(
        title="Candidates, the most usual first",
        columns=tuple(Column(key=key, label=_LABELS[key], kind="count") for key in keys),
        rows=tuple(tuple(getattr(candidate, key) for key in keys) for candidate in shown),
        notes=(f"{len(answer.candidates) - len(shown)} more in --format json",)
        if len(answer.candidates) > len(shown)
        else (),
    )


def parameters_table(answer: Recovery) -> Table:
    count = sum(item.count for item in answer.items)
    rows = (*((item.name, item.count, item.count / count) for item in answer.items), ("in all", count, 1.0))
    return Table(
        title="Parameters of the first candidate",
        columns=(
            Column(key="item", label="item"),
            Column(key="parameters", label="parameters", kind="count"),
            Column(key="share", label="share", kind="share"),
        ),
        rows=rows,
    )
