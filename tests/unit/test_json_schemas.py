"""The published JSON Schemas are up to date, and what stepscope prints is valid."""

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import stepscope
from stepscope.api.display import encode_document
from stepscope.api.rank_files import Opened
from stepscope.explain.trace.summary import SCHEMA
from tests.unit.explain.gate_runs import baseline_of, make_run
from tests.unit.rank_recordings import Rank, record_ranks

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools/json_schemas.py"))
FIXTURES = sorted((ROOT / "tests/fixtures").glob("h200_nano_*.json.gz"))


def read_schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TOOL["FOLDER"] / TOOL["file_name"](name)).read_text())
    return found


def validate(text: str, name: str) -> None:
    jsonschema.Draft202012Validator(read_schema(name)).validate(json.loads(text))


@pytest.mark.parametrize("name", list(TOOL["DOCUMENTS"]))
def test_the_published_schema_is_current_and_valid(name: str) -> None:
    published = TOOL["FOLDER"] / TOOL["file_name"](name)
    assert published.read_text() == TOOL["make_schema"](name), "out of date: python tools/json_schemas.py"
    jsonschema.Draft202012Validator.check_schema(read_schema(name))


def test_no_schema_is_left_over() -> None:
    assert {path.name for path in TOOL["FOLDER"].iterdir()} == {TOOL["file_name"](name) for name in TOOL["DOCUMENTS"]}


@pytest.mark.parametrize("trace", FIXTURES, ids=lambda path: path.name)
def test_documents_of_traces_are_valid(trace: Path) -> None:
    validate(stepscope.load(trace, cache=False).to_json(), SCHEMA)


def test_the_document_of_several_ranks_is_valid() -> None:
    profiles = record_ranks([Rank(compute_us=[100.0] * 12), Rank(compute_us=[150.0] * 12)])
    run = stepscope.Run([Opened.of(Path(f"rank{rank}"), one.recording) for rank, one in enumerate(profiles)])
    assert len(run.to_dict()["files"]) == 2
    validate(run.to_json(), SCHEMA)


def test_the_document_of_a_memory_snapshot_is_valid() -> None:
    run = stepscope.load(ROOT / "tests/fixtures/h200_tiny_train.pickle.gz", cache=False)
    validate(run.to_json(), "stepscope.memory-summary/1")


def test_a_baseline_is_valid() -> None:
    validate(encode_document(baseline_of(make_run(1, 2, 3))), "stepscope.baseline/1")


@pytest.mark.parametrize(
    ("field", "value"), [("schema", "stepscope.explain/1"), ("step_ns", "fast"), ("classes", [{"class": "GEMM"}])]
)
def test_wrong_documents_are_invalid(field: str, value: object) -> None:
    document = stepscope.load(FIXTURES[0], cache=False).to_dict() | {field: value}
    with pytest.raises(jsonschema.ValidationError):
        validate(msgspec.json.encode(document).decode(), SCHEMA)
