"""Sign a result, or check a signed one, for `recover` and `verify`.

The GPU in a report comes from the evidence (a trace names its device), from the driver of the signing machine, or from
the signer. None of these is proof, so the report records the source of each, and leaves out a GPU without a source. A
nonce is never generated here: one that the signer picks does not show when the report was made.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stepscope import __version__
from stepscope.errors import Exit, StepscopeError
from stepscope.findings import Column, Table
from stepscope.recover.reports.challenge import MAX_CONTEXT, Challenge, derive_challenge
from stepscope.recover.reports.keys import load_private_key, public_path
from stepscope.recover.reports.signed_report import (
    Gpu,
    HashedFile,
    SignedReport,
    Statement,
    check_nonce,
    check_uuid,
    hash_file,
    hash_files,
    hash_weights,
)
from stepscope.recover.reports.signing import (
    Mismatch,
    SignatureCheck,
    SignatureVerdict,
    check_evidence,
    check_signed,
    write_signed,
)
from stepscope.units import count_noun

_LIMITS = (
    "a signature proves who signed the report and that it is unchanged, not that it is true or when it was made",
    "counters show the shape of the work, not the weights, the data or whether it was useful: docs/trust.md",
)
_LONGEST = 200


class Signing(msgspec.Struct, frozen=True, kw_only=True):
    """The signing flags of a verb: `--sign`, `--nonce`, `--weights`, `--gpu-uuid`."""

    key: Path
    nonce: str | None = None
    weights: Path | None = None
    gpu_uuid: str | None = None


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a signed report. `expected_nonce` is the nonce the verifier sent, or None; `unanswered`
    says why the report does not answer the challenge that follows from it."""

    signature: SignatureCheck
    mismatches: tuple[Mismatch, ...] = ()
    rehashed: int = 0  # how many files and directories were hashed again
    expected_nonce: str | None = None
    unanswered: str = ""

    @property
    def is_replayed(self) -> bool:
        report = self.signature.report
        return self.expected_nonce is not None and report is not None and report.nonce != self.expected_nonce

    @property
    def exit(self) -> Exit:
        is_good = self.signature.verdict is SignatureVerdict.GOOD and not self.mismatches and not self.is_replayed
        return Exit.OK if is_good and not self.unanswered else Exit.GATE_FAILED


def require_public_key(public_key: str | None, given: Mapping[str, object]) -> str:
    """Return the key that checks a signed report. Raises StepscopeError without one, and for flags of other tasks."""
    if public_key is None:
        raise StepscopeError(
            "`--signed` requires `--public-key`",
            detail="use a key that you received separately from the report",
            hint="add --public-key lab.key.pub",
        )
    for flag, value in given.items():
        if value is not None:
            raise StepscopeError(
                f"`{flag}` cannot be used with `--signed`", detail="the report already contains its result"
            )
    return public_key


def read_flags(
    key: Path | None,
    *,
    nonce: str | None,
    weights: Path | None,
    gpu_uuid: str | None,
    out: Path | None,
    force: bool = False,
    inputs: Sequence[Path] = (),
) -> Signing | None:
    """Return the signing flags, or None without a key. Raises StepscopeError, before any file is read, for a flag that
    requires a key and for a report that would overwrite one of its inputs."""
    if key is not None:
        signing = Signing(key=key, nonce=nonce, weights=weights, gpu_uuid=gpu_uuid)
        check_flags(signing)
        _check_place(
            out or Path("report.json"), [key, public_path(key), *inputs, *([weights] if weights else [])], force=force
        )
        return signing
    given = {"--nonce": nonce, "--weights": weights, "--gpu-uuid": gpu_uuid, "--out": out, "--force": force or None}
    for flag, value in given.items():
        if value is not None:
            raise StepscopeError(f"`{flag}` requires `--sign`", hint="run stepscope key new, then add --sign KEY")
    return None


def read_challenge(nonce: str | None, *, max_tokens: int | None, max_context: int | None) -> Challenge | None:
    """Return the task that follows from a nonce and limits, or None without limits."""
    if max_tokens is None:
        if max_context is not None:
            raise StepscopeError("`--max-context` requires `--max-tokens`", hint="add --max-tokens 8192")
        return None
    if nonce is None:
        raise StepscopeError(
            "`--max-tokens` requires `--nonce`",
            detail="batch and context follow from a nonce that the verifier chose",
            hint="the verifier can create one with openssl rand -hex 16",
        )
    longest = MAX_CONTEXT if max_context is None else max_context
    return derive_challenge(nonce, max_tokens=max_tokens, max_context=longest)


def _check_place(report: Path, inputs: Sequence[Path], *, force: bool) -> None:
    if any(one.exists() and report.exists() and one.samefile(report) for one in inputs):
        raise StepscopeError(f"the report would overwrite its own input: `{report}`", hint="--out report.json")
    if report.is_dir():
        raise StepscopeError(f"`{report}` is a directory, expected a file", hint=f"--out {report / 'report.json'}")
    if report.exists() and not force:
        raise StepscopeError(f"`{report}` already exists", hint="add --force, or choose another file with --out")


def check_flags(signing: Signing) -> None:
    """Check the flags and the key before reading evidence, which can take a minute."""
    if signing.nonce is not None:
        check_nonce(signing.nonce)
    if signing.gpu_uuid is not None:
        check_uuid(signing.gpu_uuid)
    load_private_key(signing.key)


def make_report(
    signing: Signing,
    statement: Statement,
    evidence: Sequence[Path],
    *,
    claim: Path | None = None,
    device: str = "",
    seen: Sequence[HashedFile] = (),
) -> SignedReport:
    """Return the unsigned report on `statement`. `device` is the GPU's name according to the evidence. `seen` are the
    hashes taken before the evidence was read: raises StepscopeError if a file changed since."""
    check_flags(signing)
    hashed = hash_files(evidence)
    if seen and tuple(seen) != tuple(hashed):
        raise StepscopeError(
            "the evidence changed while it was being read", hint="run it again when nothing is writing to these files"
        )
    return SignedReport(
        stepscope=__version__,
        signed_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        nonce=signing.nonce,
        gpus=_gpus(device, signing.gpu_uuid),
        evidence=hashed,
        claim=None if claim is None else hash_file(claim),
        weights=None if signing.weights is None else hash_weights(signing.weights),
        statement=dict(statement),
    )


def sign_to_file(report: SignedReport, signing: Signing, path: Path, *, force: bool = False) -> None:
    write_signed(path, report, signing.key, force=force)


def examine_signed(
    path: Path,
    public_key: Path | str,
    evidence: Sequence[Path] = (),
    *,
    nonce: str | None = None,
    challenge: Challenge | None = None,
) -> Examination:
    """Check the signature, the nonce, whether the run was the one that `challenge` asks for, and whether `evidence` are
    the files that were signed."""
    signature = check_signed(path, public_key)
    mismatches = [] if signature.report is None else check_evidence(signature.report, evidence)
    report = signature.report
    return Examination(
        signature=signature,
        mismatches=tuple(mismatches),
        rehashed=0 if signature.report is None else len(evidence),
        expected_nonce=nonce,
        unanswered=challenge.find_problem(report.statement) if challenge is not None and report is not None else "",
    )


def examination_table(examination: Examination) -> Table:
    signer, report = examination.signature.signer, examination.signature.report
    rows = [("signature", examination.signature.verdict.value)]
    if signer is not None:
        rows.append(("signed by", signer.fingerprint))
    if report is not None:
        rows += _describe(report)
        rows += _summarise(report.statement)
        rows += [(f"file {one.name}", one.problem) for one in examination.mismatches]
        if examination.rehashed and not examination.mismatches:
            rows.append(("files checked", "identical to the signed ones"))
        if examination.is_replayed:
            rows.append(("expected nonce", f"{examination.expected_nonce}: this report answers a different request"))
        if examination.unanswered:
            rows.append(("challenge", examination.unanswered))
    return Table(
        title="Signed report",
        columns=(Column(key="what", label="item"), Column(key="found", label="value")),
        rows=tuple(rows),
        notes=_LIMITS if report is not None else (),
    )


def _describe(report: SignedReport) -> list[tuple[str, str]]:
    rows = [("signed at", f"{report.signed_at} (signer's clock)"), ("stepscope", report.stepscope)]
    rows.append(("nonce", report.nonce or "none: the report may be old"))
    rows += [("GPU", f"{_name_gpu(gpu)} (according to the {gpu.said_by})") for gpu in report.gpus]
    if not any(gpu.uuid for gpu in report.gpus):
        rows.append(("GPU UUID", "unknown"))
    rows += [("evidence", f"{file.name}, {file.bytes:,} bytes, sha256 {file.sha256}") for file in report.evidence]
    if report.claim is not None:
        rows.append(("claim", f"{report.claim.name}, sha256 {report.claim.sha256}"))
    if report.weights is not None:
        rows.append(
            ("weights", f"{report.weights.name}, {report.weights.bytes:,} bytes, sha256 {report.weights.sha256}")
        )
    return rows


def _summarise(statement: Statement) -> list[tuple[str, str]]:
    """Return the scalar values of the statement. Tables and lists are only in the file."""
    plain = {key: value for key, value in statement.items() if isinstance(value, str | int | float)}
    rows = [(key, str(value)[:_LONGEST]) for key, value in plain.items()]
    more = len(statement) - len(plain)
    return [*rows, ("more", f"{count_noun(more, 'more field', 'more fields')} in the file")] if more else rows


def _name_gpu(gpu: Gpu) -> str:
    return " ".join(part for part in (gpu.name, gpu.uuid) if part) or "unnamed"


def _gpus(device: str, uuid: str | None) -> tuple[Gpu, ...]:
    """Return the evidence's GPU with `uuid`, or without one with those GPUs of this machine that have its name."""
    from_evidence = (Gpu(name=device, uuid=None, said_by="evidence"),) if device else ()
    if uuid is not None:
        return (*from_evidence, Gpu(name=None, uuid=uuid, said_by="signer"))
    here = [Gpu(name=name, uuid=found, said_by="signing machine") for name, found in gpus_of_this_machine()]
    return (*from_evidence, *(gpu for gpu in here if not device or gpu.name == device))


def gpus_of_this_machine() -> list[tuple[str, str]]:
    """Return names and UUIDs from the NVIDIA driver, or an empty list without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(str(pynvml.nvmlDeviceGetName(one)), str(pynvml.nvmlDeviceGetUUID(one))) for one in handles]
    except pynvml.NVMLError:
        return []
