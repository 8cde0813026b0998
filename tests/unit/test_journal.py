"""The journal shows which rank fell behind, and where."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.parallel.journal import Journal, blame, find_culprit, read_journals


def _journals(folder: Path, *collectives: int) -> list[Journal]:
    journals = [Journal(folder, rank) for rank in range(len(collectives))]
    for journal, count in zip(journals, collectives, strict=True):
        for number in range(count):
            journal.begin(f"all-reduce of bucket {number}")
            journal.end()
    return journals


def test_the_rank_with_fewest_collectives_is_blamed(tmp_path: Path) -> None:
    _journals(tmp_path, 5, 3, 5)
    entries = read_journals(tmp_path)
    assert [(entry.rank, entry.issued, entry.finished) for entry in entries] == [(0, 5, 5), (1, 3, 3), (2, 5, 5)]
    assert blame(entries) == "rank 1 fell behind, after collective 3, all-reduce of bucket 2"


def test_unfinished_collective_is_distinguished_from_a_finished_one(tmp_path: Path) -> None:
    first, second = _journals(tmp_path, 2, 1)
    first.begin("all-gather of layer 7")
    second.begin("all-gather of layer 6")
    assert blame(read_journals(tmp_path)) == "rank 1 fell behind, in collective 2, all-gather of layer 6"


def test_a_rank_that_raised_comes_before_one_that_waits(tmp_path: Path) -> None:
    _, second, third = _journals(tmp_path, 1, 4, 4)
    third.leave("ValueError: no")
    second.leave("CollectiveError: rank 2 raised")
    assert "rank 2 raised ValueError: no, after collective 4" in blame(read_journals(tmp_path))


def test_rank_without_a_process_is_reported_as_dead(tmp_path: Path) -> None:
    _journals(tmp_path, 4)
    code = "import sys; from pathlib import Path; from stepscope.parallel.journal import Journal\n"
    code += "journal = Journal(Path(sys.argv[1]), 1)\nfor _ in range(6): journal.begin('broadcast of x')\n"
    subprocess.run([sys.executable, "-c", code, os.fspath(tmp_path)], check=True)
    assert blame(read_journals(tmp_path)) == "rank 1 died, in collective 6, broadcast of x"


def test_ranks_at_the_same_point_are_all_listed(tmp_path: Path) -> None:
    _journals(tmp_path, 2, 2)
    entries = read_journals(tmp_path)
    assert find_culprit(entries) is None
    assert blame(entries).startswith("no single rank is behind: rank 0 after collective 2")


@pytest.mark.parametrize("name", ["x" * 5000, "größe " * 200, ""])
def test_names_of_any_length_fit(tmp_path: Path, name: str) -> None:
    Journal(tmp_path, 0).begin(name)
    (entry,) = read_journals(tmp_path)
    assert name.startswith(entry.collective.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(entry.collective) >= min(len(name), 300)


def test_journal_without_a_directory_works() -> None:
    journal = Journal(None, 3)
    journal.begin("barrier start")
    (entry,) = journal.entries()
    assert (entry.rank, entry.last_collective) == (3, "in collective 1, barrier start")


def test_truncated_journal_is_read_as_far_as_possible(tmp_path: Path) -> None:
    _journals(tmp_path, 1)
    (tmp_path / "1.journal").write_bytes(b"")
    assert [entry.issued for entry in read_journals(tmp_path)] == [1, 0]


def test_rank_that_failed_because_of_another_is_not_blamed(tmp_path: Path) -> None:
    first, _, third = _journals(tmp_path, 4, 3, 4)
    third.begin("all-gather of x")
    first.leave("CollectiveError: rank 0 could not finish")
    assert blame(read_journals(tmp_path)).startswith("rank 1 fell behind, after collective 3")
