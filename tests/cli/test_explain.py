"""`stepscope explain` on files, as a person or a program runs it."""

import gzip
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import stepscope
from tests.unit.kineto_files import event, kernel, training_step, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.json.gz", training_step())


def document(folder: Path, *arguments: str) -> dict[str, Any]:
    done = stepscope(folder, "explain", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_document_has_its_schema_and_adds_up(tmp_path: Path, trace: Path) -> None:
    found = document(tmp_path, trace.name)
    assert found["schema"] == "stepscope.explain/2"
    total = 40_125 + 10_001 + 3_000 + 80_000 + 1_500 + 20_000 + 7_000
    assert found["gpu_time_ns"] == total
    for part in ("classes", "phases", "modules", "kernels", "launched"):
        assert sum(one["time_ns"] for one in found[part]) == total, part
    (device,) = found["devices"]
    swept = device["account"]
    assert sum(swept["classes"].values()) + swept["overlap_ns"] + swept["idle_ns"] == swept["wall_ns"] == 1_000_000
    assert {"class", "time_ns", "share", "count"} == set(found["classes"][0])
    assert {"class", "phase", "module", "layer"} == set(found["coverage"])
    for one in found["findings"]:
        assert {"code", "title", "evidence", "saving_ns", "fix"} <= set(one)


def test_the_page_fits_a_screen_and_names_the_next_command(tmp_path: Path, trace: Path) -> None:
    done = stepscope(tmp_path, "explain", trace.name)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) < 60
    assert "next: stepscope explain trace.json.gz --questions" in done.stderr


@pytest.mark.parametrize(
    "part", ["classes", "phases", "kernels", "modules", "layers", "ops", "loop", "steps", "streams"]
)
def test_every_part_prints_in_every_format(tmp_path: Path, trace: Path, part: str) -> None:
    done = stepscope(tmp_path, "explain", trace.name, "--table", part, "--format", "csv")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1


@pytest.mark.parametrize(
    "extra", [["--table", "roofline"], ["--table", "findings"], ["--table", "ranks"], ["--questions"]]
)
@pytest.mark.parametrize("format_", ["text", "md", "latex", "csv", "json"])
def test_findings_and_questions_print_in_every_format(
    tmp_path: Path, trace: Path, extra: list[str], format_: str
) -> None:
    done = stepscope(tmp_path, "explain", trace.name, *extra, "--format", format_)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_several_ranks_are_shown_side_by_side(tmp_path: Path, trace: Path) -> None:
    second = write_trace(tmp_path / "rank1.json", training_step(), properties=', "distributedInfo": {"rank": 1}')
    found = document(tmp_path, trace.name, second.name)
    assert [one["rank"] for one in found["files"]] == [None, 1]
    page = stepscope(tmp_path, "explain", trace.name, second.name).stdout
    assert "Ranks" in page
    twice = stepscope(tmp_path, "explain", second.name, second.name)
    assert twice.returncode == 2
    assert "these files are not the ranks of one run" in twice.stderr
    assert "rank1.json: rank 1 of None" not in twice.stderr


def test_a_saved_recording_explains_the_same(tmp_path: Path, trace: Path) -> None:
    first = document(tmp_path, trace.name, "--save", "kept")
    again = document(tmp_path, "kept")
    assert (first.pop("file"), again.pop("file")) == ("trace.json.gz", "kept")
    assert again == first
    assert stepscope(tmp_path, "explain", trace.name, "--save", "kept").returncode == 2


def test_perfetto_gets_a_trace_with_our_names_on_it(tmp_path: Path, trace: Path) -> None:
    assert stepscope(tmp_path, "explain", trace.name, "--perfetto", "out.json.gz").returncode == 0
    events = json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["traceEvents"]
    kernels = [one for one in events if one.get("args", {}).get("phase") == "backward"]
    assert {one["args"]["module"] for one in kernels} == {"Block_0.Linear_0"}
    assert any(one["name"] == "Block_0.Linear_0" and one["cat"] == "module" for one in events if one["ph"] == "X")
    assert stepscope(tmp_path, "explain", trace.name, "--perfetto", "out.json.gz").returncode == 0
    (tmp_path / "out.json.gz").write_bytes(gzip.compress(b'{"traceEvents":[]}'))
    assert stepscope(tmp_path, "explain", trace.name, "--perfetto", "out.json.gz").returncode == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[[[[",
        b"\x1f\x8b\x08broken",
        b"SQLite format 3\0" + b"\0" * 200,
        b"\x80\x04.",
        b"words",
        b"[" * 10**6,
    ],
    ids=["empty", "brace", "brackets", "gzip", "sqlite", "pickle", "words", "deep"],
)
def test_bad_input_exits_with_2_and_a_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    done = stepscope(tmp_path, "explain", "bad")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_missing_file_exits_with_2(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "explain", "gone.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "not found" in done.stderr


def test_foreign_sqlite_file_exits_with_2(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as database:
        database.execute("create table t (a)")
    database.close()
    assert stepscope(tmp_path, "explain", "x.sqlite").returncode == 2


def test_hostile_names_are_printed_as_text(tmp_path: Path) -> None:
    evil = "\x1b[31mred\x1b[0m [bold]x[/bold] <script>\u202e \x07" + "A" * 500_000
    events = [event("user_annotation", evil, "0.000", "50.000"), kernel(evil, "10.000", "5.000", 1)]
    write_trace(tmp_path / "evil.json", events)
    done = stepscope(tmp_path, "explain", "evil.json", "--table", "kernels", "--detail")
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout) & {"\x1b", "\x07", "\u202e"}
    assert len(done.stdout) < 100_000


def test_torch_is_not_needed(tmp_path: Path, trace: Path) -> None:
    """Nor imported: an analysis must run where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['stepscope', 'explain', 'trace.json.gz'];"
        "from stepscope.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr


def test_force_replaces_recordings_and_nothing_else(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("years of work")
    for target in ("precious", "precious/thesis.txt", trace.name):
        done = stepscope(tmp_path, "explain", trace.name, "--save", target, "--force")
        assert done.returncode == 2, target
    assert stepscope(tmp_path, "explain", trace.name, "--perfetto", trace.name, "--force").returncode == 2
    assert (tmp_path / "precious/thesis.txt").read_text() == "years of work"
    assert document(tmp_path, trace.name)["gpu_time_ns"]


def test_bounded_matches_the_whole_trace(tmp_path: Path, trace: Path) -> None:
    whole, bounded = document(tmp_path, trace.name), document(tmp_path, trace.name, "--bounded")
    for key in ("gpu_time_ns", "wall_ns", "classes", "phases", "modules", "kernels", "devices"):
        assert bounded[key] == whole[key], key
    os.mkfifo(tmp_path / "pipe")
    for arguments in (["gone"], ["."], ["pipe"], [trace.name, "--questions"], [trace.name, trace.name]):
        done = stepscope(tmp_path, "explain", *arguments, "--bounded")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), arguments


def test_work_after_the_marked_step_is_not_part_of_it(tmp_path: Path) -> None:
    """Of three steps' work one is marked."""
    events = [*training_step(), kernel("ampere_sgemm_128x64_nt", "2500.000", "323.252", 998)]
    write_trace(tmp_path / "late.json", events)
    done = stepscope(tmp_path, "explain", "late.json", "--table", "classes", "--format", "json")
    rows = {row["class"]: row for row in json.loads(done.stdout)["rows"]}
    known = 7_000 + 40_125 + 10_001 + 3_000 + 80_000 + 1_500 + 20_000
    total = sum(row["kernel_ms"] for row in rows.values() if row["kernel_ms"] is not None)
    assert total == pytest.approx(known / 1e6)
