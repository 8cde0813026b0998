"""Startup time: `import stepscope`, and the help of the command line.

    python bench/startup_speed.py [--repeat 15] [--out FILE.jsonl]

Each is a fresh interpreter, timed from outside, minus the time of an interpreter that does nothing; one line is written
for each, with all samples. The budget of `import stepscope` is 100 ms, and nothing in it imports torch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "python": ["-c", "pass"],
    "import stepscope": ["-c", "import stepscope"],
    "stepscope.load": ["-c", "import stepscope; stepscope.load"],
    "stepscope.workload": ["-c", "import stepscope; stepscope.workload(size='small')"],
    "stepscope --help": ["-m", "stepscope", "--help"],
}


def time_once(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    # Interleaved, so that other load on the machine slows all of them alike.
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.repeat):
        for name, arguments in COMMANDS.items():
            samples[name].append(time_once(arguments))
    nothing = statistics.median(samples["python"])
    lines = []
    for name, seconds in samples.items():
        median = statistics.median(seconds)
        print(f"{name:20} {1e3 * median:6.0f} ms, {1e3 * (median - nothing):6.0f} ms without the interpreter")
        lines.append({"what": name, "seconds": seconds, "python": sys.version.split()[0], "cores": os.cpu_count()})
    if options.out is not None:
        with options.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
