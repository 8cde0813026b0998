"""`stepscope recover`: read the evidence files and infer the model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stepscope.errors import Exit, StepscopeError
from stepscope.findings import Table
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Recording, is_recording
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence, gather
from stepscope.recover.solve.recovery import Recovery
from stepscope.recover.solve.recovery_tables import answer_page
from stepscope.recover.solve.variants import recover_any


class Undecided(msgspec.Struct, frozen=True, kw_only=True):
    """The files do not show a model, for the given reason."""

    reason: str
    notes: tuple[str, ...] = ()


def read_evidence(
    paths: Sequence[Path], *, expected: str, use_shapes: bool = False
) -> tuple[list[Recording], list[KernelEvidence], str]:
    """Return the recordings, their evidence, and the GPU's name. Raises StepscopeError if a file cannot be read or if
    no file has GPU kernels; `expected` is then the detail of the error."""
    recordings = [open_recording(path) for path in paths]
    evidence = [gather(one, file=path.name, use_shapes=use_shapes) for one, path in zip(recordings, paths, strict=True)]
    if not any(one.sightings for one in evidence):
        raise StepscopeError(
            f"no GPU kernels in {', '.join(f'`{path}`' for path in paths)}",
            detail=expected,
            hint="run stepscope profile --counters --size small on a machine with a GPU",
        )
    return recordings, evidence, next((one.device for one in evidence if one.device), "")


def recover_files(paths: Sequence[Path], *, use_shapes: bool = False) -> tuple[Recovery | Undecided, str]:
    """Return the recovered model and the GPU's name."""
    expected = "expected a profiler trace of a GPU run, or Nsight Compute counters"
    _, evidence, device = read_evidence(paths, expected=expected, use_shapes=use_shapes)
    try:
        return recover_any(evidence), device
    except NoTransformerError as error:
        notes = (*error.known, *(note for one in evidence for note in one.notes))
        return Undecided(reason=str(error), notes=notes), device


def describe(result: Recovery | Undecided, paths: Sequence[Path]) -> Iterator[str | Table]:
    """Yield text and tables in the order to print them."""
    files = ", ".join(path.name for path in paths)
    if isinstance(result, Undecided):
        yield (
            "\n".join([f"{files}: cannot tell which model ran", f"  {result.reason}", *map("  ".__add__, result.notes)])
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
    """Return the result as JSON-compatible values, as printed and signed."""
    if isinstance(result, Undecided):
        return {"verdict": "cannot tell", "reason": result.reason, "candidates": [], "notes": list(result.notes)}
    verdict = "recovered" if result.candidates else "cannot tell"
    plain: dict[str, object] = msgspec.to_builtins(result)
    return {"verdict": verdict, **plain}


def encode(result: Recovery | Undecided) -> str:
    return msgspec.json.format(msgspec.json.encode(state(result)), indent=2).decode() + "\n"


def check_study_flags(flags: Mapping[str, object]) -> None:
    """Raise StepscopeError for a flag that `--study` would ignore."""
    for flag, given in flags.items():
        if given:
            raise StepscopeError(f"`{flag}` cannot be used with `--study`", hint=f"remove {flag}")


def study_files(paths: Sequence[Path], settings: Path | None) -> list[Table]:
    """Run a study over recordings, directories of recordings, or files whose settings are in the `settings` file."""
    from stepscope.recover.study import study
    from stepscope.recover.study.runs import read_truths

    found = expand(paths)
    truths = None if settings is None else read_truths(settings)
    made = study([open_recording(path) for path in found], names=[path.name for path in found], truths=truths)
    return [one for one in made if isinstance(one, Table)]


def expand(paths: Sequence[Path]) -> list[Path]:
    """Replace each directory of recordings by the recordings in it."""
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
