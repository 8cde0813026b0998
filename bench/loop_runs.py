"""What `stepscope run` finds in training scripts, and what it costs them while nothing is recorded.

    python bench/loop_runs.py [SCRIPT …] [--ranks 2] [--out FILE.jsonl] [--keep DIR] [-- --device cuda …]

Without scripts: those in bench/loops, which know nothing about stepscope; ddp.py runs with two ranks. For each:

- `stepscope run --stop SCRIPT` in its own process: how steps were found, the page's headline, and its first finding.
- The overhead on steps that are not recorded: the script runs again, and stepscope's hooks are installed for six steps
  and removed for six, in turns, so that a busy machine slows both alike. The ratio is that of the median step times.
  Watching for out-of-memory errors is on in both turns: `oom_page.py cost` measures it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import stepscope
from stepscope.recording.store import load

LOOPS = Path(__file__).parent / "loops"
OF_RANKS = ("ddp.py",)
TURN = 6  # steps with and without the hooks


def main() -> None:
    if sys.argv[1:2] == ["--turns"]:
        time_in_turns(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="keep recordings and pages here")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:split])
    scripts = given.scripts or sorted(LOOPS.glob("*.py"))
    with tempfile.TemporaryDirectory() as scratch:
        for script in scripts:
            folder = (given.keep or Path(scratch)) / script.stem
            row = measure(script.resolve(), folder.resolve(), own[split + 1 :], given.ranks)
            print(json.dumps(row, indent=1), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def measure(script: Path, folder: Path, arguments: list[str], ranks: int) -> dict[str, Any]:
    is_parallel = script.name in OF_RANKS
    start = [sys.executable] if not is_parallel else torchrun(ranks)
    began = time.monotonic()
    command = [*start, "-m", "stepscope", "run", "--stop", "--force", "--out", str(folder), str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=workplace(folder))
    row: dict[str, Any] = {
        "script": script.name,
        "exit": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
    }
    # A progress bar may be on the same line.
    said = [line.partition("stepscope: ")[2] for line in done.stderr.splitlines() if "stepscope: " in line]
    row["found"] = next((line for line in said if line.startswith("found steps")), said[-1:] or done.stderr[-500:])
    if (folder / "rank-0").exists():
        run = stepscope.load(folder)
        manifest = load(folder / "rank-0").manifest
        first = run.findings[0] if run.findings else None
        row |= {
            "headline": next((line for line in said if "per training step" in line), ""),
            "step_ms": round(run.step_ms, 3),
            "first_finding": f"{first.code} {first.title}" if first else None,
            "doubts": [one.text for one in manifest.doubts],
            "device": manifest.device,
            "versions": manifest.versions,
        }
    if not is_parallel:
        row["overhead"] = overhead(script, workplace(folder), arguments)
    return row


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def workplace(folder: Path) -> Path:
    """Scripts write checkpoints and data to the current directory."""
    place = folder.with_name(f"{folder.name}-files")
    place.mkdir(parents=True, exist_ok=True)
    return place


def overhead(script: Path, place: Path, arguments: list[str]) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--turns", str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place)
    line = next((line for line in done.stdout.splitlines() if line.startswith("turns: ")), None)
    return json.loads(line.removeprefix("turns: ")) if line else done.stderr[-500:]


def time_in_turns(script: str, arguments: list[str]) -> None:
    """Run a script with the hooks of stepscope in every other turn, and print the median step times."""
    import torch
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    from stepscope.loop.place import RunPlace
    from stepscope.loop.recorder import LoopRecorder, RecordingPlan

    stepscope.explain_oom(
        "unused"
    )  # in both turns: it records stacks in the first steps, which every turn would repeat
    never = RecordingPlan(skip=10**9)
    place = RunPlace(folder=Path("unused"), page=Path("unused.html"))
    recorder: LoopRecorder | None = None
    marks: dict[bool, list[float]] = {False: [], True: []}
    count, last = 0, 0.0
    is_due = False

    def after_step(*_: object) -> None:
        nonlocal count, last, is_due
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        # The first two steps of a turn are slow either way: Python specializes the changed functions again.
        if count % TURN > 1:
            marks[recorder is not None].append(now - last)
        count += 1
        is_due = count % TURN == 0
        last = time.perf_counter()

    def clear(*args: Any, **kwargs: Any) -> None:
        """Change turns here: hooks of optimizers must not be changed while one runs."""
        nonlocal recorder, is_due
        if is_due:
            is_due = False
            if recorder is None:
                recorder = LoopRecorder(place, never, script="turns", tell=lambda _: None)
                recorder.start()
            else:
                recorder._watch.uninstall()
                recorder._undo.close()
                recorder.oom.close()
                recorder = None
        zero_grad(*args, **kwargs)

    zero_grad = Optimizer.zero_grad
    Optimizer.zero_grad = clear  # type: ignore[method-assign]
    register_optimizer_step_post_hook(after_step)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), {"__name__": "__main__", "__file__": script})
    finally:
        without, within = (statistics.median(marks[key]) for key in (False, True))
        result = {"plain_ms": without * 1e3, "watched_ms": within * 1e3, "ratio": within / without}
        print("turns: " + json.dumps({**result, "steps": len(marks[True])}))


if __name__ == "__main__":
    main()
