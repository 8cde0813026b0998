"""Read Nsight Systems exports into recordings.

`nsys export --type sqlite` writes the events of CUPTI and NVTX. This module reads the work on the device, the calls
that launched it, and the ranges. The file also contains environment variables, host, user and command line: these are
not read.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import msgspec
import polars as pl

from stepscope.errors import StepscopeError
from stepscope.files import scratch_folder
from stepscope.recording import tables
from stepscope.recording.readers.nsys_database import EXPORT_COMMAND, Database, drop_invalid, latest
from stepscope.recording.readers.nsys_nvtx import read_nvtx
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.validation import Repairs, repair
from stepscope.units import count_noun

REPORT_ENDINGS = (".nsys-rep", ".qdrep")  # current, and older versions
_LAST_WORDS = 600  # characters of nsys output in the error
_CUPTI = "CUPTI_ACTIVITY_KIND_"
_WORK_TABLES = tuple(_CUPTI + kind for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"))
_CALL_TABLES = (_CUPTI + "RUNTIME", _CUPTI + "DRIVER")
_ON_DEVICE = ["start", "end", "globalPid", "deviceId", "streamId", "correlationId"]
_RECORD = "nsys profile --trace cuda,nvtx python train.py"
# Names of copy kinds if the file has none, as the PyTorch profiler writes them.
_COPY_KINDS = {0: "Unknown", 1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD"} | {
    9: "HtoH",
    10: "PtoP",
    11: "HtoD",
    12: "DtoH",
    13: "DtoD",
}
_MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static"} | {
    6: "Managed Static",
    7: "Unknown",
}


def read(path: Path) -> Recording:
    """Return the recording in a `.sqlite` export, or in a report if `nsys` is installed to export it. The notes of the
    manifest say what is missing or left out."""
    if path.suffix not in REPORT_ENDINGS:
        return _read(path)
    with scratch_folder() as folder:
        return _read(export(path, Path(folder))).with_manifest(file=path.name)


def _export_command(nsys: str, report: Path, exported: Path) -> list[str]:
    return [nsys, "export", "--type", "sqlite", "--output", str(exported), "--force-overwrite", "true", str(report)]


def export(report: Path, folder: Path) -> Path:
    """Export the report to a SQLite file in `folder`, with `nsys`, the only tool that reads its format."""
    if not report.is_file():
        raise StepscopeError(f"file not found: `{report}`")
    exported = folder / f"{report.stem}.sqlite"
    nsys = shutil.which("nsys")
    if nsys is None:
        by_hand = _export_command("nsys", Path(report.name), Path(exported.name))
        raise StepscopeError(
            f"reading `{report}` requires `nsys`, which was not found on the PATH",
            detail="a SQLite export can be read without it: create one on a machine with Nsight Systems",
            hint=shlex.join(by_hand),
        )
    command = _export_command(nsys, report, exported)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise StepscopeError(f"cannot run `{nsys}`", detail=error.strerror or "", hint="stepscope doctor") from None
    if done.returncode or not exported.is_file():
        said = (done.stderr.strip() or done.stdout.strip())[-_LAST_WORDS:]
        raise StepscopeError(
            f"nsys failed to export `{report}` (exit code {done.returncode})",
            detail=said or "it printed nothing",
            hint=shlex.join(command),
        )
    return exported


def _read(path: Path) -> Recording:
    with Database.open(path) as database:
        _require_export(path, database)
        strings = database.fetch("StringIds", ["id"], ["value"]).unique("id", keep="first")
        notes: list[str] = []
        kernels = drop_invalid(
            "kernels", _read_work(database, strings), ("device activity", "device activities"), notes
        )
        if not kernels.height:
            raise StepscopeError(
                f"no CUDA activity in `{path}`",
                detail=f"expected rows in one of {', '.join(_WORK_TABLES)}",
                hint=f"record with CUDA tracing: {_RECORD}",
            )
        launches = drop_invalid("launches", _read_calls(database, strings), ("CUDA call", "CUDA calls"), notes)
        ops, ranges = read_nvtx(database, strings, latest(kernels["end_ns"], launches["end_ns"]), notes)
        repairs = Repairs()
        kernels, launches, ops, ranges = (
            tables.conform(name, repair(name, frame, repairs))
            for name, frame in (("kernels", kernels), ("launches", launches), ("ops", ops), ("ranges", ranges))
        )
        manifest = _describe(path, database, kernels)
    notes += _doubt(database.tables, kernels, launches, ops.height + ranges.height)
    return Recording(
        manifest=msgspec.structs.replace(
            manifest,
            shapes_recorded=ops["shapes"].count() > 0,
            modules_recorded=bool(ranges["name"].str.starts_with("module:").any()),
            notes=(*manifest.notes, *notes, *repairs.notes()),
        ),
        kernels=kernels,
        launches=launches,
        ops=ops,
        ranges=ranges,
    )


def _require_export(path: Path, database: Database) -> None:
    known = (*_WORK_TABLES, *_CALL_TABLES, "NVTX_EVENTS", "META_DATA_EXPORT", "StringIds")
    if not database.tables.intersection(known):
        raise StepscopeError(
            f"not an Nsight Systems export: `{path}`",
            detail=f"a SQLite file with none of the tables {', '.join(known)}",
            hint=EXPORT_COMMAND,
        )


def _read_work(database: Database, strings: pl.DataFrame) -> pl.DataFrame:
    work = [
        _read_kernels(database, strings),
        _read_copies(database),
        _read_sets(database),
        _read_graphs(database),
    ]
    return pl.concat(work, how="diagonal")


def _read_kernels(database: Database, strings: pl.DataFrame) -> pl.DataFrame:
    names = ["demangledName", "shortName", "mangledName"]
    shape = [f"{what}{axis}" for what in ("grid", "block") for axis in "XYZ"]
    memory = ["staticSharedMemory", "dynamicSharedMemory"]
    found = database.fetch(
        _CUPTI + "KERNEL", [*_ON_DEVICE, *names, *shape, *memory, "registersPerThread", "graphNodeId", "graphId"]
    )
    for name in names:
        found = found.join(strings.rename({"id": name, "value": f"{name}Text"}), on=name, how="left")
    return found.select(
        pl.coalesce(*(f"{name}Text" for name in names), pl.lit("(unnamed kernel)")).alias("name"),
        *_place("kernel"),
        ((pl.col("graphNodeId").fill_null(0) != 0) | (pl.col("graphId").fill_null(0) != 0)).alias("graph"),
        pl.col("graphNodeId").alias("graph_node"),
        *(pl.col(name).alias(f"{name[:-1]}_{name[-1].lower()}") for name in shape),
        pl.col("registersPerThread").alias("registers"),
        pl.sum_horizontal(memory, ignore_nulls=False).alias("shared_bytes"),
    )


def _read_copies(database: Database) -> pl.DataFrame:
    found = database.fetch(_CUPTI + "MEMCPY", [*_ON_DEVICE, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId"])
    kinds = _COPY_KINDS | {
        number: f"{way[1]}to{way[2]}"
        for number, name in _words(database, "ENUM_CUDA_MEMCPY_OPER", "name").items()
        if (way := re.search(r"([HDAP])TO([HDAP])$", name))
    }
    memory = _memory_kinds(database)
    return found.select(
        pl.format(
            "Memcpy {} ({} -> {})", _named("copyKind", kinds), _named("srcKind", memory), _named("dstKind", memory)
        ).alias("name"),
        *_place("memcpy"),
        (pl.col("graphNodeId").fill_null(0) != 0).alias("graph"),
        pl.col("graphNodeId").alias("graph_node"),
        "bytes",
    )


def _read_sets(database: Database) -> pl.DataFrame:
    found = database.fetch(_CUPTI + "MEMSET", [*_ON_DEVICE, "bytes", "memKind", "graphNodeId"])
    return found.select(
        pl.format("Memset ({})", _named("memKind", _memory_kinds(database))).alias("name"),
        *_place("memset"),
        (pl.col("graphNodeId").fill_null(0) != 0).alias("graph"),
        pl.col("graphNodeId").alias("graph_node"),
        "bytes",
    )


def _read_graphs(database: Database) -> pl.DataFrame:
    """CUDA graphs that were traced as a whole: their kernels are not in the file."""
    found = database.fetch(_CUPTI + "GRAPH_TRACE", [*_ON_DEVICE, "graphId"])
    name = pl.format("CUDA graph {}", pl.col("graphId").cast(pl.String).fill_null("?"))
    return found.select(name.alias("name"), *_place("kernel"), pl.lit(value=True).alias("graph"))


def _place(kind: str) -> list[pl.Expr]:
    return [
        pl.lit(kind).alias("kind"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
        (pl.col("globalPid") // 2**24 & 0xFFFFFF).alias("process"),
        pl.col("deviceId").alias("device"),
        pl.col("streamId").alias("stream"),
        pl.col("correlationId").alias("correlation"),
    ]


def _words(database: Database, table: str, column: str) -> dict[int, str]:
    found = database.fetch(table, ["id"], [column]).drop_nulls()
    return dict(zip(found["id"].to_list(), found[column].to_list(), strict=True))


def _memory_kinds(database: Database) -> dict[int, str]:
    return _MEMORY_KINDS | _words(database, "ENUM_CUDA_MEM_KIND", "label")


def _named(column: str, words: dict[int, str]) -> pl.Expr:
    # With fill_null: the default of replace_strict does not apply to nulls.
    numbers, names = list(words), list(words.values())
    named = pl.col(column).replace_strict(numbers, names, default="Unknown", return_dtype=pl.String)
    return named.fill_null("Unknown")


def _read_calls(database: Database, strings: pl.DataFrame) -> pl.DataFrame:
    columns = ["start", "end", "globalTid", "correlationId", "nameId"]
    found = pl.concat([database.fetch(table, columns) for table in _CALL_TABLES])
    found = found.join(strings.rename({"id": "nameId", "value": "text"}), on="nameId", how="left")
    return found.select(
        pl.col("text").fill_null("(unnamed call)").str.replace(r"_v\d+$", "").alias("name"),
        pl.col("start").alias("start_ns"),
        pl.col("end").alias("end_ns"),
        (pl.col("globalTid") // 2**24 & 0xFFFFFF).alias("process"),
        (pl.col("globalTid") & 0xFFFFFF).alias("thread"),
        pl.col("correlationId").alias("correlation"),
    )


def _doubt(present: frozenset[str], kernels: pl.DataFrame, launches: pl.DataFrame, ranges: int) -> list[str]:
    notes = []
    if not ranges:
        notes.append("no NVTX ranges in this file: kernels cannot be assigned to operators or modules")
    if not present.intersection(_CALL_TABLES):
        notes.append("no CUDA API calls in this file: kernels cannot be matched to their launches")
    else:
        keys = ["process", "correlation"]
        orphans = kernels.join(launches.select(keys).unique(), on=keys, how="anti")
        if orphans.height:
            share = _busy(orphans) / (_busy(kernels) or 1)
            notes.append(
                f"{orphans.height:,} of {kernels.height:,} device activities ({share:.0%} of device time) have no "
                "launch in this file: they were launched before the recording started, or the call was left out"
            )
    whole = kernels.filter(pl.col("name").str.starts_with("CUDA graph "))
    if whole.height:
        notes.append(
            f"{count_noun(whole.height, 'CUDA graph was', 'CUDA graphs were')} traced as a whole, without kernels: "
            "record with --cuda-graph-trace node to see them"
        )
    for column, what in (("process", "processes"), ("device", "devices")):
        if (count := kernels[column].n_unique()) > 1:
            notes.append(f"{count} {what} in this file")
    return notes


def _busy(kernels: pl.DataFrame) -> float:
    return float((kernels["end_ns"].cast(pl.Float64) - kernels["start_ns"].cast(pl.Float64)).sum())


def _describe(path: Path, database: Database, kernels: pl.DataFrame) -> Manifest:
    """Describe the file. Only named values are read: the same tables also contain a host, a user and paths."""
    exported = database.fetch("META_DATA_EXPORT", [], ["name", "value"]).drop_nulls()
    said = dict(zip(exported["name"].to_list(), exported["value"].to_list(), strict=True))
    wanted = {"nsys": "EXPORT_PRODUCT_VERSION", "nsys export schema": "EXPORT_SCHEMA_VERSION"}
    versions = {
        name: said[key] for name, key in wanted.items() if re.fullmatch(r"[0-9][0-9.]{0,40}", said.get(key, ""))
    }
    names = _device_names(database)
    used = kernels["device"].drop_nulls().unique().sort().to_list()
    found = [names[device] for device in used if device in names]
    several = len({name for name, _ in found}) > 1
    notes = [] if found else ["the file does not name the device"]
    if several:
        notes.append(f"several kinds of devices: {', '.join(sorted({name for name, _ in found}))}")
    name, sms = found[0] if found else ("", None)
    return Manifest(
        source="nsight systems",
        file=path.name,
        device=name,
        device_sms=sms,
        versions=versions,
        notes=tuple(notes),
    )


def _device_names(database: Database) -> dict[int, tuple[str, int | None]]:
    """Device names by CUDA device number, which differs from the driver's if some devices are hidden."""
    gpus = database.fetch("TARGET_INFO_GPU", ["id", "smCount"], ["name"]).drop_nulls(["id", "name"])
    by_id = {number: (name[:200], sms) for number, sms, name in gpus.iter_rows()}
    numbers = database.fetch("TARGET_INFO_CUDA_DEVICE", ["cudaId", "gpuId"]).drop_nulls()
    renumbered = {cuda: by_id[gpu] for cuda, gpu in numbers.iter_rows() if gpu in by_id}
    return renumbered or by_id
