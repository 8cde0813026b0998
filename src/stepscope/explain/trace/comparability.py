"""Warnings about a comparison: differences between two recordings in device, workload and software."""

from collections.abc import Iterator

from stepscope.explain.trace.profile import Profile
from stepscope.findings import Cell
from stepscope.recording.rows.bench import Environment
from stepscope.recording.store import Manifest
from stepscope.spec import RUN_SETTINGS, Case
from stepscope.units import count_noun


def compare_circumstances(a: Profile, b: Profile, labels: tuple[str, str]) -> tuple[str, ...]:
    """Return warnings, the most serious first: devices, workloads, software, and unreliable measurements."""
    left, right = a.recording.manifest, b.recording.manifest
    return (
        *_devices(a, b, labels),
        *_workloads(left, right),
        *_software(left, right),
        *_doubts(labels[0], left),
        *_doubts(labels[1], right),
    )


def _devices(a: Profile, b: Profile, labels: tuple[str, str]) -> Iterator[str]:
    left, right = a.recording.manifest, b.recording.manifest
    one, other = labels
    if left.device != right.device:
        yield f"warning: the devices differ: {_or_unknown(left.device)} → {_or_unknown(right.device)}"
    if len(a.devices) != len(b.devices):
        counts = [count_noun(len(profile.devices), "device") for profile in (a, b)]
        yield f"warning: {one} has {counts[0]}, {other} has {counts[1]}; times are means over devices"
    for name, manifest in ((one, left), (other, right)):
        if manifest.source == "nsight compute":
            yield f"warning: {name}: Nsight Compute serializes kernels; wall and idle time are not those of a step"
    if left.source != right.source:
        yield f"warning: the profilers differ, and so does their overhead: {left.source} → {right.source}"


def _workloads(a: Manifest, b: Manifest) -> Iterator[str]:
    if a.case is None or b.case is None:
        if a.file != b.file:
            yield "workload unknown: check that both run the same model and settings"
        return
    left, right = list_settings(a.case, a.optimizer), list_settings(b.case, b.optimizer)
    differ = [name for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]
    if differ:
        said = ", ".join(f"{name} {left.get(name, '–')} → {right.get(name, '–')}" for name in differ)
        yield f"the workloads differ: {said}"


def list_settings(case: Case, optimizer: str | None) -> dict[str, str]:
    """Return the settings of a workload as text, without its device and seed. `optimizer` is the one that ran, for
    workloads whose factory brings it."""
    workload = case.workload
    settings = {"model": workload.model.name}
    for name, setting in RUN_SETTINGS.items():
        if name not in ("device", "seed"):
            settings[name.replace("_", " ")] = _say(setting.read(workload))
    return settings | {"optimizer": _say(workload.optimizer or optimizer)}


def _say(value: Cell) -> str:
    return "–" if value is None else str(value)


def _software(a: Manifest, b: Manifest) -> Iterator[str]:
    left, right = list_versions(a), list_versions(b)
    differ = [name for name in dict.fromkeys((*left, *right)) if left.get(name) != right.get(name)]
    if differ:
        said = ", ".join(f"{name} {left.get(name, '–')} → {right.get(name, '–')}" for name in differ)
        yield f"warning: the software differs: {said}"


def list_versions(manifest: Manifest) -> dict[str, str]:
    environment = manifest.environment
    if environment is None:
        return {
            name.replace("_", " "): version for name, version in manifest.versions.items() if name != "schemaVersion"
        }
    return describe_software(environment)


def describe_software(environment: Environment) -> dict[str, str]:
    named = {name: getattr(environment, name) for name in ("torch", "triton", "cuda", "driver", "python", "stepscope")}
    named["CPU limits"] = environment.cpu_limits
    return {**{name: str(version) for name, version in named.items() if version}, "threads": str(environment.threads)}


def _doubts(name: str, manifest: Manifest) -> Iterator[str]:
    for doubt in manifest.doubts:
        yield f"warning: {name}: {doubt.text} ({doubt.code})"


def _or_unknown(name: str) -> str:
    return name or "an unknown device"
