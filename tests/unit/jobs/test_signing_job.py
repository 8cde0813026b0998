"""The contents of a report, and the check of a signed one."""

from pathlib import Path

import pytest
import typer

from stepscope import __version__
from stepscope.cli.signing import print_signed
from stepscope.errors import Exit, StepscopeError
from stepscope.jobs import signing as job
from stepscope.jobs.signing import (
    Signing,
    check_flags,
    examination_table,
    examine_signed,
    make_report,
    read_flags,
    sign_to_file,
)
from stepscope.recover.reports.keys import new_key
from stepscope.recover.reports.signed_report import hash_files
from stepscope.recover.reports.signing import SignatureVerdict
from stepscope.render.formats import Format

UUID = "GPU-00000000-1111-2222-3333-444444444444"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(job, "gpus_of_this_machine", lambda: [("NVIDIA H200", UUID), ("NVIDIA T4", UUID)])
    new_key(tmp_path / "a.key")
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "claim.toml").write_text("num_layers = 12")
    return tmp_path


def sign(folder: Path, *, nonce: str | None = None) -> tuple[Path, Path]:
    signing = Signing(key=folder / "a.key", nonce=nonce)
    statement = {"verdict": "consistent", "kernels": [1, 2]}
    report = make_report(signing, statement, [folder / "trace.json"], claim=folder / "claim.toml")
    sign_to_file(report, signing, folder / "report.json")
    return folder / "report.json", folder / "a.key.pub"


def found(table_of: job.Examination) -> dict[str, str]:
    return {str(what): str(said) for what, said in examination_table(table_of).rows}


def test_a_report_has_the_files_and_the_time(folder: Path) -> None:
    signing = Signing(key=folder / "a.key", nonce="n", weights=folder / "trace.json")
    report = make_report(signing, {"a": 1}, [folder / "trace.json"], claim=folder / "claim.toml", device="NVIDIA H200")
    assert (report.stepscope, report.nonce, report.statement) == (__version__, "n", {"a": 1})
    assert report.signed_at.endswith("Z")
    assert report.claim is not None
    assert report.weights is not None
    assert report.claim.name == "claim.toml"
    assert report.weights.sha256 == report.evidence[0].sha256
    said = [(gpu.name, gpu.uuid, gpu.said_by) for gpu in report.gpus]
    assert said == [("NVIDIA H200", None, "evidence"), ("NVIDIA H200", UUID, "signing machine")]


def test_no_nonce_is_generated(folder: Path) -> None:
    assert make_report(Signing(key=folder / "a.key"), {}, []).nonce is None


def test_a_given_uuid_is_attributed_to_the_signer(folder: Path) -> None:
    report = make_report(Signing(key=folder / "a.key", gpu_uuid=UUID), {}, [])
    assert [(gpu.uuid, gpu.said_by) for gpu in report.gpus] == [(UUID, "signer")]


def test_gpus_of_this_machine_must_match_the_evidence(folder: Path) -> None:
    report = make_report(Signing(key=folder / "a.key"), {}, [], device="NVIDIA B200")
    assert [(gpu.name, gpu.uuid) for gpu in report.gpus] == [("NVIDIA B200", None)]


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert job.gpus_of_this_machine() == []


@pytest.mark.parametrize("flags", [{"nonce": ""}, {"nonce": "a b"}, {"nonce": "é"}, {"gpu_uuid": "0"}])
def test_invalid_flags_are_rejected_before_any_work(flags: dict[str, str], folder: Path) -> None:
    with pytest.raises(StepscopeError):
        check_flags(Signing(key=folder / "a.key", **flags))  # type: ignore[arg-type]
    check_flags(Signing(key=folder / "a.key", nonce="0aZ-_=", gpu_uuid=UUID))


def test_an_unusable_key_is_rejected_before_any_work(folder: Path) -> None:
    (folder / "a.key").chmod(0o644)
    with pytest.raises(StepscopeError, match="other users can read"):
        check_flags(Signing(key=folder / "a.key"))


def test_a_good_report_passes_and_shows_its_limits(folder: Path) -> None:
    report, key = sign(folder)
    examination = examine_signed(report, key, [folder / "trace.json"])
    assert examination.exit is Exit.OK
    assert found(examination)["signature"] == "good"
    assert "may be old" in found(examination)["nonce"]
    assert found(examination)["files checked"] == "identical to the signed ones"
    assert found(examination)["verdict"] == "consistent"
    assert found(examination)["more"] == "1 more field in the file"
    assert "not that it is true" in examination_table(examination).notes[0]


def test_a_changed_report_fails_and_is_not_shown(folder: Path) -> None:
    report, key = sign(folder)
    report.write_bytes(report.read_bytes().replace(b"consistent", b"refuted!!!"))
    examination = examine_signed(report, key, [folder / "trace.json"])
    assert examination.exit is Exit.GATE_FAILED
    assert found(examination) == {"signature": "changed"}


def test_another_signer_is_named_by_fingerprint(folder: Path) -> None:
    report, _ = sign(folder)
    other = new_key(folder / "b.key")
    examination = examine_signed(report, other.text)
    assert examination.signature.verdict is SignatureVerdict.OTHER_KEY
    assert examination.exit is Exit.GATE_FAILED
    assert set(found(examination)) == {"signature", "signed by"}
    assert found(examination)["signed by"] != other.fingerprint


def test_changed_evidence_fails(folder: Path) -> None:
    report, key = sign(folder)
    (folder / "trace.json").write_text("[]")
    examination = examine_signed(report, key, [folder / "trace.json"])
    assert examination.exit is Exit.GATE_FAILED
    assert found(examination)["file trace.json"] == "changed"
    assert "files checked" not in found(examination)


@pytest.mark.parametrize("nonce", [None, "yesterday"])
def test_a_different_nonce_fails(nonce: str | None, folder: Path) -> None:
    report, key = sign(folder, nonce=nonce)
    assert examine_signed(report, key, nonce=nonce).exit is Exit.OK
    examination = examine_signed(report, key, nonce="today")
    assert examination.exit is Exit.GATE_FAILED
    assert "different request" in found(examination)["expected nonce"]


def test_a_bad_report_exits_with_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, key = sign(folder)
    print_signed(report, str(key), [], nonce=None, format_=Format.TEXT)
    assert "good" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        print_signed(report, str(key), [], nonce="today", format_=Format.TEXT)
    report.write_bytes(report.read_bytes() + b"\n")
    with pytest.raises(typer.Exit) as left:
        print_signed(report, str(key), [], nonce=None, format_=Format.TEXT)
    assert left.value.exit_code == Exit.GATE_FAILED


@pytest.mark.parametrize("format_", list(Format))
def test_control_sequences_in_a_report_are_not_printed(
    format_: Format, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "\x1b[2Jtrace").write_text("{}")
    signing = Signing(key=folder / "a.key")
    report = make_report(signing, {"verdict": "\x1b[31m", "\x9b2J": 1}, [folder / "\x1b[2Jtrace"])
    sign_to_file(report, signing, folder / "odd.json")
    print_signed(folder / "odd.json", str(folder / "a.key.pub"), [], nonce=None, format_=format_)
    shown = capsys.readouterr().out
    assert "trace" in shown
    assert not {"\x1b", "\x9b"} & set(shown)


@pytest.mark.parametrize("place", ["lab.key", "lab.key.pub", "evidence.csv", "weights.bin"])
def test_a_report_never_overwrites_its_inputs(place: str, tmp_path: Path) -> None:
    new_key(tmp_path / "lab.key")
    for name in ("evidence.csv", "weights.bin"):
        (tmp_path / name).write_text("precious")
    before = (tmp_path / place).read_bytes()
    with pytest.raises(StepscopeError, match="own input"):
        read_flags(
            tmp_path / "lab.key",
            nonce=None,
            weights=tmp_path / "weights.bin",
            gpu_uuid=None,
            out=tmp_path / place,
            force=True,
            inputs=[tmp_path / "evidence.csv"],
        )
    assert (tmp_path / place).read_bytes() == before


def test_an_existing_report_is_rejected_before_reading(tmp_path: Path) -> None:
    new_key(tmp_path / "lab.key")
    (tmp_path / "report.json").write_text("old")
    with pytest.raises(StepscopeError, match="` already exists"):
        read_flags(tmp_path / "lab.key", nonce=None, weights=None, gpu_uuid=None, out=tmp_path / "report.json")


def test_evidence_that_changes_while_reading_is_rejected(tmp_path: Path) -> None:
    new_key(tmp_path / "lab.key")
    evidence = tmp_path / "evidence.csv"
    evidence.write_text("one")
    seen = hash_files([evidence])
    evidence.write_text("two")
    with pytest.raises(StepscopeError, match="changed while"):
        make_report(Signing(key=tmp_path / "lab.key"), {}, [evidence], seen=seen)
