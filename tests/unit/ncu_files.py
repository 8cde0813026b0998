"""A stand-in for `ncu`, for tests that have no GPU. What it writes was counted on an H200 (GPT-2, two layers, fp32)."""

import sys
from pathlib import Path

import msgspec

COUNTED = Path(__file__).parents[1] / "fixtures" / "h200_gpt2_counters.csv.gz"

STAND_IN = r"""#!{python}
import csv, gzip, io, json, subprocess, sys, time
from pathlib import Path

TAKES = {{
    "--clock-control": {{"base", "none"}},
    "--cache-control": {{"all", "none"}},
    "--profile-from-start": {{"on", "off"}},
    "--page": {{"raw", "details"}},
    "--log-file": None,
    "--metrics": None,
}}
BARE = ("--csv",)
settings = json.loads(Path(__file__).with_name("settings.json").read_text())
arguments, given = sys.argv[1:], {{}}
while arguments and arguments[0].startswith("--"):
    option = arguments.pop(0)
    if option in BARE:
        given[option] = ""
        continue
    if option not in TAKES:
        sys.exit(f"==ERROR== unrecognised option '{{option}}'")
    given[option] = arguments.pop(0)
    if TAKES[option] and given[option] not in TAKES[option]:
        sys.exit(f"==ERROR== the argument '{{given[option]}}' for option '{{option}}' is invalid")
with Path(__file__).with_name("calls.jsonl").open("a") as calls:
    calls.write(json.dumps([given, arguments]) + "\n")
assert arguments[1:4] == ["-P", "-m", "stepscope.measure.targets.ncu"], arguments
request, code = Path(arguments[4]), 0
context = str(json.loads(request.read_text())["case"]["workload"]["context"])
settings |= settings.get("at_context", {{}}).get(context, {{}})
if settings.get("run_target"):
    code = subprocess.run(arguments).returncode
elif settings.get("answer"):
    request.with_suffix(".answer.json").write_text(settings["answer"])
for stage in settings.get("stages", ()):
    request.with_suffix(".progress").write_text(stage)
    heard = Path(__file__).with_name("heard.txt")
    while not heard.exists() or stage not in heard.read_text():
        time.sleep(0.02)
if settings.get("hangs"):
    program = subprocess.Popen(["sleep", "3600"])
    Path(__file__).with_name("started.txt").write_text(str(program.pid))
    time.sleep(3600)
if settings.get("says"):
    print(settings["says"], flush=True)
if settings.get("writes_nothing"):
    sys.exit(code or settings.get("code", 0))
log = "==PROF== Connected to process 7 (python3.12)\n" + settings.get("logs", "")
if not settings.get("no_kernels"):
    lines = [line for line in gzip.open(settings["csv"], "rt") if line.startswith('"')]
    rows = list(csv.reader(lines))
    missing = [name for name in given["--metrics"].split(",") if name not in rows[0]]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([rows[0] + missing, rows[1] + ["%"] * len(missing)])
    writer.writerows(row + ["37.5"] * len(missing) for row in rows[2:])
    log += text.getvalue()
Path(given["--log-file"]).write_text(log)
sys.exit(code or settings.get("code", 0))
"""


class StandIn:
    """An `ncu` in `folder` that is strict about its arguments and does not run the program unless told to. Settings may
    differ `at_context`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._settings: dict[str, object] = {"csv": str(COUNTED)}
        executable = folder / "ncu"
        executable.write_text(STAND_IN.format(python=sys.executable))
        executable.chmod(0o755)
        self.set()

    def set(self, **settings: object) -> None:
        self._settings |= settings
        (self._folder / "settings.json").write_text(msgspec.json.encode(self._settings).decode())

    def hear(self, stage: str) -> None:
        """Wait at a stage until it was reported."""
        with (self._folder / "heard.txt").open("a") as heard:
            heard.write(f"{stage}\n")

    def calls(self) -> list[tuple[dict[str, str], list[str]]]:
        """The options and the program of each call."""
        path = self._folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=tuple[dict[str, str], list[str]]) for line in lines]
