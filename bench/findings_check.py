"""Are the findings' estimates right? Each is applied to a model and measured.

    python bench/findings_check.py [--out FILE.jsonl] [--only SS004 …]

For each pair: `stepscope profile` of the step before gives the finding and the saving it estimates; `stepscope bench` of
the step before and after the fix gives the saving that came. Needs a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MEDIUM = ["--size", "medium", "--context", "512"]
SYNC = ["--model", "synchronising_model:build", "--context", "256"]
# (finding, settings, what it is before, what it is after)
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


def step_ms(settings: list[str], folder: Path, cwd: Path) -> tuple[float, dict[str, Any]]:
    table = json.loads(stepscope("bench", *settings, "--out", str(folder), "--format", "json", cwd=cwd))
    row = table["rows"][0]
    return float(row["step_median_ms"]), row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    here = Path(__file__).parent
    print("| finding | estimated ms | measured ms | step before | after | estimated / measured |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for code, settings, before, after in PAIRS:
            if options.only and code not in options.only:
                continue
            recording = Path(folder, code)
            stepscope("profile", *settings, *before, "--out", str(recording), cwd=here)
            summary = json.loads(stepscope("explain", str(recording), "--format", "json", cwd=here))
            savings = {one["code"]: one["saving_ns"] for one in summary["findings"]}
            estimated = savings.get(code)
            first, _ = step_ms([*settings, *before], Path(folder, code, "before"), here)
            second, row = step_ms([*settings, *after], Path(folder, code, "after"), here)
            measured = first - second
            estimate = None if estimated is None else estimated / 1e6
            ratio = f"{estimate / measured:.2f}" if estimate is not None and measured else "–"
            shown = "not found" if estimate is None else f"{estimate:.2f}"
            print(f"| {code} | {shown} | {measured:.2f} | {first:.2f} | {second:.2f} | {ratio} |", flush=True)
            result = {
                "finding": code,
                "settings": settings,
                "before": before,
                "after": after,
                "estimated_ms": estimate,
                "before_ms": first,
                "after_ms": second,
                "all_findings": savings,
                "device": summary["device"],
                "row": row,
            }
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
