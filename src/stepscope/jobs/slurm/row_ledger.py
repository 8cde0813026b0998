"""Moves rows from a job's results file into the run's."""

import shutil
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

import msgspec

from stepscope.files import decode, read_plain, writing
from stepscope.jobs.experiments.sweep import LOGS_NAME, RESULTS_NAME
from stepscope.jobs.slurm.submissions import Job, write_whole
from stepscope.recording.rows.bench import BenchRow
from stepscope.recording.rows.results_file import ResultsFile, parse_rows
from stepscope.spec import DEFAULT_CONTEXT, Case


class _Identity(msgspec.Struct, frozen=True):
    """What distinguishes two measurements of the same case."""

    key: str
    started: str
    wall_s: float


class RowLedger:
    """The run's results file while rows arrive from jobs. `rows` holds the newest by key; no row is added twice."""

    def __init__(self, results: ResultsFile[BenchRow]) -> None:
        self.rows = {row.key: row for row in results.rows}
        self._results = results
        lines = read_plain(results.path).splitlines()
        self._seen = {decode(line, _Identity) for line in lines if line}

    def collect(self, job: Job, *, ended: bool) -> Iterator[BenchRow]:
        """Add the new rows. A `killed` case is accepted only once the job is over: until then the job itself may be the
        one being killed, and then the case runs again when the job does.
        """
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
    """Return the newest row per key in a job's file, which the job may still be writing."""
    try:
        content = read_plain(path)
    except FileNotFoundError:
        return ()
    return parse_rows(path, content, BenchRow).newest


def forget_killed(path: Path) -> None:
    """A job that was killed may have recorded the end of a worker as the end of a case. Such a case runs again."""
    killed = {row.key for row in read_own(path) if row.status == "killed"}
    if killed:
        lines = read_plain(path).splitlines(keepends=True)
        write_whole(path, b"".join(line for line in lines if not _is_of(line, killed)))


def _is_of(line: bytes, keys: Container[str]) -> bool:
    try:
        return decode(line, BenchRow).key in keys
    except msgspec.DecodeError:  # from a newer version, or truncated when the job was killed
        return False


def seed(path: Path, cases: Iterable[Case], rows: Iterable[BenchRow]) -> None:
    """Give a job, before submission, the rows that may belong to its cases. Only the node can tell, because a key
    contains the device and the versions.
    """
    wanted = {_as_asked(case) for case in cases}
    chosen = [msgspec.json.encode(row) + b"\n" for row in rows if _as_asked(row.case) in wanted]
    if chosen:
        write_whole(path, b"".join(chosen))


def _as_asked(case: Case) -> Case:
    """Ignore what is decided on the node: cases may request `auto` or `cuda` and leave the context open; rows name the
    device and context that were used.
    """
    workload = msgspec.structs.replace(case.workload, device="auto", context=case.workload.context or DEFAULT_CONTEXT)
    return msgspec.structs.replace(case, workload=workload)
