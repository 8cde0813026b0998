"""A red team for `recover` and `verify`: forged evidence, false claims, and true ones that must not be refuted.

    python bench/attacks.py [--jobs 2] [--format md] [--out FILE]      all forgeries on all recorded runs
    python bench/attacks.py --only NAME --file NAME [--save DIR]       one of them; --save keeps the forged files
    python bench/attacks.py --from FILE... [--write docs/trust.md]     the tables of earlier runs

The exit status is 1 if a forgery that must be detected passes, if a true claim is refuted, or if stepscope crashes or
needs more time or memory than it may. Evidence with known truth is in tests/fixtures/evidence. For `recover` on files
with missing kernels, see deletions.py.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from attack.crew import work_through
from attack.documents import kind_of
from attack.scoreboard import (
    Results,
    class_table,
    forgery_table,
    honest_table,
    list_failures,
    make_parts,
    write_parts,
)
from attack.subject import find_files, open_subject
from attack.trial import (
    FORGERIES,
    HONEST,
    MOST_BYTES,
    MOST_SECONDS,
    Trial,
    admit,
    attack,
    find_untested,
    honest_claims,
)
from stepscope.render.formats import Format
from stepscope.render.tables import render

Task = tuple[str, Path]
_HONEST_CLAIMS = "true claims"
_PATIENCE = 2  # also for what is not measured: making the forgery


def attempt(task: Task) -> list[Trial]:
    """Return the trials of a task: a forgery on a file, or all true claims about it."""
    what, path = task
    if what == _HONEST_CLAIMS:
        return [admit(claim, path) for claim in honest_claims(open_subject(path, find_untested))]
    if what.startswith(HONEST):
        return [admit(what.removeprefix(f"{HONEST}: "), path)]
    trial = attack(what, path)
    return [] if trial is None else [trial]


def choose(only: Sequence[str], files: Sequence[str]) -> list[Task]:
    """Return the tasks, file by file: a process that has opened a file keeps it."""
    paths = [path for path in find_files() if not files or path.name in files]
    names = [name for name in (*FORGERIES, _HONEST_CLAIMS) if not only or name in only or _family(name) in only]
    names += [name for name in only if name.startswith(HONEST)]
    return [(name, path) for path in paths for name in names]


def _family(name: str) -> str:
    return FORGERIES[name].family if name in FORGERIES else ""


def run(tasks: Sequence[Task], jobs: int) -> Iterator[Trial]:
    finished = work_through(
        tasks,
        attempt,
        jobs=jobs,
        # A process that ends its task reports CPU time and memory itself; one that does not is stopped later.
        most_seconds=_PATIENCE * MOST_SECONDS,
        most_bytes=2 * MOST_BYTES,
        title="forgeries",
    )
    for (what, path), result in finished:
        if isinstance(result, list):
            yield from result
        else:
            yield Trial(what=what, file=path.name, kind=kind_of(path), outcome=result, seconds=_PATIENCE * MOST_SECONDS)


def save(tasks: Sequence[Task], folder: Path) -> None:
    """Write forged files and claims, and print the commands that check them."""
    for name, path in tasks:
        subject = open_subject(path, find_untested)
        forged = FORGERIES[name].forge(subject) if subject.kind in FORGERIES[name].kinds else None
        if forged is None or forged.report is not None:
            continue
        place = folder / f"{name}.{path.name.removesuffix('.gz')}"
        place.mkdir(parents=True, exist_ok=True)
        for file, content in forged.files:
            (place / file).write_bytes(content)
        (place / "claim.json").write_text(json.dumps(dict(forged.claim), indent=1) + "\n")
        print(f"stepscope verify {' '.join(str(place / file) for file, _ in forged.files)} --claim {place}/claim.json")


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def measure(asked: argparse.Namespace) -> Results:
    began = time.monotonic()
    trials = sorted(run(choose(asked.only, asked.file), asked.jobs), key=lambda one: (one.what, one.file))
    return Results(
        commit=commit(),
        command=f"python bench/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}",
        minutes=round((time.monotonic() - began) / 60, 1),
        trials=tuple(trials),
    )


def load(files: Sequence[Path]) -> Results:
    """Join the results of several runs, for example one per evidence file. If a trial was repeated, the last counts."""
    found = [msgspec.json.decode(path.read_bytes(), type=Results) for path in files]
    trials = {(one.what, one.file): one for results in found for one in results.trials}
    return Results(
        commit=", ".join(dict.fromkeys(one.commit for one in found)),
        command=found[0].command,
        minutes=round(sum(one.minutes for one in found), 1),
        trials=tuple(trials[key] for key in sorted(trials)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a forgery, or a class of them")
    parser.add_argument("--file", action="append", default=[], metavar="NAME", help="an evidence file")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--format", type=Format, default=Format.TEXT)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the forged files instead of checking them")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all trials as JSON")
    parser.add_argument("--from", type=Path, nargs="+", dest="earlier", metavar="FILE", help="show such files")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="update the tables of a docs page")
    asked = parser.parse_args()
    if asked.save is not None:
        save([task for task in choose(asked.only, asked.file) if task[0] in FORGERIES], asked.save)
        return
    results = load(asked.earlier) if asked.earlier else measure(asked)
    if asked.out is not None:
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    if asked.write is not None:
        write_parts(asked.write, make_parts(results))
    tables = [class_table(results), forgery_table(results, "detected"), forgery_table(results, "undetectable")]
    for table in (*tables, honest_table(results)):
        print(render(table, asked.format))
    if failed := [*results.passed, *results.wronged]:
        print(
            f"{len(results.passed)} forgeries passed or failed to finish, {len(results.wronged)} true claims refuted:"
        )
        print(list_failures(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
