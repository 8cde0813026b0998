"""What verbs print: one JSON document, CSV without formulas, and no terminal control sequences."""

import csv
import gzip
import io
import json
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from stepscope.cli import main as cli
from stepscope.recording.rows.bench import Row
from stepscope.render.formats import Format, visible
from tests.unit.attention_rows import attend
from tests.unit.comm_rows import communicate
from tests.unit.explain.test_memory_grid import weigh
from tests.unit.kineto_files import kernel, launch, training_step, write_trace
from tests.unit.recover.claimed_runs import claim_fields
from tests.unit.rows import row
from tests.unit.snapshot_files import Model, write

EVIDENCE = Path(__file__).parents[2] / "fixtures/evidence/gpt2_bf16_odd.forward.json.gz"
HOSTILE = "=HYPERLINK(1)\x1b[31m\x07\u202egpj.exe\u2066\x9b\u200b\ufeff\U000e0041"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of every kind."""
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "a.json", training_step())
    hostile = [launch("1700.000", "5.000", 7), kernel(HOSTILE, "1800.000", "90.000", 7)]
    write_trace(tmp_path / "b.json", [*training_step(), *hostile])
    model = Model()
    for size in (512, 3 << 20):
        model.malloc(size)
    write(model.snapshot(), tmp_path / "memory.pickle")
    rows: dict[str, Sequence[Row]] = {
        "bench": [row(), row("oom", context=2048)],
        "attention": [attend(), attend("naive", "error", reason=HOSTILE)],
        "comm": [communicate(), communicate("broadcast")],
        "peaks": [weigh(parameters=5), weigh(parameters=3, precision="bf16")],
    }
    for name, of_kind in rows.items():
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in of_kind))
    (tmp_path / "run.json").write_bytes(gzip.decompress(EVIDENCE.read_bytes()))
    claimed = {name: value for name, value in claim_fields("gpt2_bf16_odd.forward").items() if value is not None}
    (tmp_path / "claim.json").write_text(json.dumps(claimed | {"num_layers": 7}))
    return tmp_path


VIEWS = (
    "explain a.json --questions",
    "explain a.json --questions --detail",
    "explain a.json b.json --questions --detail",
    "explain b.json --table kernels",
    "explain a.json b.json --table kernels",
    "explain a.json b.json --table ranks",
    "explain memory.pickle --questions",
    "explain memory.pickle --questions --detail",
    "explain memory.pickle --table categories",
    "compare a.json b.json --by kernel",
    "attention --from attention.jsonl",
    "attention --from attention.jsonl --table memory",
    "bench --from bench.jsonl",
    "bench --list",
    "comm --from comm.jsonl",
    "memory --from peaks.jsonl",
    "recover run.json",
    "verify run.json --claim claim.json",
    "rule",
    "kernel ampere_sgemm_128x64_tn",
)
PAGES = ("explain b.json", "explain a.json b.json", "explain memory.pickle")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["stepscope", *command.split()])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code in (0, 1, 3), said.err
    return said.out, said.err


@pytest.mark.parametrize("command", [*VIEWS, *PAGES])
def test_json_is_one_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text, _ = run(monkeypatch, capsys, f"{command} --format json")
    assert json.loads(text)
    assert is_harmless(text)


@pytest.mark.parametrize("command", VIEWS)
def test_no_cell_of_csv_is_a_formula(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    text, _ = run(monkeypatch, capsys, f"{command} --format csv")
    assert is_harmless(text)
    tables = [list(csv.reader(io.StringIO(part))) for part in text.split("\n\n")]
    for table in tables:
        assert len({len(cells) for cells in table if cells}) == 1, "one header to a table, and an empty line in between"
        for cell in (cell for cells in table for cell in cells):
            assert not cell.startswith(("=", "+", "@", "\t", "\r"))


@pytest.mark.parametrize("format_", [Format.TEXT, Format.MD, Format.LATEX])
def test_names_from_files_are_escaped_for_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], format_: Format
) -> None:
    for command in ("explain b.json --table kernels", "attention --from attention.jsonl"):
        assert all(map(is_harmless, run(monkeypatch, capsys, f"{command} --format {format_.value}")))


def test_several_tables_are_an_array_and_one_is_an_object(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = run(monkeypatch, capsys, "explain a.json --table kernels --format json")
    two, _ = run(monkeypatch, capsys, "explain a.json b.json --table kernels --format json")
    assert json.loads(two)[0]["rows"] == json.loads(one)["rows"]
    assert len(json.loads(two)) == 2


def test_a_file_name_in_an_error_is_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["stepscope", "explain", f"{HOSTILE}.json"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capsys.readouterr().err
    assert is_harmless(said)
    assert "\\u001b[31m" in said


def test_escaped_text_reads_back_unchanged() -> None:
    assert json.loads(visible(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE
    plain = "a\tb\n– é 木 \N{NO-BREAK SPACE}½ 🙂"
    assert visible(plain) == plain


def is_harmless(text: str) -> bool:
    return not any(unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp") for one in text if one not in "\n\t")
