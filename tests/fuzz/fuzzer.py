"""The parent process: distributes inputs, watches time and memory, restarts workers, and saves failures."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from stepscope.errors import Exit
from tests.fuzz.seeds import ROOT
from tests.fuzz.worker import STDERR, STDOUT, Begun, Outcome, peak_bytes

# The possible outcomes of an input. The first two are correct.
Class = Literal["result", "error", "exception", "hang", "memory", "crash"]
FINE: tuple[Class, ...] = ("result", "error")
BUSY_S = 10.0  # CPU time, so that other processes on the machine cannot cause a hang
WAITING_S = 60.0  # waiting for something that never happens
MEMORY_BYTES = 2 << 30
EXAMPLES = 3  # saved per cause
_LOOK_S = 0.05
_START_S = 120.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One input and its outcome. `cause` is the origin of the exception if it failed."""

    number: int
    seed: str
    command: list[str]
    class_: Class
    cause: str = ""
    seconds: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    count: int
    seconds: float
    classes: dict[str, int]
    by_verb: dict[str, dict[str, int]]
    by_input: dict[str, dict[str, int]]
    causes: dict[str, int]
    slowest: list[Case]
    failures: list[Case]


def fuzz(
    *,
    count: int,
    seed: int,
    first: int = 0,
    jobs: int = 1,
    only: str = "",
    worker: str = "tests.fuzz.worker",
    kept: Path,
    on_case: Callable[[Case], None] = lambda _: None,
) -> Summary:
    """Run inputs `first` to `first + count` of the run `seed`. Failing inputs are saved in a directory in `kept`."""
    started = time.monotonic()
    numbers, lock, cases = iter(range(first, first + count)), threading.Lock(), list[Case]()
    keeper = _Keeper(kept, seed, only)

    def take() -> Iterator[int]:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            yield number

    def work() -> None:
        with tempfile.TemporaryDirectory(prefix="stepscope-fuzz-") as scratch:
            process = _Worker(Path(scratch), [worker, str(seed), only])
            try:
                for number in take():
                    case = process.run(number)
                    with lock:
                        cases.append(case)
                        if case.class_ not in FINE:
                            keeper.keep(case, process.folder)
                        on_case(case)
            except BaseException as error:  # noqa: BLE001  # told by the thread that waits
                problems.append(error)
            finally:
                process.stop()

    problems: list[BaseException] = []
    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return _sum_up(cases, seed, time.monotonic() - started)


def _sum_up(cases: list[Case], seed: int, seconds: float) -> Summary:
    def count_by(key: Callable[[Case], str]) -> dict[str, dict[str, int]]:
        names = sorted({key(case) for case in cases})
        return {name: dict(Counter(case.class_ for case in cases if key(case) == name)) for name in names}

    return Summary(
        seed=seed,
        count=len(cases),
        seconds=round(seconds, 1),
        classes=dict(Counter(case.class_ for case in cases)),
        by_verb=count_by(lambda case: case.command[0]),
        by_input=count_by(lambda case: case.seed),
        causes=dict(Counter(case.cause for case in cases if case.cause).most_common()),
        slowest=sorted(cases, key=lambda case: -case.seconds)[:3],
        failures=[case for case in cases if case.class_ not in FINE],
    )


class _Worker:
    """A worker process, restarted if it had to be killed."""

    def __init__(self, scratch: Path, arguments: list[str]) -> None:
        self._scratch, self._arguments = scratch, arguments
        self._born = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.folder = scratch

    def run(self, number: int) -> Case:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % number)
        process.stdin.flush()
        begun = msgspec.json.decode(self._line(process, _START_S) or b"null", type=Begun | None)
        if begun is None:
            self.stop()
            raise RuntimeError(f"the fuzzer failed: input {number} was not created; {self._said(STDERR)[-2000:]}")
        started = time.monotonic()
        why = self._watch(process)
        seconds = round(time.monotonic() - started, 3)
        class_, cause = why if isinstance(why, tuple) else self._judge(why)
        # A worker that uses much memory is replaced too: the next one starts small.
        if class_ in ("hang", "memory", "crash") or peak_bytes(str(process.pid), "VmRSS:") > MEMORY_BYTES // 2:
            self.stop()
        return Case(number=number, seed=begun.seed, command=begun.command, class_=class_, cause=cause, seconds=seconds)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        self._born += 1
        self.folder = self._scratch / f"{self._born}"
        self.folder.mkdir()
        module, *arguments = self._arguments
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(self.folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        return self._process

    def _watch(self, process: "subprocess.Popen[bytes]") -> Outcome | tuple[Class, str]:
        """The answer of the worker, or why it was killed."""
        assert process.stdout is not None
        ready = threading.Event()
        lines: list[bytes] = []

        def listen() -> None:
            lines.append(process.stdout.readline())  # type: ignore[union-attr]
            ready.set()

        listener = threading.Thread(target=listen)
        listener.start()
        begun_s, started = _processor_s(process.pid), time.monotonic()
        ended: Class | None = None
        while ended is None and not ready.wait(_LOOK_S):
            if _resident_bytes(process.pid) > MEMORY_BYTES:
                ended = "memory"
            elif _processor_s(process.pid) - begun_s > BUSY_S or time.monotonic() - started > WAITING_S:
                ended = "hang"
        if ended is not None:
            process.kill()
        listener.join()
        if ended is not None:
            return ended, ended
        if not lines[0]:
            return "crash", f"signal {-process.wait()}" if process.wait() < 0 else f"left with {process.wait()}"
        return msgspec.json.decode(lines[0], type=Outcome)

    def _line(self, process: "subprocess.Popen[bytes]", seconds: float) -> bytes:
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            return process.stdout.readline()
        finally:
            timer.cancel()

    def _judge(self, outcome: Outcome) -> tuple[Class, str]:
        said = self._said(STDERR)
        if outcome.code == Exit.OUR_MISTAKE or "Traceback" in said or "panicked at" in said:
            return "exception", _cause(said)
        if outcome.peak_bytes > MEMORY_BYTES:
            return "memory", f"{outcome.peak_bytes >> 20} MiB"
        if outcome.code == Exit.BAD_INPUT:
            clear = any(line.startswith("error: ") for line in said.splitlines())
            return ("error", "") if clear else ("exception", f"exit 2 without `error:`: {said[:80]}")
        if outcome.code in (Exit.OK, Exit.GATE_FAILED, Exit.UNDECIDED):
            return "result", ""
        return "exception", f"exit {outcome.code}"

    def _said(self, name: str) -> str:
        path = self.folder / "output" / name
        return path.read_text(errors="replace") if path.exists() else ""


class _Keeper:
    """Failing inputs on disk: a few per cause, with the command."""

    def __init__(self, folder: Path, seed: int, only: str) -> None:
        self._folder, self._seed, self._only = folder, seed, only
        self._counts: Counter[str] = Counter()

    def keep(self, case: Case, worker: Path) -> None:
        self._counts[case.cause] += 1
        if self._counts[case.cause] > EXAMPLES:
            return
        name = re.sub(r"[^\w.-]+", "-", case.cause)[:60].strip("-")
        target = self._folder / f"{case.class_}-{name}" / f"{self._seed}-{case.number}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(worker / "input", target)
        for output in (STDOUT, STDERR):
            shutil.copy(worker / "output" / output, target / output)
        again = f"python -m tests.fuzz --seed {self._seed} --first {case.number} --count 1"
        again += f" --only {self._only}" if self._only else ""
        lines = ("#!/bin/sh", f"# {again}", 'cd "$(dirname "$0")" && stepscope ' + " ".join(case.command), "")
        (target / "command.sh").write_text("\n".join(lines))


def _cause(said: str) -> str:
    """The innermost stepscope frame and the exception of the last traceback."""
    frames = re.findall(r'File "[^"]*/stepscope/([^"]+)", line (\d+), in (\S+)', said)
    ends = [line for line in said.splitlines() if re.match(r"[\w.]+(Error|Exception|Panic\w*)\b", line)]
    place = "{}:{} {}".format(*frames[-1]) if frames else "outside"
    return f"{place}: {ends[-1].partition(':')[0] if ends else 'Traceback'}"


def _processor_s(process: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _resident_bytes(process: int) -> int:
    with suppress(OSError):
        return peak_bytes(str(process), "VmRSS:")
    return 0
