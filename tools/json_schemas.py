"""Write the JSON Schemas in docs/schemas from the types that stepscope encodes: `python tools/json_schemas.py`.

A schema belongs to a version of its document (`stepscope.explain/2`). A later version gets another file; within a
version, fields are only added.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepscope.api.run import RanksSummary
from stepscope.explain.trace import summary
from stepscope.recording import baseline
from stepscope.recording.rows import memory_summary, plan_result

FOLDER = Path(__file__).parents[1] / "docs/schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The types of each document, by its `schema`.
DOCUMENTS: dict[str, tuple[str, Sequence[type[msgspec.Struct]]]] = {
    summary.SCHEMA: (
        "What `stepscope explain FILE --format json` prints for a trace, and for several ranks.",
        (summary.Summary, RanksSummary),
    ),
    memory_summary.SCHEMA: (
        "What `stepscope explain FILE --format json` prints for a memory snapshot.",
        (memory_summary.MemorySummary,),
    ),
    plan_result.SCHEMA: ("What `stepscope plan --format json` prints.", (plan_result.PlanResult,)),
    plan_result.FIT_SCHEMA: ("What `stepscope plan --fit SIZE --format json` prints.", (plan_result.FitResult,)),
    baseline.SCHEMA: ("A file that `stepscope baseline save` writes.", (baseline.Baseline,)),
}


def file_name(schema: str) -> str:
    """`stepscope.explain/2` is `explain-2.schema.json`."""
    name, _, version = schema.removeprefix("stepscope.").partition("/")
    return f"{name}-{version}.schema.json"


def make_schema(schema: str) -> str:
    text, types = DOCUMENTS[schema]
    roots, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    for kind in types:
        described = components[kind.__name__]
        described["properties"]["schema"] = {"const": schema}
        described["required"] = list(described["properties"])  # stepscope writes all fields, with null for unknown ones
    document: dict[str, Any] = {"$schema": _DIALECT, "title": schema, "description": text}
    document |= {"anyOf": list(roots)} if len(roots) > 1 else dict(roots[0])
    return json.dumps(document | {"$defs": components}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (FOLDER / file_name(name)).write_text(make_schema(name), encoding="utf-8")
