"""Forgeries of signed reports. Each starts from a report that `stepscope verify --sign` would write."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from attack.forgery import COUNTERS, Family, redraw
from attack.subject import Forged, ForgedReport, Subject
from stepscope.jobs.signing import Signing, make_report
from stepscope.recover.reports.keys import new_key
from stepscope.recover.reports.signing import sign_report

REPORTS = Family("signed reports")
_NONCE = "5f0c21"


def _sign(subject: Subject, *, verdict: str = "consistent", nonce: str = _NONCE) -> tuple[Forged, bytes, str]:
    """Return the evidence, the signed report on it, and the public key."""
    forged = subject.forge(subject.launches)
    (name, content), *_ = forged.files
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / name).write_bytes(content)
        public = new_key(place / "signer.key")
        signing = Signing(key=place / "signer.key", nonce=nonce)
        report = make_report(signing, {"verdict": verdict, "claim": dict(forged.claim)}, [place / name])
        return forged, sign_report(report, signing.key), public.text


def _hand_in(forged: Forged, content: bytes, public_key: str) -> Forged:
    report = ForgedReport(content=content, public_key=public_key, nonce=_NONCE)
    return Forged(files=forged.files, claim=forged.claim, report=report)


@REPORTS.add("An old report answers a new nonce.", kinds=COUNTERS)
def report_of_another_nonce(subject: Subject) -> Forged:
    return _hand_in(*_sign(subject, nonce="a90b77"))


@REPORTS.add("The verdict in a signed report is edited.", kinds=COUNTERS)
def edited_report(subject: Subject) -> Forged:
    forged, content, public_key = _sign(subject, verdict="refuted")
    return _hand_in(forged, content.replace(b'"refuted"', b'"consistent"'), public_key)


@REPORTS.add("The nonce in a signed report is edited.", kinds=COUNTERS)
def edited_nonce(subject: Subject) -> Forged:
    forged, content, public_key = _sign(subject, nonce="a90b77")
    return _hand_in(forged, content.replace(b"a90b77", _NONCE.encode()), public_key)


@REPORTS.add("A signed report is written again with other whitespace.", kinds=COUNTERS)
def reformatted_report(subject: Subject) -> Forged:
    forged, content, public_key = _sign(subject)
    return _hand_in(forged, json.dumps(json.loads(content), indent=1).encode(), public_key)


@REPORTS.add("A key in a signed report appears twice, first with another value.", kinds=COUNTERS)
def repeated_key_in_report(subject: Subject) -> Forged:
    forged, content, public_key = _sign(subject, verdict="refuted")
    repeated = b'"verdict":"consistent","verdict":"refuted"'
    return _hand_in(forged, content.replace(b'"verdict":"refuted"', repeated), public_key)


@REPORTS.add("The evidence was changed after the report was signed.", kinds=COUNTERS)
def changed_evidence(subject: Subject) -> Forged:
    _, content, public_key = _sign(subject)
    return _hand_in(subject.forge(redraw(subject.launches, subject.name)), content, public_key)


@REPORTS.add("Somebody else signed the report.", kinds=COUNTERS)
def signed_by_another_key(subject: Subject) -> Forged:
    forged, content, _ = _sign(subject)
    return _hand_in(forged, content, _sign(subject)[2])


@REPORTS.add(
    "The signer signs a false verdict.",
    kinds=COUNTERS,
    undetectable="a signature says who vouches for a report; check the evidence yourself",
)
def signed_lie(subject: Subject) -> Forged:
    return _hand_in(*_sign(subject))
