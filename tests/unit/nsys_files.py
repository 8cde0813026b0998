"""Small exports in Nsight Systems' own layout (schema 3.25), and a stand-in for `nsys`, for tests that have no GPU."""

import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

Value = int | str | bytes | float | None
PID, MAIN, AUTOGRAD = 111, 111, 222

_TIMED = "start INTEGER NOT NULL, end INTEGER NOT NULL"
_PLACED = f"""{_TIMED}, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"""
_CALLS = f"""{_TIMED}, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL,
    returnValue INTEGER NOT NULL, callchainId INTEGER"""
LAYOUT = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"""{_PLACED}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL,
        mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL,
        gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
        blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL,
        staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL,
        localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL,
        sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER, graphId INTEGER""",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"""{_PLACED}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL,
        deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, graphNodeId INTEGER""",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"""{_PLACED}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER,
        memKind INTEGER""",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_PLACED}, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_RUNTIME": _CALLS,
    "CUPTI_ACTIVITY_KIND_DRIVER": _CALLS,
    "NVTX_EVENTS": """start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
        category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
        domainId INTEGER, jsonText TEXT""",
    "META_DATA_EXPORT": "name TEXT NOT NULL, value TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, smCount INTEGER",
    "TARGET_INFO_CUDA_DEVICE": "gpuId INTEGER, cudaId INTEGER, pid INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, value TEXT NOT NULL",
    "ENUM_CUDA_MEMCPY_OPER": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
    "ENUM_CUDA_MEM_KIND": "id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT",
}


def global_id(process: int, thread: int = 0) -> int:
    """With bits of the machine above those of the process, as real ones have."""
    return 1 << 56 | process << 24 | thread


@dataclass(slots=True)
class Export:
    """An export in the making. As in a real one, a table is there only where it has rows."""

    rows: dict[str, list[dict[str, Value]]] = field(default_factory=dict)
    strings: dict[Value, int] = field(default_factory=dict)

    def add(self, table: str, **values: Value) -> None:
        self.rows.setdefault(table, []).append(values)

    def string(self, text: Value) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def work(self, table: str, start: int, end: int, *, process: int = PID, device: int = 0, **more: Value) -> None:
        place: dict[str, Value] = {
            "contextId": 1,
            "streamId": 7,
            "correlationId": None,
            "globalPid": global_id(process),
        }
        self.add(f"CUPTI_ACTIVITY_KIND_{table}", start=start, end=end, deviceId=device, **(place | more))

    def kernel(self, name: Value, start: int, end: int, correlation: int | None = None, **more: Value) -> None:
        sizes: dict[str, Value] = dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), 1)
        memory = ("staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId")
        names: dict[str, Value] = {"demangledName": self.string(name), "shortName": self.string("short")}
        filled = sizes | dict.fromkeys(memory, 0) | names | {"registersPerThread": 32, "correlationId": correlation}
        self.work("KERNEL", start, end, **(filled | more))  # type: ignore[arg-type]

    def call(
        self, name: str, start: int, end: int, correlation: int, *, thread: int = MAIN, process: int = PID
    ) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            eventClass=0,
            globalTid=global_id(process, thread),
            correlationId=correlation,
            nameId=self.string(name),
            returnValue=0,
        )

    def range(
        self, text: Value, start: int, end: int | None, *, thread: int = MAIN, process: int = PID, **more: Value
    ) -> None:
        place: dict[str, Value] = {"eventType": 59, "globalTid": global_id(process, thread), "domainId": 0}
        self.add("NVTX_EVENTS", text=text, start=start, end=end, **(place | more))

    def write(self, path: Path) -> Path:
        for text, number in self.strings.items():
            self.add("StringIds", id=number, value=text)
        with closing(sqlite3.connect(path)) as connection, connection:
            for table, rows in self.rows.items():
                connection.execute(f'CREATE TABLE "{table}" ({LAYOUT[table]})')
                for row in rows:
                    names = ", ".join(f'"{name}"' for name in row)
                    marks = ", ".join("?" * len(row))
                    connection.execute(f'INSERT INTO "{table}" ({names}) VALUES ({marks})', list(row.values()))
        return path


def training_step() -> Export:
    """One annotated step on one GPU under emit_nvtx, its backward pass on a thread of its own."""
    export = Export()
    export.range("step:0", 0, 1000)
    export.range("phase:forward", 10, 400)
    export.range("module:head", 20, 300)
    shapes = "sizes = [[2, 3], [3, 4], []], input_op_ids = [(0,-1), (4,0)]"
    export.range(f"aten::linear, seq = 12, op_id = 5, {shapes}", 30, 250)
    export.range(f"aten::mm, seq = 12, op_id = 6, {shapes}", 40, 200)
    export.call("cudaLaunchKernel_v7000", 50, 60, 1)
    export.kernel(
        "void gemm<float>(int)", 100, 300, 1, gridX=4, blockX=128, staticSharedMemory=16, dynamicSharedMemory=8
    )
    export.range("phase:backward", 410, 900)
    backward = "autograd::engine::evaluate_function: "
    export.range(f"{backward}MmBackward0, op_id = 9", 420, 600, thread=AUTOGRAD)
    export.range("MmBackward0, seq = 12, op_id = 10", 430, 550, thread=AUTOGRAD)
    export.range("aten::mm, op_id = 11, sizes = [[2, 4], [4, 3]]", 440, 500, thread=AUTOGRAD)
    export.call("cudaLaunchKernelExC_v11060", 450, 460, 2, thread=AUTOGRAD)
    export.kernel("void gemm<float>(int)", 500, 800, 2)
    export.range("aten::add_, op_id = 12", 560, 590, thread=AUTOGRAD)
    export.range(f"{backward}torch::autograd::AccumulateGrad, op_id = 13", 610, 700, thread=AUTOGRAD)
    export.range("torch::autograd::AccumulateGrad, op_id = 14", 620, 690, thread=AUTOGRAD)
    export.range("aten::detach, op_id = 15", 630, 640, thread=AUTOGRAD)
    export.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
    export.add("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")
    export.add("META_DATA_EXPORT", name="EXPORT_HOST", value="secret-host")
    export.add("META_DATA_EXPORT", name="EXPORT_USER", value="secret-user")
    export.add("META_DATA_EXPORT", name="EXPORT_PARAM_INPUT_PATH_ABS", value="/home/secret-user/a.nsys-rep")
    export.add("TARGET_INFO_SYSTEM_ENV", name="TOKEN", nameEnum=1, value="secret-token")
    export.add("TARGET_INFO_GPU", vmId=1, id=0, name="NVIDIA H200", smCount=132)
    return export


# What `nsys profile --help` of 2025.3 lists, as far as we use it, with the values that each takes. Written as
# `--option value` or `--option=value`, as the real one takes both.
STAND_IN = """#!{python}
import json, re, shutil, subprocess, sys, time
from pathlib import Path

TAKES = {{
    "profile": {{
        "--output": None,
        "--force-overwrite": {{"true", "false"}},
        "--trace": {{"cuda", "nvtx", "osrt", "none"}},
        "--cuda-graph-trace": {{"graph", "node"}},
        "--sample": {{"process-tree", "system-wide", "none"}},
        "--cpuctxsw": {{"process-tree", "system-wide", "none"}},
        "--capture-range": {{"none", "cudaProfilerApi", "nvtx", "hotkey"}},
        "--capture-range-end": {{"none", "stop", "stop-shutdown", "repeat"}},
        "--cudabacktrace": {{"none", "all", "kernel", "kernel:0"}},
        "--python-backtrace": {{"cuda", "none", "false"}},
        "--pytorch": {{"autograd-nvtx", "autograd-shapes-nvtx", "functions-trace", "none"}},
        "--export": {{"none", "sqlite"}},
    }},
    "export": {{"--type": {{"sqlite"}}, "--output": None, "--force-overwrite": {{"true", "false"}}}},
}}
settings = json.loads(Path(__file__).with_name("settings.json").read_text())


def parse(verb, arguments):
    given = {{}}
    while arguments and arguments[0].startswith("--"):
        option, equals, value = arguments.pop(0).partition("=")
        if option not in TAKES[verb]:
            sys.exit(f"unrecognised option '{{option}}'")
        if not equals:
            value = arguments.pop(0)
        if TAKES[verb][option] and not set(value.split(",")) <= TAKES[verb][option]:
            sys.exit(f"the argument '{{value}}' for option '{{option}}' is invalid")
        given[option] = value
    return given, arguments


verb, *arguments = sys.argv[1:]
given, rest = parse(verb, arguments)
with Path(__file__).with_name("calls.jsonl").open("a") as calls:
    calls.write(json.dumps([verb, given, rest]) + "\\n")
if verb == "export":
    if settings.get("export_fails"):
        sys.exit("the report is damaged")
    if Path(rest[0]).read_bytes() != b"report":
        sys.exit("no such report")
    shutil.copy(settings["export"], given["--output"])
else:
    stacks = (given["--sample"], given.get("--cudabacktrace", "none"))
    if given.get("--python-backtrace") == "cuda" and "none" in stacks:
        sys.exit("backtraces of CUDA and CPU sampling must be enabled")
    assert rest[1:4] == ["-P", "-m", "stepscope.measure.targets.nsys"], rest
    code = 0
    if settings.get("run_target"):
        code = subprocess.run(rest).returncode
    elif settings.get("answer"):
        Path(rest[4]).with_suffix(".answer.json").write_text(settings["answer"])
    if settings.get("hangs"):
        print("collecting", flush=True)
        try:
            Path(__file__).with_name("hanging.txt").touch()
            time.sleep(3600)
        except KeyboardInterrupt:
            Path(__file__).with_name("interrupted.txt").touch()
            raise
    if not settings.get("writes_nothing"):
        report = re.sub("%(.)", lambda found: {{"%": "%", "h": "host"}}[found[1]], given["--output"])
        Path(report + settings.get("ending", ".nsys-rep")).write_bytes(b"report")
    print("Generated: a report")
    sys.exit(code or settings.get("code", 0))
"""


class StandIn:
    """An `nsys` in `folder` that is as strict about its arguments as the real one, writes `export`, and does not
    run the program unless told to."""

    def __init__(self, folder: Path, export: Path) -> None:
        self._folder = folder
        self._settings: dict[str, object] = {"export": str(export)}
        executable = folder / "nsys"
        executable.write_text(STAND_IN.format(python=sys.executable))
        executable.chmod(0o755)
        self.set()

    def set(self, **settings: object) -> None:
        self._settings |= settings
        (self._folder / "settings.json").write_text(msgspec.json.encode(self._settings).decode())

    def calls(self) -> list[tuple[str, dict[str, str], list[str]]]:
        lines = (self._folder / "calls.jsonl").read_text().splitlines()
        return [msgspec.json.decode(line, type=tuple[str, dict[str, str], list[str]]) for line in lines]
