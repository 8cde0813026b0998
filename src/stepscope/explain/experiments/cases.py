"""The cases of a sweep: the settings in which they differ, and short descriptions of a case."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stepscope.findings import Cell
from stepscope.recording.rows.bench import CaseRow, Environment, Row
from stepscope.spec import (
    RUN_SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    TIMING_SETTINGS,
    Case,
    Setting,
    Timing,
    Workload,
    complete,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSetting:
    """A setting that may be an axis of the grid, and how to read its value from a row."""

    setting: Setting
    read: Callable[[CaseRow], Cell]

    @property
    def key(self) -> str:
        return self.setting.name + ("_bytes" if self.setting.kind == "bytes" else "")

    @property
    def label(self) -> str:
        return self.setting.label

    @property
    def kind(self) -> Literal["text", "count", "bytes"]:
        return self.setting.kind

    @property
    def baseline(self) -> Cell:
        """The value that other values are compared with."""
        return self.setting.show(self.setting.baseline)

    @property
    def needs_label(self) -> bool:
        """Whether its values need the label to make sense: numbers, yes and no."""
        return self.kind == "count" or self.setting.is_switch


# Settings where the row is more accurate than its case: a factory may bring its own optimizer, and `auto` resolves to a
# device.
_AS_RUN: dict[str, Callable[[CaseRow], Cell]] = {
    "optimizer": lambda row: row.optimizer,
    "device": lambda row: row.environment.device,
}
# Columns start with what a step computes; how it is computed follows, in the order of declaration.
_LEADING = ("batch", "context", "mode")
_TRAILING = ("device", "seed")


def _of_workload(setting: Setting) -> CaseSetting:
    as_run = _AS_RUN.get(setting.name)
    return CaseSetting(setting=setting, read=as_run or (lambda row: setting.read(row.case.workload)))


def _of_timing(setting: Setting) -> CaseSetting:
    return CaseSetting(setting=setting, read=lambda row: setting.read(row.case.timing))


def _of_environment(name: str, label: str, read: Callable[[CaseRow], Cell], **words: Any) -> CaseSetting:
    """A fact about the machine that tables treat like a setting."""
    return CaseSetting(setting=complete(Setting(help="", label=label, **words), name), read=read)


_VOCAB = CaseSetting(
    setting=SHAPE_SETTINGS["vocab"], read=lambda row: SHAPE_SETTINGS["vocab"].read(row.case.workload.model)
)
CASE_SETTINGS = (
    CaseSetting(
        setting=complete(Setting(help="", label="size"), "model"), read=lambda row: row.case.workload.model.name
    ),
    *(_of_workload(RUN_SETTINGS[name]) for name in _LEADING),
    *(_of_workload(one) for name, one in RUN_SETTINGS.items() if name not in (*_LEADING, *_TRAILING)),
    _of_workload(RUN_SETTINGS["device"]),
    _of_environment("device_name", "device name", lambda row: row.environment.driver_name, phrase="{}"),
    _of_environment("torch", "torch", lambda row: row.environment.torch),
    _of_environment("cpu_limits", "CPU limits", lambda row: row.environment.cpu_limits or None, in_title="never"),
    _VOCAB,
    _of_workload(RUN_SETTINGS["seed"]),
    *map(_of_timing, sorted(TIMING_SETTINGS.values(), key=lambda one: one.kind != "bytes")),
)
ALWAYS_SHOWN = ("model", "context", "precision")


def doubt_notes(rows: Iterable[Row], meanings: Mapping[str, str]) -> list[str]:
    """A line for each quality warning of the rows. A warning from a later version brings its own text."""
    doubts = [doubt for row in rows for doubt in row.doubts]
    texts = {doubt.code: doubt.text for doubt in reversed(doubts)} | dict(meanings)
    counts = Counter(doubt.code for doubt in doubts)
    return [f"{code}: {texts[code]} ({count} case{'s' * (count != 1)})" for code, count in counts.items()]


def describe_case(case: Case) -> str:
    """Describe a case in a few words: its model and the settings that are not defaults."""
    workload, plain = case.workload, Workload(model=case.workload.model)
    last = RUN_SETTINGS["seed"]
    words = [workload.model.name]
    words += [_describe(one, workload, plain) for one in RUN_SETTINGS.values() if one is not last]
    words.append(_describe(SHAPE_SETTINGS["vocab"], workload.model, SIZES["nano"]))
    words.append(_describe(last, workload, plain))
    words += [_describe(one, case.timing, Timing()) for one in TIMING_SETTINGS.values()]
    return " ".join(word for word in words if word)


def _describe(setting: Setting, owner: object, plain: object) -> str:
    value = setting.read(owner)
    is_idle = setting.in_case == "never" or getattr(owner, "mode", setting.modes[0]) not in setting.modes
    if value is None or is_idle or (setting.in_case == "changed" and value == setting.read(plain)):
        return ""
    return setting.say(value, setting.word)


def limit_notes(environments: Iterable[Environment]) -> list[str]:
    """A note for each set of limits on CPU instructions that a row ran with."""
    limits = dict.fromkeys(environment.cpu_limits for environment in environments if environment.cpu_limits)
    return [f"CPU instructions limited by {limit}: GEMMs may be slower" for limit in limits]


def say_sizes(workload: Workload) -> list[str]:
    """Batch and context, without the context if the model has no tokens."""
    plain = Workload(model=workload.model)
    words = [_describe(RUN_SETTINGS[name], workload, plain) for name in ("batch", "context")]
    return [word for word in words if word]


def say_extras(workload: Workload) -> list[str]:
    """The settings that change the program and are not at their baseline."""
    extras = [(one, one.read(workload)) for one in RUN_SETTINGS.values() if one.is_extra]
    return [one.say(value) for one, value in extras if value not in (None, one.show(one.baseline))]


def brief(reason: str) -> str:
    """The beginning of a reason, since error messages of libraries can be long. The row has the full text."""
    return textwrap.shorten(reason, 110, placeholder=" …")


def say_shared(rows: Sequence[CaseRow], *, without: Sequence[str] = ()) -> str:
    """Describe in one line what all rows have in common, leaving out the settings in `without`."""
    if not rows:
        return ""
    quiet = (*ALWAYS_SHOWN, *without)
    parts = [_say(s, rows[0]) for s in CASE_SETTINGS if s.key not in quiet and not varies(s, rows)]
    return ", ".join(part for part in parts if part)


def _say(one: CaseSetting, row: CaseRow) -> str:
    setting, value = one.setting, one.read(row)
    is_idle = setting.in_title == "never" or row.case.workload.mode not in setting.modes
    if value is None or is_idle or (setting.in_title == "changed" and value == setting.show(setting.default)):
        return ""
    return setting.say(value)


def say_setting(setting: CaseSetting, row: CaseRow) -> str:
    value = setting.read(row)
    return f"{setting.label} {value}" if setting.needs_label else str(value)


def find_setting(key: str) -> CaseSetting:
    return next(setting for setting in CASE_SETTINGS if setting.key == key)


def varies(setting: CaseSetting, rows: Sequence[CaseRow]) -> bool:
    values = {setting.read(row) for row in rows}
    if setting.key in _AS_RUN:
        values.discard(None)  # a failed case does not know which optimizer its factory brings
    return len(values) > 1


def all_else(row: CaseRow, *without: CaseSetting) -> tuple[Cell, ...]:
    """Everything else than these settings that identifies a row, including the environment and the model's source."""
    settings = tuple(other.read(row) for other in CASE_SETTINGS if other not in without)
    return (*settings, *row.environment.identity, row.source)
