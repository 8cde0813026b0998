"""`stepscope recover`: files somebody hands us, and what model they show."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import Exit, StepscopeError
from stepscope.findings import Table
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Recording, is_recording
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.solve.recovery import Recovery, recover
from stepscope.recover.solve.recovery_tables import answer_page


class Undecided(msgspec.Struct, frozen=True, kw_only=True):
    """No model can be read out of the files, and why."""

    reason: str
    notes: tuple[str, ...] = ()


def read_evidence(
    paths: Sequence[Path], *, expected: str, use_shapes: bool = False
) -> tuple[list[Recording], list[KernelEvidence], str]:
    """The recordings, the evidence in them, and what it calls its GPU. Raises StepscopeError for what cannot be read,
    and where no file holds a kernel of a GPU; `expected` says then what is needed."""
    recordings = [open_recording(path) for path in paths]
    evidence = [gather(one, file=path.name, use_shapes=use_shapes) for one, path in zip(recordings, paths, strict=True)]
    if not any(one.sightings for one in evidence):
        raise StepscopeError(
            f"no GPU kernels in {', '.join(f'`{path}`' for path in paths)}",
            detail=expected,
            hint="stepscope profile --counters --size small, on a machine with a GPU",
        )
    return recordings, evidence, next((one.device for one in evidence if one.device), "")


def recover_files(paths: Sequence[Path], *, use_shapes: bool = False) -> tuple[Recovery | Undecided, str]:
    """What was recovered, and what the evidence calls its GPU."""
    expected = "a model is recovered from what ran on a GPU: a profiler's trace, or Nsight Compute's counters"
    _, evidence, device = read_evidence(paths, expected=expected, use_shapes=use_shapes)
    try:
        return recover(evidence), device
    except NoTransformerError as error:
        return Undecided(reason=str(error), notes=tuple(note for one in evidence for note in one.notes)), device


def describe(result: Recovery | Undecided, paths: Sequence[Path]) -> Iterator[str | Table]:
    """Lines and tables, in the order in which they are read."""
    files = ", ".join(path.name for path in paths)
    if isinstance(result, Undecided):
        yield (
            "\n".join([f"{files}: cannot tell what model ran", f"  {result.reason}", *map("  ".__add__, result.notes)])
            + "\n"
        )
        return
    page = answer_page(result, files=files)
    yield page.headline + "\n\n"
    for number, table in enumerate(page.tables):
        if number:
            yield "\n"
        yield table


def state(result: Recovery | Undecided) -> dict[str, object]:
    """In JSON's terms, as it is printed and signed."""
    if isinstance(result, Undecided):
        return {"verdict": "cannot tell", "reason": result.reason, "candidates": [], "notes": list(result.notes)}
    verdict = "recovered" if result.candidates else "cannot tell"
    plain: dict[str, object] = msgspec.to_builtins(result)
    return {"verdict": verdict, **plain}


def encode(result: Recovery | Undecided) -> str:
    return msgspec.json.format(msgspec.json.encode(state(result)), indent=2).decode() + "\n"


def check_study_flags(flags: Mapping[str, object]) -> None:
    """A flag that would be ignored is an error."""
    for flag, given in flags.items():
        if given:
            raise StepscopeError(f"`{flag}` does nothing with `--study`", hint="leave it out")


def study_files(paths: Sequence[Path], settings: Path | None) -> list[Table]:
    """Over recordings of our own, folders that hold a grid of them, or files whose settings stand in another."""
    from stepscope.recover.study import study
    from stepscope.recover.study.runs import read_truths

    found = expand(paths)
    truths = None if settings is None else read_truths(settings)
    made = study([open_recording(path) for path in found], names=[path.name for path in found], truths=truths)
    return [one for one in made if isinstance(one, Table)]


def expand(paths: Sequence[Path]) -> list[Path]:
    """A folder of recordings stands for those in it."""
    found: list[Path] = []
    for path in paths:
        inside = (
            [one for one in sorted(path.iterdir()) if is_recording(one)]
            if path.is_dir() and not is_recording(path)
            else []
        )
        found += inside or [path]
    return found


def exit_code(result: Recovery | Undecided) -> Exit:
    return Exit.UNDECIDED if isinstance(result, Undecided) or not result.candidates else Exit.OK
