"""How `recover` does if kernels are missing: every single kernel in turn, every length of the beginning and of the end.

    python bench/deletions.py [--only NAME] [--way one|head|tail] [--every K] [--jobs 2] [--format md] [--out FILE]

A field that is certain and wrong makes the exit status 1. What is left out is closed up: numbers and times are
consecutive, as a forger would have it; `--gaps` leaves them as they are. Training traces repeat the same kernels many
times, so only every tenth position of them is tried.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import msgspec

from attack.crew import work_through
from attack.documents import Document, Launch, kind_of, read_document
from attack.forgery import renumber
from attack.subject import TRUTHS, find_files
from attacks import commit
from recovery import COLUMNS, truth_of
from stepscope.errors import StepscopeError
from stepscope.findings import Column, Table
from stepscope.jobs.recover import Undecided, recover_files
from stepscope.render.formats import Format
from stepscope.render.tables import render

Way = Literal["one", "head", "tail"]
_TRAINING_EVERY = 10
_CHUNK = 20
_MOST_SECONDS, _MOST_BYTES = 60.0, 2 * 2**30


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """`place`: the kernel that was left out, or the first that was kept, or the first that was not."""

    file: str
    kind: str
    way: Way
    place: int
    right: int = 0  # fields that are certain and right
    wrong: dict[str, str] = {}  # fields that are certain and wrong: what was found, and the truth
    failure: str = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    way: Way
    places: tuple[int, ...]
    gaps: bool


def keep(launches: Sequence[Launch], way: Way, place: int) -> list[Launch]:
    match way:
        case "one":
            return [*launches[:place], *launches[place + 1 :]]
        case "head":
            return list(launches[place:])
        case "tail":
            return list(launches[:place])


def delete(task: Task) -> list[Deletion]:
    document = read_document(task.path)
    found = []
    for place in task.places:
        kept = keep(document.launches, task.way, place)
        found.append(
            _recover(document.with_launches(kept if task.gaps else renumber(kept, document.launches)), task.way, place)
        )
    return found


def _recover(document: Document, way: Way, place: int) -> Deletion:
    truth = truth_of(document.path, TRUTHS)
    tried = Deletion(file=document.path.name, kind=document.kind, way=way, place=place)
    with TemporaryDirectory() as folder:
        path = Path(folder) / document.file
        path.write_bytes(document.write())
        try:
            answer, _ = recover_files([path])
        except StepscopeError:
            return tried  # for example, nothing is left
        except Exception:  # noqa: BLE001  whatever the command would exit with 70 for
            return msgspec.structs.replace(tried, failure=traceback.format_exc(limit=-2)[-300:])
    if isinstance(answer, Undecided):
        return tried
    certain = {name: answer.fields[name].value for name in COLUMNS if answer.fields[name].certain}
    wrong = {name: f"{value} for {truth[name]}" for name, value in certain.items() if value != truth[name]}
    return msgspec.structs.replace(tried, right=len(certain) - len(wrong), wrong=wrong)


def plan(files: Sequence[Path], ways: Sequence[Way], every: int, *, gaps: bool) -> Iterator[Task]:
    for path in files:
        document = read_document(path)
        step = every * (_TRAINING_EVERY if document.kind == "training trace" else 1)
        count = len(document.launches)
        for way in ways:
            places = range(0 if way == "one" else 1, count, step)
            for start in range(0, len(places), _CHUNK):
                yield Task(path=path, way=way, places=tuple(places[start : start + _CHUNK]), gaps=gaps)


def run(tasks: Sequence[Task], jobs: int) -> Iterator[Deletion]:
    finished = work_through(
        tasks,
        delete,
        jobs=jobs,
        most_seconds=_CHUNK * _MOST_SECONDS,
        most_bytes=_MOST_BYTES,
        title=f"parts of {_CHUNK} deletions",
    )
    for task, result in finished:
        if isinstance(result, list):
            yield from result
        else:
            for place in task.places:
                yield Deletion(file=task.path.name, kind=kind_of(task.path), way=task.way, place=place, failure=result)


def summarise(found: Sequence[Deletion]) -> Table:
    groups: dict[tuple[str, str], list[Deletion]] = {}
    for one in found:
        groups.setdefault((one.kind, one.way), []).append(one)
    rows = []
    for (kind, way), ones in sorted(groups.items()):
        wrong = Counter(name for one in ones for name in one.wrong)
        said = ", ".join(f"{name} {count}" for name, count in wrong.most_common())
        right = sum(one.right for one in ones) / len(ones)
        failures = sum(bool(one.failure) for one in ones)
        rows.append((kind, way, len(ones), right, sum(bool(one.wrong) for one in ones), said, failures))
    columns = (
        Column(key="evidence", label="evidence"),
        Column(key="way", label="left out"),
        Column(key="tried", label="tried", kind="count"),
        Column(key="right", label=f"certain and right, of {len(COLUMNS)}", kind="number"),
        Column(key="wrong", label="certain and wrong", kind="count"),
        Column(key="fields", label="fields"),
        Column(key="failures", label="crashes", kind="count"),
    )
    return Table(title="Evidence with missing kernels", columns=columns, rows=tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="an evidence file")
    parser.add_argument("--way", action="append", default=[], choices=get_args(Way), help="what is left out")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th position (default: 1)")
    parser.add_argument("--gaps", action="store_true", help="leave gaps in numbers and times")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--format", type=Format, default=Format.TEXT)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table and what was wrong as JSON")
    asked = parser.parse_args()
    began = time.monotonic()
    files = [path for path in find_files() if not asked.only or path.name in asked.only]
    tasks = list(plan(files, asked.way or get_args(Way), asked.every, gaps=asked.gaps))
    found = sorted(run(tasks, asked.jobs), key=lambda one: (one.file, one.way, one.place))
    table, bad = summarise(found), [one for one in found if one.wrong or one.failure]
    print(render(table, asked.format))
    for one in bad:
        print(f"{one.file} {one.way} {one.place}: {one.failure or one.wrong}")
    if asked.out is not None:
        command = f"python bench/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}"
        minutes = round((time.monotonic() - began) / 60, 1)
        told = {"commit": commit(), "command": command, "minutes": minutes, "table": table.rows, "bad": bad}
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
