"""The recorded runs with known truth, and ways to change them."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.facts import Sighting
from stepscope.recover.solve.recovery import Recovery, recover

FOLDER = Path(__file__).parents[2] / "fixtures" / "evidence"
TRUTHS: dict[str, dict[str, Any]] = json.loads((FOLDER / "truth.json").read_text())
COUNTERS = sorted(path.name for path in FOLDER.glob("*.csv.gz"))
TRACES = sorted(path.name for path in FOLDER.glob("*.json.gz"))


@cache
def read_evidence(file: str) -> KernelEvidence:
    return gather(open_recording(FOLDER / file))


@cache
def recovered(file: str) -> Recovery:
    return recover([read_evidence(file)])


def truth_of(file: str) -> dict[str, Any]:
    """Return the truth of a file. Counters were collected for fewer layers than traces, and the number of parameters
    for these is not recorded."""
    truth = dict(TRUTHS[file.partition(".")[0]])
    if ".csv" in file and truth["counted_layers"] != truth["num_layers"]:
        truth |= {"num_layers": truth["counted_layers"], "parameters": None}
    return truth | {"dtype": {"autocast": "bf16"}.get(truth["dtype"], truth["dtype"])}


def keep_kernels(evidence: KernelEvidence, sightings: Iterable[Sighting]) -> KernelEvidence:
    """Return the evidence of a file that lost all other kernels: the launch numbers stay."""
    kept = (msgspec.structs.replace(one, index=index) for index, one in enumerate(sightings))
    return replace(evidence, sightings=tuple(kept))


def with_kernels(evidence: KernelEvidence, sightings: Iterable[Sighting]) -> KernelEvidence:
    """Return the evidence of a run that launched these kernels in this order, without their times."""
    numbered = (
        msgspec.structs.replace(one, index=index, launch=index, start_ns=None) for index, one in enumerate(sightings)
    )
    return replace(evidence, sightings=tuple(numbered))
