"""One forgery on one file, through the code that the command runs: forged files are written and read again."""

import json
import resource
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from attack import claims, layers, names, numbers, omissions, reports
from attack.documents import Launch
from attack.forgery import Forgery
from attack.subject import ClaimFields, Forged, Subject, full_claim, open_subject, without
from stepscope.errors import Exit, StepscopeError
from stepscope.jobs.recover import recover_files
from stepscope.jobs.signing import examine_signed
from stepscope.jobs.verify import verify_files
from stepscope.recover.claims.verdict import ClaimVerdict, Verification

FAMILIES = (
    layers.COPIED,
    layers.SPLICED,
    omissions.DROPPED,
    omissions.CUT,
    omissions.REORDERED,
    names.RENAMED,
    names.BUSYWORK,
    numbers.EDITED,
    numbers.SCALED,
    numbers.TIMES,
    numbers.DEVICES,
    numbers.LARGE,
    claims.CLAIMS,
    claims.OTHER_FILES,
    reports.REPORTS,
    claims.INVENTED,
)
FORGERIES: dict[str, Forgery] = {one.name: one for family in FAMILIES for one in family.forgeries}
HONEST = "honest"

# rejected: the file or the claim is invalid, exit 2. Over a bound, or a crash, counts as a failure.
Outcome = Literal["refuted", "cannot tell", "consistent", "rejected", "crashed", "too slow", "too large"]
_VERDICTS: dict[ClaimVerdict, Outcome] = {
    ClaimVerdict.REFUTED: "refuted",
    ClaimVerdict.UNDECIDED: "cannot tell",
    ClaimVerdict.CONSISTENT: "consistent",
}
MOST_SECONDS = 60.0  # of CPU time
MOST_BYTES = 2 * 2**30


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What happened. `what` is a forgery's name, or `honest` and which true claim was made."""

    what: str
    file: str
    kind: str
    outcome: Outcome
    why: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0  # of the process, so no less than what Python and the libraries need


def find_untested(path: Path, claim: ClaimFields) -> Sequence[str] | None:
    """Return the fields of a true claim that this file cannot test, or None if the claim is refuted."""
    answer = _verify([path], claim)
    if answer.verdict is ClaimVerdict.REFUTED:
        return None
    if answer.verdict is ClaimVerdict.CONSISTENT:
        return ()
    return [name for name, one in answer.fields.items() if one.verdict == "not tested" and name in claim]


def _verify(paths: Sequence[Path], claim: ClaimFields) -> Verification:
    with TemporaryDirectory() as folder:
        written = Path(folder) / "claim.json"
        written.write_text(json.dumps(claim))
        return verify_files(paths, written).verification


def attack(name: str, path: Path) -> Trial | None:
    """Return what a forgery achieves on a file, or None if it cannot be made from it."""
    forgery, subject = FORGERIES[name], open_subject(path, find_untested)
    if subject.kind not in forgery.kinds:
        return None
    forged = forgery.forge(subject)
    return None if forged is None else judge(name, subject, forged, also_recover=forgery.exhausts)


def judge(what: str, subject: Subject, forged: Forged, *, also_recover: bool = False) -> Trial:
    _reset_peak()
    held = _peak_bytes()  # by the process for other purposes
    began = time.process_time()  # other programs do not count
    outcome, why = _decide(forged, also_recover=also_recover)
    seconds, peak = time.process_time() - began, _peak_bytes()
    if seconds > MOST_SECONDS:
        outcome = "too slow"
    elif peak - held > MOST_BYTES:
        outcome = "too large"
    return Trial(
        what=what,
        file=subject.name,
        kind=subject.kind,
        outcome=outcome,
        why=why[:300],
        seconds=round(seconds, 3),
        peak_bytes=peak,
    )


def _decide(forged: Forged, *, also_recover: bool) -> tuple[Outcome, str]:
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name, _ in forged.files]
        for path, (_, content) in zip(paths, forged.files, strict=True):
            path.write_bytes(content)
        try:
            if forged.report is not None:
                return _examine(Path(folder), paths, forged)
            if also_recover:
                recover_files(paths)
            answer = _verify(paths, forged.claim)
        except StepscopeError as error:
            return "rejected", str(error)
        except Exception:  # noqa: BLE001  whatever the command would exit with 70 for
            return "crashed", traceback.format_exc(limit=-3)
        return _VERDICTS[answer.verdict], answer.why


def _examine(folder: Path, evidence: Sequence[Path], forged: Forged) -> tuple[Outcome, str]:
    assert forged.report is not None
    path = folder / "report.json"
    path.write_bytes(forged.report.content)
    found = examine_signed(path, forged.report.public_key, evidence, nonce=forged.report.nonce)
    return ("consistent" if found.exit is Exit.OK else "refuted"), found.signature.verdict.value


# --- Honest controls


_CUTS = 12  # per end
_PREFIX, _SUFFIX = "prefix", "suffix"


def honest_claims(subject: Subject) -> dict[str, ClaimFields]:
    """Return true claims: complete, without what this file cannot test, each field alone, and all but one. The complete
    one is also made about files that end early or start late."""
    complete = full_claim(subject.truth)
    claims: dict[str, ClaimFields] = {"all fields": complete, "tested fields": subject.claim}
    claims["tied"] = {**subject.claim, "tied": subject.is_tied}
    if subject.truth["parameters"]:
        claims["parameters"] = {**subject.claim, "parameters": subject.truth["parameters"]}
    for name in complete:
        alone = {name: complete[name]}
        if name == "num_heads":
            alone |= {other: complete[other] for other in ("num_kv_heads", "d_head")}
        claims[f"only {name}"] = alone
        claims[f"without {name}"] = without(complete, [name])
    claims |= {f"{part}, {number}": complete for part in (_PREFIX, _SUFFIX) for number in range(1, _CUTS + 1)}
    return claims


def _keep(launches: Sequence[Launch], claim: str) -> Sequence[Launch]:
    """Return the part of a file that a true claim is about."""
    part, _, number = claim.partition(", ")
    if part not in (_PREFIX, _SUFFIX):
        return launches
    kept = len(launches) * int(number) // (_CUTS + 1)
    return launches[:kept] if part == _PREFIX else launches[-kept:]


def admit(claim: str, path: Path) -> Trial:
    """Return what `verify` says about a true claim on the genuine file, or on a part of it."""
    subject = open_subject(path, find_untested)
    document = subject.document.with_launches(_keep(subject.launches, claim))
    forged = Forged(files=((document.file, document.write()),), claim=honest_claims(subject)[claim])
    return judge(f"{HONEST}: {claim}", subject, forged)


# --- Memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _reset_peak() -> None:
    """Start a new measurement of the peak, where Linux allows it; otherwise it is that of the process so far."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")


def _peak_bytes() -> int:
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
