"""How well `recover` does on runs with known truth: tests/fixtures/evidence, or another such directory.

    python bench/recovery.py [DIR] [--format md]

One row per file: `=` the value and certain, `~` the value but not certain, a window that contains the truth, `–` not
determined. Anything certain and wrong is shown as `WRONG`, and makes the exit status 1. The runs are from
`collect_evidence.py`.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.findings import Cell, Column, Table
from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.recording import gather
from stepscope.recover.shape import SIZES
from stepscope.recover.solve.recovery import Field, Recovery
from stepscope.recover.solve.variants import recover_any
from stepscope.render.formats import Format
from stepscope.render.tables import render

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "evidence"
COLUMNS = (*SIZES, "dtype")


def truth_of(path: Path, truths: Mapping[str, Any]) -> dict[str, Any]:
    """What can be found in a file: counters were collected with fewer layers than traces."""
    name = path.name.partition(".")[0]
    told = dict(truths[name])
    if ".csv" in path.name and told["counted_layers"] != told["num_layers"]:
        told["parameters"] = None
        told["num_layers"] = told["counted_layers"]
    told["dtype"] = {"autocast": "bf16"}.get(told["dtype"], told["dtype"])
    return told


def judge(field: Field, truth: object) -> str:
    if field.value == truth:
        return f"= {truth}" if field.certain else f"~ {truth}"
    if field.certain:
        return f"WRONG {field.value} for {truth}"
    if truth in field.alternatives:
        return f"{truth} among {len(field.alternatives) + 1}"
    if isinstance(truth, int) and field.low is not None and field.high is not None and field.low <= truth <= field.high:
        return f"{truth} in {field.low}..{field.high}"
    return "–" if field.value is None else f"MISSED {field.value} for {truth}"


def judge_parameters(answer: Recovery, truth: int | None) -> str:
    found = answer.fields["parameters"].value
    if truth is None or not isinstance(found, int):
        return "–"
    return f"{(found - truth) / truth:+.2%}"


def examine(path: Path, truths: Mapping[str, Any]) -> tuple[Cell, ...]:
    truth = truth_of(path, truths)
    began = time.perf_counter()
    answer = recover_any([gather(open_recording(path))])
    seconds = time.perf_counter() - began
    kind = "counters" if ".csv" in path.name else "trace, " + path.name.split(".")[1]
    name = path.name.partition(".")[0]
    judged = [judge(answer.fields[field], truth[field]) for field in COLUMNS]
    return (name, kind, *judged, judge_parameters(answer, truth["parameters"]), seconds * 1000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=FIXTURES)
    parser.add_argument("--format", type=Format, default=Format.TEXT)
    asked = parser.parse_args()
    truths = json.loads((asked.folder / "truth.json").read_text())
    files = sorted([*asked.folder.glob("*.csv.gz"), *asked.folder.glob("*.json.gz")])
    rows = tuple(examine(path, truths) for path in files)
    columns = (
        Column(key="run", label="run"),
        Column(key="evidence", label="evidence"),
        *(Column(key=key, label=key) for key in COLUMNS),
        Column(key="parameters", label="parameters"),
        Column(key="ms", label="time", kind="ms"),
    )
    print(render(Table(title="Recovered", columns=columns, rows=rows), asked.format))
    sys.exit(any("WRONG" in str(cell) or "MISSED" in str(cell) for row in rows for cell in row))


if __name__ == "__main__":
    main()
