"""The device and its limits, software versions, and all settings of the run."""

from collections.abc import Iterator

from stepscope.explain.story.commands import find_case
from stepscope.explain.story.phrases import name_source, say_started
from stepscope.explain.story.script import tabulate_loop
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.comparability import list_settings
from stepscope.explain.trace.run_labels import find_torch
from stepscope.findings import Cell, Column, Exhibit, Section, Table
from stepscope.hardware import Hardware
from stepscope.recording.rows.bench import Environment
from stepscope.recording.store import Manifest
from stepscope.spec import SHAPE_SETTINGS, Case, Factory, HuggingFace, ModelShape
from stepscope.units import count_noun, say_size

_Row = tuple[str, str]


def show_environment(materials: Materials) -> Section:
    rows = tuple(dict.fromkeys(_rows(materials)))
    loop = tabulate_loop(materials)
    tables = {"environment-loop": loop, "environment-table": _table(rows) if rows else None}
    exhibits = tuple(Exhibit(key=key, part=table) for key, table in tables.items() if table is not None)
    missing = (materials.absent["bench"],) if "bench" in materials.absent else ()
    return Section(
        key="environment", title="Environment", lead=_say_where(materials), exhibits=exhibits, missing=missing
    )


def find_environment(materials: Materials) -> Environment | None:
    for row in (*materials.bench[:1], *materials.attention[:1]):
        return row.environment
    for manifest in _manifests(materials):
        if manifest.environment is not None:
            return manifest.environment
    return materials.precision.environment if materials.precision else None


def find_device(materials: Materials) -> str:
    """What the driver calls the device; empty if unknown."""
    environment = find_environment(materials)
    if environment is not None:
        return environment.driver_name
    return next((manifest.device for manifest in _manifests(materials) if manifest.device), "")


def find_torch_version(materials: Materials) -> str:
    """The version of PyTorch; empty if unknown."""
    environment = find_environment(materials)
    if environment is not None:
        return environment.torch
    return next((version for manifest in _manifests(materials) if (version := find_torch(manifest))), "")


def find_started(materials: Materials) -> str:
    """When the run began; empty if unknown."""
    documents = (materials.precision,) if materials.precision else ()
    rows = (*_manifests(materials), *materials.bench[:1], *materials.attention[:1], *documents)
    return next((one.started for one in rows if one.started), "")


def _manifests(materials: Materials) -> list[Manifest]:
    return [one.recording.manifest for one in (materials.profile, materials.memory) if one is not None]


def _table(rows: tuple[_Row, ...]) -> Table:
    cells: tuple[tuple[Cell, ...], ...] = rows
    return Table(
        title="Settings and versions",
        columns=(Column(key="what", label=""), Column(key="value", label="value")),
        rows=cells,
    )


def _say_where(materials: Materials) -> str:
    environment = find_environment(materials)
    if environment is not None:
        return f"{environment.driver_name}, PyTorch {environment.torch}, Python {environment.python}."
    for manifest in _manifests(materials):
        on_device = manifest.memory.device if manifest.memory else ""
        torch, device = find_torch(manifest), manifest.device or on_device or "Unknown device"
        version = f", PyTorch {torch}" if torch else ""
        return f"{device}{version}. The table has everything the file records about the machine."
    return ""


def _rows(materials: Materials) -> Iterator[_Row]:
    """Settings first, then the device and versions."""
    case = find_case(materials)
    if case is not None:
        yield from _of_case(case, materials)
    for row in materials.bench[:1]:
        if row.measurement is not None:
            yield "parameters", f"{row.measurement.parameters:,}"
            if row.measurement.attention_kernels:
                yield "attention kernels", ", ".join(row.measurement.attention_kernels)
    environment = find_environment(materials)
    profile = materials.profile
    if environment is not None:
        yield from _of_environment(environment)
    elif profile is not None and profile.hardware is not None:
        yield from _of_hardware(profile.hardware)
    for manifest in _manifests(materials):
        yield from _of_manifest(manifest, is_ours=environment is not None)
    for row in materials.bench[:1]:
        yield "timing started", say_started(row.started)


def _of_case(case: Case, materials: Materials) -> Iterator[_Row]:
    timing, workload = case.timing, case.workload
    yield "model", _say_model(workload.model)
    ran = next((row.optimizer for row in materials.bench[:1] if row.optimizer), None)
    ran = ran or next((one.optimizer for one in _manifests(materials) if one.optimizer), None)
    for name, value in list_settings(case, ran).items():
        if name != "model":
            yield name, "default" if value == "–" else value
    yield "seed", str(workload.seed)
    if materials.bench:
        yield "timing", f"{count_noun(timing.steps, 'step')} after {count_noun(timing.warmup, 'warm-up step')}"
    if timing.memory_limit:
        yield "memory limit", say_size(timing.memory_limit)


def _say_model(model: ModelShape | Factory | HuggingFace) -> str:
    """The model as it was set: all sizes, or the target with its arguments."""
    if not isinstance(model, ModelShape):
        return model.name
    sizes = [f"{name} {getattr(model, name)}" for name in SHAPE_SETTINGS if name not in ("size", "tie_embeddings")]
    return ", ".join([*sizes, *(["tied embeddings"] if model.tie_embeddings else [])])


def _of_environment(environment: Environment) -> Iterator[_Row]:
    yield "device", environment.driver_name
    yield from _of_hardware(environment.hardware)
    versions = (
        ("PyTorch", environment.torch),
        ("Triton", environment.triton),
        ("CUDA", environment.cuda),
        ("driver", environment.driver),
        ("Python", environment.python),
        ("stepscope", environment.stepscope),
        ("commit", environment.commit),
    )
    yield from ((name, version) for name, version in versions if version)
    yield "CPU threads", str(environment.threads)
    if environment.cpu_limits:
        yield "CPU instruction limit", environment.cpu_limits


def _of_hardware(hardware: Hardware) -> Iterator[_Row]:
    source = "measured with a large GEMM" if hardware.source == "measured" else "data sheet, dense"
    peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in hardware.peak_flops.items())
    if peaks:
        yield f"peak in TFLOP/s ({source})", peaks
    if hardware.bandwidth:
        copied = " (measured with a large copy)" if hardware.source == "measured" else ""
        yield f"memory bandwidth{copied}", f"{hardware.bandwidth / 1e9:,.0f} GB/s"
    if hardware.memory_bytes:
        yield "device memory", f"{hardware.memory_bytes / 1e9:,.0f} GB"


def _of_manifest(manifest: Manifest, *, is_ours: bool) -> Iterator[_Row]:
    what = "memory snapshot" if manifest.memory is not None else "trace"
    if not is_ours:
        if manifest.device:
            yield "device", manifest.device
        yield from ((name.replace("_", " "), version) for name, version in manifest.versions.items())
    if manifest.device_sms:
        yield "multiprocessors", str(manifest.device_sms)
    yield f"{what} source", name_source(manifest)
    if manifest.file and not is_ours:
        yield f"{what} file", manifest.file
    if manifest.rank is not None:
        size = f" of {manifest.world_size}" if manifest.world_size else ""
        yield "rank", f"{manifest.rank}{size}"
    if manifest.started:
        yield f"{what} recorded", say_started(manifest.started)
    if manifest.memory is not None:
        yield "memory events", f"{manifest.memory.events:,}"
