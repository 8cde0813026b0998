"""Are the findings' estimates right? Applies each fix to a model and measures it.

    python bench/findings_check.py measure DIR [--only SS004 …]      (requires a GPU; minutes)
    python bench/findings_check.py tabulate DIR [--out FILE.jsonl]

For each pair, `measure` keeps a recording of the step before the fix, and times the step before and after it with
`stepscope bench`. `tabulate` asks `stepscope explain` for the estimated saving and prints it next to the measured one,
so that a better estimate can be compared with the same measurements.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MEDIUM = ["--size", "medium", "--context", "512"]
SYNC = ["--model", "synchronising_model:build", "--context", "256"]
# (finding, settings, before, after)
PAIRS: tuple[tuple[str, list[str], list[str], list[str]], ...] = (
    ("SS007", [*MEDIUM, "--precision", "bf16"], ["--optimizer", "adamw"], ["--optimizer", "adamw-fused"]),
    (
        "SS004",
        ["--size", "medium", "--context", "1024", "--precision", "bf16"],
        ["--attention", "naive"],
        ["--attention", "sdpa"],
    ),
    ("SS005", MEDIUM, ["--precision", "fp32"], ["--precision", "tf32"]),
    ("SS003", [*MEDIUM, "--precision", "bf16", "--attention", "sdpa"], ["--compile", "no"], ["--compile", "yes"]),
    (
        "SS001",
        ["--size", "small", "--context", "128", "--precision", "bf16", "--attention", "sdpa"],
        ["--compile", "no"],
        ["--compile", "yes"],
    ),
    ("SS013", [*MEDIUM, "--precision", "bf16"], ["--checkpoint", "block"], ["--checkpoint", "none"]),
    (
        "SS009",
        ["--size", "small", "--context", "1024", "--precision", "bf16", "--attention", "sdpa"],
        ["--vocab", "50257"],
        ["--vocab", "50304"],
    ),
    ("SS002", SYNC, ["--set", "looks=true"], ["--set", "looks=false"]),
)


def stepscope(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "stepscope", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def measure(folder: Path, only: list[str]) -> None:
    here = Path(__file__).parent
    for code, settings, before, after in PAIRS:
        if only and code not in only:
            continue
        place = folder.absolute() / code
        stepscope("profile", *settings, *before, "--out", str(place / "recording"), "--force", cwd=here)
        for name, setting in (("before", before), ("after", after)):
            stepscope("bench", *settings, *setting, "--out", str(place / name), "--fresh", cwd=here)
        print(f"{code} measured", flush=True)


def step_ms(folder: Path) -> dict[str, Any]:
    table = json.loads(stepscope("bench", "--from", str(folder / "results.jsonl"), "--format", "json", cwd=folder))
    row: dict[str, Any] = table["rows"][0]
    return row


def tabulate(folder: Path, out: Path | None) -> None:
    print("| finding | estimated ms | measured ms | estimated / measured | step before | after |")
    print("| --- | --- | --- | --- | --- | --- |")
    for code, settings, before, after in PAIRS:
        place = folder.absolute() / code
        if not (place / "recording").is_dir() or not (place / "after").is_dir():
            continue
        summary = json.loads(stepscope("explain", str(place / "recording"), "--format", "json", cwd=folder))
        savings = {one["code"]: one["saving_ns"] for one in summary["findings"]}
        rows = [step_ms(place / name) for name in ("before", "after")]
        first, second = (float(row["step_median_ms"]) for row in rows)
        measured, estimated = first - second, savings.get(code)
        estimate = None if estimated is None else estimated / 1e6
        ratio = "–" if estimate is None or not measured else f"{estimate / measured:.2f}"
        shown = "not found" if estimate is None else f"{estimate:.2f}"
        print(f"| {code} | {shown} | {measured:.2f} | {ratio} | {first:.2f} | {second:.2f} |", flush=True)
        result = {
            "finding": code,
            "settings": settings,
            "before": before,
            "after": after,
            "estimated_ms": estimate,
            "before_ms": first,
            "after_ms": second,
            "remarks": [row.get("remarks", "") for row in rows],
            "all_findings": savings,
            "device": summary["device"],
            "torch": rows[0]["torch"],
        }
        if out:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "tabulate"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what == "measure":
        measure(options.folder, options.only)
    else:
        tabulate(options.folder, options.out)


if __name__ == "__main__":
    main()
