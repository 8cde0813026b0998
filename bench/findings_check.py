"""Are the findings' estimates right? Applies each fix to a model and measures it.

    python bench/findings_check.py measure DIR [--models small …]      (requires a GPU; about 12 minutes)
    python bench/findings_check.py tabulate DIR [--out FILE.jsonl]

For each model, `measure` records every step that has something to fix, and times all steps before and after the fixes,
twice. It also runs loops with a mistake in them (`bench/findings_loop.py`). `tabulate` reads the findings of the
recordings and prints the estimated savings next to the measured ones, so that a better estimate can be compared with
the same measurements.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import stepscope
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.results_file import read_rows
from stepscope.spec import Workload

HERE = Path(__file__).parent
Settings = dict[str, object]
MODELS: dict[str, Settings] = {
    "small": {"size": "small", "context": 1024},
    "medium": {"size": "medium", "context": 1024},
    "llama": {"hf": str(HERE / "llama.json"), "context": 1024},
}
SHARED: Settings = {"batch": 4, "precision": "bf16", "attention": "sdpa", "optimizer": "adamw", "compile": False}
SHORT: Settings = {"context": 128, "optimizer": "adamw-fused"}
STEPS, ROUNDS = 20, 2


class Pair(NamedTuple):
    """A finding, and the settings that differ before and after its fix."""

    code: str
    before: Settings
    after: Settings


def list_pairs(model: str) -> tuple[Pair, ...]:
    vocabulary: Any = (
        (lambda size: {"set": {"vocab_size": size}}) if model == "llama" else (lambda size: {"vocab": size})
    )
    return (
        Pair("SS001", SHORT, {**SHORT, "compile": True}),
        Pair("SS003", {}, {"compile": True}),
        Pair("SS004", {"attention": "naive"}, {}),
        Pair("SS005", {"precision": "fp32"}, {"precision": "tf32"}),
        Pair("SS007", {}, {"optimizer": "adamw-fused"}),
        Pair("SS009", vocabulary(50257), vocabulary(50304)),
        Pair("SS013", {"checkpoint": "block"}, {}),
    )


def name_settings(settings: Settings) -> str:
    """Return a directory name: `attention-naive`."""
    parts = [
        f"{key}-{value}" if not isinstance(value, dict) else f"{key}-{'-'.join(map(str, *value.items()))}"
        for key, value in settings.items()
    ]
    return "_".join(parts) or "base"


def make_workload(model: str, settings: Settings) -> Workload:
    return stepscope.workload(**{**SHARED, **MODELS[model], **settings})


# --- Measure ----------------------------------------------------------------------------------------------------------


def measure(folder: Path, models: list[str], extra: Settings) -> None:
    for model in models:
        pairs = list_pairs(model)
        for name, settings in {name_settings(pair.before): pair.before for pair in pairs}.items():
            place = folder / model / name
            stepscope.profile(make_workload(model, {**settings, **extra}), out=place, force=True)
            print(f"{model} {name} recorded", flush=True)
        both = {name_settings(one): one for pair in pairs for one in (pair.before, pair.after)}
        for number in range(ROUNDS):
            # Forwards, then backwards, so that a slow drift of the machine cancels out.
            order = list(both.values())[:: -1 if number % 2 else 1]
            workloads = [make_workload(model, {**settings, **extra}) for settings in order]
            stepscope.bench(
                workloads,
                steps=STEPS,
                out=folder / model / f"bench-{number}",
                progress=lambda line: print(line, flush=True),
            )
    loop = [sys.executable, str(HERE / "findings_loop.py"), str(folder / "loops"), "--models", *models]
    subprocess.run([*loop, *(["--device", str(extra["device"])] if "device" in extra else [])], check=True)


# --- Tabulate ---------------------------------------------------------------------------------------------------------


def read_steps(folder: Path, model: str) -> dict[Workload, float]:
    """Return the fastest step of each workload in milliseconds. A disturbance only makes a step longer, and the median
    of the same case differed by a third between rounds."""
    times: dict[Workload, list[float]] = {}
    for path in sorted((folder / model).glob("bench-*/results.jsonl")):
        rows, _ = read_rows(path, BenchRow)
        for row in rows:
            if row.measurement is not None:
                times.setdefault(anywhere(row.case.workload), []).append(min(row.measurement.step_ns) / 1e6)
    return {case: min(values) for case, values in times.items()}


def anywhere(workload: Workload) -> Workload:
    """Return the workload without its device."""
    return msgspec.structs.replace(workload, device="auto")


def estimate(path: Path, code: str) -> dict[str, Any]:
    """Return what the card about a rule estimates. The saving is a share of the recorded step: the CPU may have been
    faster or slower when the steps were timed."""
    run = stepscope.load(path)
    # A fix that solves several findings saves what its card says.
    found = [
        card if one.fix == card.fix else one for card in run.findings for one in (card, *card.also) if one.code == code
    ]
    saving_ms = found[0].saving_ms if found else None
    recorded_ms = run.profile.step_ns / 1e6
    return {"recorded_ms": recorded_ms, "estimated_ms": saving_ms, "estimated_share": (saving_ms or 0.0) / recorded_ms}


def compare(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        steps = read_steps(folder, model)
        for pair in list_pairs(model):
            place = folder / model / name_settings(pair.before)
            before, after = (steps.get(anywhere(make_workload(model, one))) for one in (pair.before, pair.after))
            if place.is_dir() and before is not None and after is not None:
                fix = ", ".join(f"{key} {value}" for key, value in pair.after.items()) or "without"
                rows.append({"finding": pair.code, "model": model, "fix": fix, "before_ms": before, "after_ms": after})
                rows[-1] |= estimate(place, pair.code)
    for place in sorted((folder / "loops").glob("*/")):
        measured = json.loads((place / "measured.json").read_text())
        model, mistake = place.name.split("-")
        times = {f"{when}_ms": min(measured["all"][when]) for when in ("before", "after")}
        rows.append({"finding": measured["code"], "model": model, "fix": f"without {mistake}", **times})
        rows[-1] |= estimate(place / "trace.json.gz", measured["code"])
    for row in rows:
        row["measured_share"] = 1 - row["after_ms"] / row["before_ms"]
    return sorted(rows, key=lambda row: (row["finding"], list(MODELS).index(row["model"])))


def tabulate(folder: Path, out: Path | None) -> None:
    rows = compare(folder)
    print("| finding | model | fix | recorded step, ms | estimated | timed before, ms | after, ms | measured | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        said = "not found" if row["estimated_ms"] is None else f"{row['estimated_share']:.0%}"
        error = abs(row["estimated_share"] - row["measured_share"])
        print(
            f"| {row['finding']} | {row['model']} | {row['fix']} | {row['recorded_ms']:.1f} | {said} "
            f"| {row['before_ms']:.1f} | {row['after_ms']:.1f} | {row['measured_share']:.0%} | {error * 100:.0f} |"
        )
    errors = [abs(row["estimated_share"] - row["measured_share"]) for row in rows]
    kinds = {row["finding"] for row in rows}
    print(
        f"\n{len(rows)} pairs of {len(kinds)} findings: median error {statistics.median(errors) * 100:.1f} "
        f"percentage points of the step, worst {max(errors) * 100:.0f}"
    )
    if out:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "tabulate"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--device", help="for a dry run without a GPU: cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "measure":
        measure(options.folder, options.models, {"device": options.device} if options.device else {})
    else:
        tabulate(options.folder, options.out)


if __name__ == "__main__":
    main()
