"""Keys and small reports for the signing tests."""

from pathlib import Path

from stepscope.recover.reports.keys import PublicKey, new_key
from stepscope.recover.reports.signed_report import Gpu, HashedFile, SignedReport, Statement
from stepscope.recover.reports.signing import sign_report

STATEMENT: Statement = {"verdict": "consistent", "layers": 12, "ratio": 0.1, "rest": [None, True, "naïve"]}


def make_report(**changes: object) -> SignedReport:
    fields: dict[str, object] = {
        "stepscope": "0.1.0",
        "signed_at": "2026-01-02T03:04:05Z",
        "nonce": "f00d",
        "gpus": (Gpu(name="NVIDIA H200", uuid=None, said_by="evidence"),),
        "evidence": (HashedFile(name="trace.json", bytes=3, sha256="ab" * 32),),
        "claim": None,
        "weights": None,
        "statement": dict(STATEMENT),
    }
    return SignedReport(**(fields | changes))  # type: ignore[arg-type]


def make_key(folder: Path, name: str = "a.key") -> tuple[Path, PublicKey]:
    return folder / name, new_key(folder / name)


def make_signed(folder: Path, **changes: object) -> tuple[bytes, PublicKey]:
    path, public = make_key(folder)
    return sign_report(make_report(**changes), path), public
