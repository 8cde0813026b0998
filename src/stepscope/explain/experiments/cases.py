"""Cases of a sweep beside each other: which settings tell them apart, and a case in words."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stepscope.findings import Cell
from stepscope.recording.rows.bench import CaseRow, Environment, Row
from stepscope.spec import SIZES, Case, Timing, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSetting:
    """A setting that may be an axis of the grid. `baseline` is the value that others are compared with."""

    key: str
    label: str
    read: Callable[[CaseRow], Cell]
    kind: Literal["text", "count", "bytes"] = "text"
    baseline: Cell = None


CASE_SETTINGS = (
    CaseSetting(key="model", label="size", read=lambda row: row.case.workload.model.name),
    CaseSetting(key="batch", label="batch", read=lambda row: row.case.workload.batch, kind="count"),
    CaseSetting(key="context", label="context", read=lambda row: row.case.workload.context or None, kind="count"),
    CaseSetting(key="mode", label="mode", read=lambda row: row.case.workload.mode),
    CaseSetting(key="precision", label="precision", read=lambda row: row.case.workload.precision, baseline="fp32"),
    CaseSetting(key="attention", label="attention", read=lambda row: row.case.workload.attention, baseline="naive"),
    CaseSetting(key="compile", label="compile", read=lambda r: _yes_no(r.case.workload.compile), baseline="no"),
    CaseSetting(key="checkpoint", label="checkpoint", read=lambda row: row.case.workload.checkpoint, baseline="none"),
    CaseSetting(key="optimizer", label="optimized by", read=lambda row: row.optimizer, baseline="adamw"),
    CaseSetting(key="device", label="device", read=lambda row: row.environment.device),
    CaseSetting(key="device_name", label="device name", read=lambda row: row.environment.driver_name),
    CaseSetting(key="torch", label="torch", read=lambda row: row.environment.torch),
    CaseSetting(key="cpu_limits", label="CPU limits", read=lambda row: row.environment.cpu_limits or None),
    CaseSetting(
        key="vocab",
        label="vocab",
        read=lambda row: getattr(row.case.workload.model, "vocab", None),
        kind="count",
    ),
    CaseSetting(key="seed", label="seed", read=lambda row: row.case.workload.seed, kind="count"),
    CaseSetting(key="memory_limit_bytes", label="limit", read=lambda row: row.case.timing.memory_limit, kind="bytes"),
    CaseSetting(key="steps", label="steps", read=lambda row: row.case.timing.steps, kind="count"),
    CaseSetting(key="warmup", label="warm-up", read=lambda row: row.case.timing.warmup, kind="count"),
)
ALWAYS_SHOWN = ("model", "context", "precision")


def doubt_notes(rows: Iterable[Row], meanings: Mapping[str, str]) -> list[str]:
    """A line for each doubt about the rows. One that a later version raised has its own text."""
    doubts = [doubt for row in rows for doubt in row.doubts]
    texts = {doubt.code: doubt.text for doubt in reversed(doubts)} | dict(meanings)
    counts = Counter(doubt.code for doubt in doubts)
    return [f"{code}: {texts[code]} ({count} case{'s' * (count != 1)})" for code, count in counts.items()]


def describe_case(case: Case) -> str:
    """A case in a few words: its model and what of it is not the default."""
    workload, timing = case.workload, case.timing
    words = [
        workload.model.name,
        *say_sizes(workload),
        workload.precision,
    ]
    words.append(workload.mode)
    if workload.attention is not None:
        words.append(workload.attention)
    if workload.compile:
        words.append("compiled")
    if workload.checkpoint != "none":
        words.append(f"checkpoint {workload.checkpoint}")
    if workload.mode == "train" and workload.optimizer not in (None, Workload(model=workload.model).optimizer):
        words.append(str(workload.optimizer))
    vocab = getattr(workload.model, "vocab", SIZES["nano"].vocab)
    words += [f"vocab {vocab}"] * (vocab != SIZES["nano"].vocab) + [f"seed {workload.seed}"] * (workload.seed != 0)
    words += [f"{timing.steps} step{'s' * (timing.steps != 1)}"] * (timing.steps != Timing().steps)
    words += [f"warm-up {timing.warmup}"] * (timing.warmup != Timing().warmup)
    words += [f"limit {timing.memory_limit / 1e9:g} GB"] if timing.memory_limit else []
    return " ".join(words)


def limit_notes(environments: Iterable[Environment]) -> list[str]:
    """A remark for each set of limits on the CPU's instructions that something ran under."""
    limits = dict.fromkeys(environment.cpu_limits for environment in environments if environment.cpu_limits)
    return [f"CPU instructions limited by {limit}: matrix products may be slower" for limit in limits]


def say_sizes(workload: Workload) -> list[str]:
    """What a step works on; without a context where the model has no tokens."""
    return [f"batch {workload.batch}"] + ([f"context {workload.context}"] if workload.context else [])


def brief(reason: str) -> str:
    """The beginning of a reason: libraries go on about their settings. The row has all of it."""
    return textwrap.shorten(reason, 110, placeholder=" …")


def say_shared(rows: Sequence[CaseRow], *, without: Sequence[str] = ()) -> str:
    """What all rows have in common, in a line, but for the settings `without`."""
    if not rows:
        return ""
    quiet = (*ALWAYS_SHOWN, *without)
    parts = [_say(s, rows[0]) for s in CASE_SETTINGS if s.key not in quiet and not varies(s, rows)]
    return ", ".join(part for part in parts if part)


def _say(setting: CaseSetting, row: CaseRow) -> str:
    value = setting.read(row)
    match setting.key:
        case "device_name":
            return str(value)
        case "device" | "seed" | "vocab" | "cpu_limits":
            return ""
        case "compile":
            return "compiled" if value == "yes" else ""
        case "checkpoint":
            return "" if value == "none" else f"checkpoint {value}"
        case "attention":
            return f"{value} attention" if value else ""
        case "mode":
            return str(value)
        case "optimizer":
            return str(value) if value and row.case.workload.mode == "train" else ""
        case "memory_limit_bytes":
            return f"held to {value / 1e9:g} GB" if isinstance(value, int) else ""
        case "steps":
            return f"{value} step{'s' * (value != 1)}"
        case "warmup":
            return f"{value} warm-up{'s' * (value != 1)}"
        case _:
            return f"{setting.label} {value}"


def say_setting(setting: CaseSetting, row: CaseRow) -> str:
    value = setting.read(row)
    return f"{setting.label} {value}" if setting.kind == "count" or setting.key == "compile" else str(value)


def find_setting(key: str) -> CaseSetting:
    return next(setting for setting in CASE_SETTINGS if setting.key == key)


def varies(setting: CaseSetting, rows: Sequence[CaseRow]) -> bool:
    values = {setting.read(row) for row in rows}
    if setting.key == "optimizer" and any(row.optimizer is not None for row in rows):
        values.discard(None)  # a failed case does not know what its factory would have brought
    return len(values) > 1


def all_else(row: CaseRow, setting: CaseSetting) -> tuple[Cell, ...]:
    """All else that tells rows apart, the environment and a model's source included."""
    settings = tuple(other.read(row) for other in CASE_SETTINGS if other is not setting)
    return (*settings, *row.environment.identity, row.source)


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
