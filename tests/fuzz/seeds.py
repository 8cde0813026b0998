"""Small valid files of every kind that stepscope reads, for the fuzzer to damage.

A seed is a set of files, by name relative to the working directory of the command, and `entry`, the file on the command
line. Everything else that a command needs (a trace to compare with, a claim, a key) is in `companions()` and is never
damaged.
"""

import gzip
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stepscope.recording import store
from stepscope.recording.memory import reader as memory
from stepscope.recording.readers import ncu
from stepscope.recording.rows.bench import Doubt, Row
from stepscope.recording.rows.links import Link, LinkPlace, Links
from stepscope.recording.rows.optimisation import encode_optimisation
from stepscope.recording.rows.precision_report import encode_report
from stepscope.recording.rows.training_log import TrainMemory, TrainRow, TrainRun
from stepscope.recording.store import Recording
from stepscope.spec import Training, build_case
from tests.unit import kineto_files, nsys_files, snapshot_files
from tests.unit.api.test_inputs import keep
from tests.unit.attention_rows import attend
from tests.unit.comm_rows import communicate
from tests.unit.explain.test_memory_explain import Training as MemoryTraining
from tests.unit.explain.test_memory_grid import weigh
from tests.unit.explain.test_precision_tables import report as precision_report
from tests.unit.explain.test_precision_tables import run as precision_run
from tests.unit.optimisations import optimisation
from tests.unit.question_recordings import Tape, model_step
from tests.unit.recordings import ADD, ALL_REDUCE, BF16, COPY, FUSED_ADAM, GEMM_BF16, SOFTMAX, TO_DEVICE, Timeline
from tests.unit.recover.claimed_runs import claim_fields
from tests.unit.recover.reports.signed_reports import make_signed
from tests.unit.rows import ENVIRONMENT, row

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/fixtures"
EVIDENCE = FIXTURES / "evidence/gpt2_bf16_odd"
MIB = 2**20
_ROWS = ("bench", "memory-rows", "attention", "comm", "report-data", "precision", "optimise")
DOUBT = Doubt(code="noisy", text="steps differ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """`kind` selects the commands; `weight` is how often the seed is used."""

    name: str
    kind: str
    entry: str
    files: Mapping[str, bytes]

    @property
    def weight(self) -> int:
        """Files of other tools, and recordings, can be damaged in more ways than a short document."""
        return 4 if self.kind in ("trace", "counters", "memory") else 2 if self.name in _ROWS else 1


def build_seeds() -> list[Seed]:
    with tempfile.TemporaryDirectory() as scratch:
        return [*_traces(Path(scratch)), *_memory(Path(scratch)), *_results(), *_documents(Path(scratch))]


def companions() -> dict[str, bytes]:
    """Valid files in addition to the damaged one."""
    trace = _plain(EVIDENCE.with_suffix(".forward.json.gz"))
    with tempfile.TemporaryDirectory() as scratch:
        signed, public = make_signed(Path(scratch))
        return {
            "good.json": trace,
            "small.json": _kineto(Path(scratch)),
            "good.csv": _plain(EVIDENCE.with_suffix(".csv.gz")),
            "claim.toml": _claim(),
            "signed.json": signed,
            "signed.pub": f"{public.text}\n".encode(),
        }


# --- Traces and counters ----------------------------------------------------------------------------------------------


def _traces(scratch: Path) -> list[Seed]:
    profiled = _save(_timeline(), scratch / "profile")
    annotated = _save(_annotated(), scratch / "annotated")
    counted = _save(ncu.read(FIXTURES / "h200_gpt2_counters.csv.gz"), scratch / "counted")
    exported = nsys_files.training_step().write(scratch / "export.sqlite")
    table = _plain(FIXTURES / "h200_gpt2_counters.csv.gz")
    return [
        _seed("kineto", "trace", "input.json", _kineto(scratch)),
        _seed("kineto-gz", "trace", "input.json.gz", gzip.compress(_kineto(scratch), 1, mtime=0)),
        _seed("kineto-real", "trace", "input.json", _plain(EVIDENCE.with_suffix(".forward.json.gz"))),
        _seed("nsys", "trace", "input.sqlite", _without_constraints(exported)),
        _seed("ncu", "counters", "input.csv", table),
        _seed("ncu-short", "counters", "input.csv", b"\n".join(table.splitlines()[:12]) + b"\n"),
        Seed(name="recording", kind="trace", entry="input", files=profiled),
        Seed(name="annotated", kind="trace", entry="input", files=annotated),
        Seed(name="counted", kind="counters", entry="input", files=counted),
    ]


def _kineto(scratch: Path) -> bytes:
    return kineto_files.write_trace(scratch / "small.json", kineto_files.training_step()).read_bytes()


def _timeline() -> Recording:
    """Two steps with GEMMs, unfused attention, a copy from the CPU, communication and an optimizer."""
    timeline = Timeline()
    for _ in range(2):
        with timeline.step():
            timeline.launch(TO_DEVICE, 5, op="aten::copy_", call="cudaMemcpyAsync")
            with timeline.phase("forward"), timeline.module("blocks.0.attention"):
                timeline.launch(GEMM_BF16, 40, op="aten::mm", shapes=[[64, 32], [32, 64]], dtypes=[BF16, BF16])
                timeline.launch(SOFTMAX, 10, op="aten::softmax", shapes=[[2, 4, 16, 16]], dtypes=[BF16])
                timeline.launch(COPY, 5, op="aten::copy_", shapes=[[64, 64], [64, 64]], dtypes=[BF16, "float"])
            with timeline.phase("backward"), timeline.node():
                timeline.launch(GEMM_BF16, 80, op="aten::mm", shapes=[[32, 64], [64, 64]], dtypes=[BF16, BF16])
                timeline.launch(ALL_REDUCE, 30, op="c10d::allreduce_", stream=13)
            with timeline.phase("optimizer"):
                timeline.launch(ADD, 3)
                timeline.launch(FUSED_ADAM, 8, op="aten::_fused_adamw_")
            timeline.wait()
    case = build_case({"size": "nano", "device": "cuda:0"})
    return timeline.record(case=case, environment=ENVIRONMENT, doubts=(DOUBT,), command="stepscope profile")


def _annotated() -> Recording:
    tape = Tape()
    for step in range(2):
        model_step(tape, step)
    return tape.recording(parameters=1000)


def _without_constraints(path: Path) -> bytes:
    """Tables that accept any value."""
    with closing(sqlite3.connect(path)) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in names:
            connection.execute(f'CREATE TABLE "bare" AS SELECT * FROM "{name}"')
            connection.execute(f'DROP TABLE "{name}"')
            connection.execute(f'ALTER TABLE "bare" RENAME TO "{name}"')
        connection.commit()
        connection.execute("VACUUM")
        return connection.serialize()


# --- Memory -----------------------------------------------------------------------------------------------------------


def _memory(scratch: Path) -> list[Seed]:
    training = MemoryTraining().run(3, leaking=600)
    training.model.frames = []
    theirs = snapshot_files.write(training.model.snapshot(), scratch / "theirs.pickle")
    expandable = snapshot_files.Model(expandable=True, divisions=4)
    taken = [expandable.malloc(size) for size in (512, 3 * MIB, 700_000, 30 * MIB)]
    for address in taken[::2]:
        expandable.free(address)
    expandable.empty_cache()
    expandable.run_out(MIB)
    grown = snapshot_files.write(expandable.snapshot(), scratch / "grown.pickle")
    return [
        _seed("snapshot", "memory", "input.pickle", theirs.read_bytes()),
        _seed("snapshot-expandable", "memory", "input.pickle", grown.read_bytes()),
        Seed(name="memory", kind="memory", entry="input", files=_save(memory.read(theirs), scratch / "memory")),
    ]


# --- Results ----------------------------------------------------------------------------------------------------------


def _results() -> list[Seed]:
    timed = (row(size="small"), row(size="small", precision="bf16", doubts=(DOUBT,)), row("oom", size="medium"))
    weighed = (weigh(parameters=MIB, activations=3 * MIB), weigh(parameters=MIB, precision="bf16"), weigh("oom"))
    attended = (attend(), attend("naive"), attend(length=2048), attend("naive", "oom", length=2048))
    sent = tuple(communicate(message_bytes=size) for size in (10**6, 4 * 10**6, 10**7))
    return [
        _seed("bench", "bench", "results.jsonl", _lines(*timed)),
        _seed("memory-rows", "memory-rows", "results.jsonl", _lines(*weighed)),
        _seed("attention", "attention", "results.jsonl", _lines(*attended)),
        _seed("comm", "comm", "results.jsonl", _lines(*sent, communicate("broadcast", "error"))),
    ]


def _documents(scratch: Path) -> list[Seed]:
    kept = keep(scratch / "data", "bench", "profile", "precision", "attention")
    (kept / "precision.json").write_bytes(_precision())
    signed, public = make_signed(scratch)
    links = Links(
        place=LinkPlace(backend="gloo", device_name="Test CPU", ranks=2),
        links={"all-reduce": Link(latency_ns=1e6, bytes_per_s=1e8)},
    )
    return [
        _seed("precision", "precision", "input.json", _precision()),
        _seed("optimise", "optimise", "input.json", encode_optimisation(optimisation())),
        Seed(name="report-data", kind="report-data", entry="data", files=_files(kept, "data")),
        Seed(name="training", kind="training", entry="run", files=_training()),
        _seed("claim", "claim", "input.toml", _claim()),
        _seed("claim-json", "claim", "input.json", msgspec.json.encode(_claimed())),
        _seed("config", "config", "input.toml", b'size = ["nano", "small"]\nbatch = [1, 2]\nprecision = "bf16"\n'),
        _seed("links", "links", "cache/links.json", msgspec.json.encode([links])),
        _seed("signed", "signed", "input.json", signed),
        _seed("public-key", "public-key", "input.pub", f"{public.text}\n".encode()),
        _seed("settings", "study", "input.json", b'{"good.json": {"num_layers": 2, "d_model": 64, "batch": 4}}'),
    ]


def _precision() -> bytes:
    return encode_report(precision_report(precision_run("fp32"), precision_run("fp16"), precision_run("bf16")))


def _training() -> dict[str, bytes]:
    times: dict[str, Any] = {"step_ns": (500, 510), "communication_ns": (100, 90), "exposed_ns": (0, 5)}
    log = [
        TrainRow(step=step, kept_loss=10.0 / step, tokens=512, learning_rate=1e-3, strategy="bucketed", **times)
        for step in range(1, 6)
    ]
    training = Training(workload=build_case({"size": "nano", "device": "cpu"}).workload, ranks=2, strategy="bucketed")
    run = TrainRun(training=training, environment=ENVIRONMENT, command="stepscope train")
    held: dict[str, Any] = {"parameters": 8, "gradients": 8, "optimizer": 16, "gathered": 0, "peak": 64}
    memory = [TrainMemory(rank=rank, moment="after the update", **held) for rank in range(2)]
    return {
        "run/run.json": msgspec.json.encode(run),
        "run/log.jsonl": b"".join(msgspec.json.encode(one) + b"\n" for one in log),
        "run/memory.json": msgspec.json.encode(memory),
    }


def _claimed() -> dict[str, Any]:
    return {name: value for name, value in claim_fields("gpt2_bf16_odd.forward").items() if value is not None}


def _claim() -> bytes:
    lines = (f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in _claimed().items())
    return "".join(lines).encode()


# --- Files ------------------------------------------------------------------------------------------------------------


def _seed(name: str, kind: str, entry: str, content: bytes) -> Seed:
    return Seed(name=name, kind=kind, entry=entry, files={entry: content})


def _lines(*rows: Row) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in rows)


def _save(recording: Recording, folder: Path) -> dict[str, bytes]:
    store.save(recording, folder)
    return _files(folder, "input")


def _files(folder: Path, name: str) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(name / path.relative_to(folder)): path.read_bytes() for path in found}


def _plain(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()
