"""What `stepscope explain` does: read, understand, and put together what is to be shown.

What only some of it needs is imported where it is needed: a second look at a large recording takes less than a second,
of which importing everything would be a tenth.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from stepscope.errors import StepscopeError
from stepscope.explain.rules import find_once
from stepscope.explain.trace import profile_tables as breakdown
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.explain.trace.profile_tables import overhead_table
from stepscope.explain.trace.summary import SCHEMA, Summary, summarise
from stepscope.findings import Page, Table
from stepscope.recording import store
from stepscope.recording.cache import read_cached
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Recording

if TYPE_CHECKING:
    from stepscope.explain.memory import MemoryProfile

_ON_A_PAGE = 5  # kernels and findings on the page; --table shows all
_COUNTED_ON_A_PAGE = 12


class _Ranks(msgspec.Struct, frozen=True, kw_only=True):
    """The document for several files: each one's own."""

    schema: str = SCHEMA
    files: tuple[Summary, ...]


class Opened(NamedTuple):
    """A recording and the folder that it is kept in, if it is in one."""

    recording: Recording
    folder: Path | None

    @property
    def is_of_memory(self) -> bool:
        return self.recording.manifest.memory is not None


def open_files(paths: Sequence[Path], *, cached: bool) -> list[Opened]:
    opened = []
    for path in paths:
        recording, folder = read_cached(path, open_recording) if cached else (open_recording(path), None)
        if path.is_dir() and recording.manifest.memory is None:
            recording = recording.with_manifest(file=path.name)
        opened.append(Opened(recording, folder))
    if len(opened) > 1 and any(one.is_of_memory for one in opened):
        raise StepscopeError("a recording of memory is explained alone", hint="name the files one at a time")
    return opened


def open_memory(opened: Opened, *, save: Path | None, force: bool) -> "MemoryProfile":
    """What is known about a recording of memory, which is kept as one of ours where that is asked for."""
    from stepscope.explain.memory import make_memory_profile

    profile = make_memory_profile(opened.recording)
    if save is not None:
        store.save(opened.recording, save, force=force)
    return profile


def make_profiles(opened: Sequence[Opened]) -> list[Profile]:
    return [make_profile(recording, folder) for recording, folder in opened]


def explain_fresh(recording: Recording, name: str) -> Page:
    """A recording that was just made: its page, with what recording cost at the end, where that was timed."""
    profile = make_profile(recording.with_manifest(file=name))
    page = make_page([profile])
    cost = [overhead_table(recording.manifest)] if recording.manifest.overhead else []
    return msgspec.structs.replace(page, tables=(*page.tables, *cost))


def document_fresh(recording: Recording, name: str) -> str:
    return encode_summary([make_profile(recording.with_manifest(file=name))])


def check_outputs(files: Sequence[Path], *, save: Path | None, perfetto: Path | None) -> None:
    """Before anything is read: of one file, and not onto that file."""
    for flag, target in (("--save", save), ("--perfetto", perfetto)):
        if target is None:
            continue
        if len(files) != 1:
            raise StepscopeError(f"`{flag}` takes one file, not {len(files)}", hint="name the files one at a time")
        if target.exists() and target.resolve() == files[0].resolve():
            raise StepscopeError(f"`{flag}` would replace the file it reads: `{target}`", hint="another name")


def export(profile: Profile, *, save: Path | None, perfetto: Path | None, force: bool) -> None:
    if save is not None:
        store.save(profile.recording, save, force=force)
    if perfetto is not None:
        from stepscope.report.perfetto import write_perfetto

        recording = profile.recording
        write_perfetto(perfetto, profile.kernels, recording.ops, recording.ranges, force=force)


def answer_in_words(profiles: Sequence[Profile], width: int | None) -> str:
    from stepscope.explain.questions import answer, answers_text

    return answers_text(answer(profiles), width)


def answer_in_tables(profiles: Sequence[Profile], *, words: bool, evidence: bool) -> list[Table]:
    """The answers themselves where they are not told in words, and what they rest on where it is asked for."""
    from stepscope.explain.questions import answer, answers_table, evidence_tables

    answers = answer(profiles) if words or evidence else ()
    return [*([answers_table(answers)] if words else []), *(evidence_tables(answers) if evidence else ())]


def make_part(profiles: Sequence[Profile], name: str, *, top: int) -> list[Table]:
    """One table a file, or one for all where ranks are compared."""
    if name == "ranks":
        return [breakdown.ranks_table(profiles)]
    return [_part(profile, name, top) for profile in profiles]


def _part(profile: Profile, name: str, top: int) -> Table:
    match name:
        case "findings":
            return breakdown.findings_table(find_once(profile))
        case "roofline":
            from stepscope.explain.trace.roofline import roofline_table

            return roofline_table(profile, top=top)
        case "counters":
            return _require_counters(profile, top)
        case _ if name in breakdown.PARTS:
            return breakdown.make_part(profile, name, top=top)
        case _:
            raise StepscopeError(
                f"`--table {name}` is of memory, and this is a recording of time", hint="stepscope memory"
            )


def _counters_tables(profile: Profile, top: int) -> list[Table]:
    """None where there are no counters, or others than the table shows."""
    if not profile.recording.counters.height:
        return []
    from stepscope.explain.trace.counters import has_counters, kernels_table

    return [kernels_table(profile.recording, top=top)] if has_counters(profile.recording) else []


def _require_counters(profile: Profile, top: int) -> Table:
    for table in _counters_tables(profile, top):
        return table
    raise StepscopeError(
        "this recording has no hardware counters", hint="stepscope profile --counters, on a machine with a GPU"
    )


def make_page(profiles: Sequence[Profile]) -> Page:
    """The first file in full, and the ranks beside each other where there are several."""
    profile = profiles[0]
    tables = [breakdown.ranks_table(profiles)] if len(profiles) > 1 else []
    tables += [
        breakdown.classes_table(profile),
        breakdown.phases_table(profile),
        breakdown.kernels_table(profile, top=_ON_A_PAGE),
        *_counters_tables(profile, _COUNTED_ON_A_PAGE),
    ]
    return Page(
        headline="\n\n".join(breakdown.headline(one) for one in profiles),
        tables=tuple(tables),
        findings=find_once(profile),
    )


def encode_summary(profiles: Sequence[Profile]) -> str:
    summaries = tuple(summarise(profile, find_once(profile)) for profile in profiles)
    return encode(summaries[0] if len(summaries) == 1 else _Ranks(files=summaries))


def encode(content: Summary | _Ranks) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"
