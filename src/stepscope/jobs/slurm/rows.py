"""Rows on their way from a job's own results file into the run's."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from stepscope.files import decode, read_plain, writing
from stepscope.jobs.slurm.submissions import Job, write_whole
from stepscope.jobs.sweep import LOGS_NAME, RESULTS_NAME
from stepscope.recording.bench import BenchRow
from stepscope.recording.lines import ResultsFile, parse_rows
from stepscope.spec import Case


class _Identity(msgspec.Struct, frozen=True):
    """What tells one measurement from another of the same case."""

    key: str
    started: str
    wall_s: float


class Ledger:
    """The run's results file while jobs' rows come in. `rows` are the newest by key; nothing comes in twice."""

    def __init__(self, results: ResultsFile[BenchRow]) -> None:
        self.rows = {row.key: row for row in results.rows}
        self._results = results
        lines = read_plain(results.path).splitlines()
        self._seen = {decode(line, _Identity) for line in lines if line}

    def collect(self, job: Job, *, ended: bool) -> Iterator[BenchRow]:
        """What is new. That a case was killed is believed once the job is over: until then it may be the job itself
        that is being killed, and the case runs again when the job does."""
        for row in read_own(job.folder / RESULTS_NAME):
            identity = _Identity(row.key, row.started, row.wall_s)
            if identity in self._seen or (row.status == "killed" and not ended):
                continue
            self._copy_log(job, row.key)
            self._results.append(row)
            self.rows[row.key] = row
            self._seen.add(identity)
            yield row

    def _copy_log(self, job: Job, key: str) -> None:
        source, logs = job.folder / LOGS_NAME / f"{key}.log", self._results.path.parent / LOGS_NAME
        if source.exists():
            with writing(logs):
                logs.mkdir(exist_ok=True)
                shutil.copyfile(source, logs / source.name)


def read_own(path: Path) -> tuple[BenchRow, ...]:
    """The newest row of each key in a job's file, which the job may be writing to."""
    try:
        content = read_plain(path)
    except FileNotFoundError:
        return ()
    return parse_rows(path, content, BenchRow).newest


def forget_killed(path: Path) -> None:
    """A job that was killed may have taken a worker's end for the end of a case. It runs again."""
    rows = read_own(path)
    if any(row.status == "killed" for row in rows):
        kept = (msgspec.json.encode(row) + b"\n" for row in rows if row.status != "killed")
        write_whole(path, b"".join(kept))


def seed(path: Path, cases: Iterable[Case], rows: Iterable[BenchRow]) -> None:
    """Gives a job, before it is submitted, the rows that may be those of its cases. Whether they are shows on the node:
    a key has the device and the versions in it."""
    wanted = {without_device(case) for case in cases}
    chosen = [msgspec.json.encode(row) + b"\n" for row in rows if without_device(row.case) in wanted]
    if chosen:
        write_whole(path, b"".join(chosen))


def without_device(case: Case) -> Case:
    """Cases ask for `auto` or `cuda`, rows name the device that it turned out to be."""
    return msgspec.structs.replace(case, workload=msgspec.structs.replace(case.workload, device="auto"))
