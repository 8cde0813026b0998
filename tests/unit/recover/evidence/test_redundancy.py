"""Numbers that a file of Nsight Compute repeats, and what is missing from one."""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.recording.readers.formats import open_recording
from stepscope.recover.claims.verdict import ClaimVerdict, Verification
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.recording import KernelEvidence, gather
from tests.unit.recover.claimed_runs import true_claim
from tests.unit.recover.evidence_runs import COUNTERS, FOLDER, read_evidence

GPT2 = "gpt2_bf16_odd.csv.gz"
UP = 36
Rows = list[dict[str, str]]


def rewrite(file: str, folder: Path, change: Callable[[Rows], Rows]) -> KernelEvidence:
    """Return the evidence in a file of counters with other rows."""
    lines = gzip.decompress((FOLDER / file).read_bytes()).decode().splitlines()
    header, units, *rows = csv.reader(lines)
    changed = change([dict(zip(header, row, strict=True)) for row in rows])
    with (folder / "edited.csv").open("w", newline="") as out:
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows([header, units, *(row.values() for row in changed)])
    return gather(open_recording(folder / "edited.csv"))


def edit(file: str, folder: Path, **values: str) -> KernelEvidence:
    """Return the evidence with other values in one row; `__` in a name is a dot between statistic and metric."""

    def change(rows: Rows) -> Rows:
        rows[UP] |= {name.replace("_DOT_", "."): value for name, value in values.items()}
        return rows

    return rewrite(file, folder, change)


def check(evidence: KernelEvidence, file: str = GPT2, **changes: object) -> Verification:
    return verify([evidence], true_claim(file, **changes))


@pytest.mark.parametrize("file", COUNTERS)
def test_a_genuine_file_agrees_with_itself(file: str) -> None:
    assert not read_evidence(file).flaws
    assert not read_evidence(file).gaps


@pytest.mark.parametrize(
    "values",
    [
        {"sm__ops_path_tensor_src_bf16_dst_fp32_DOT_sum": "2,044,723,300"},
        {"lts__t_sectors_op_write_DOT_avg": "1.00"},
        {"dram__bytes_read_DOT_max": "32"},
        {"gpu__time_duration_DOT_avg": "12"},
        {"launch__grid_size": "7"},
        {"launch__block_dim_x": "1"},
        {"launch__thread_count": "32"},
        {"launch__occupancy_limit_registers": "9"},
        {"launch__shared_mem_per_block_dynamic": "64"},
        {"device__attribute_display_name": "NVIDIA A100-SXM4-80GB"},
        {"launch__sm_count": "108"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_an_edited_number_contradicts_the_others(values: dict[str, str], tmp_path: Path) -> None:
    evidence = edit(GPT2, tmp_path, **values)
    assert {flaw.row for flaw in evidence.flaws} == {UP}
    answer = check(evidence)
    assert answer.verdict is ClaimVerdict.REFUTED
    assert any(one.index == UP and one.what == "inconsistent evidence" for one in answer.refuted_by)


def test_statistics_in_different_units_are_not_compared(tmp_path: Path) -> None:
    lines = gzip.decompress((FOLDER / GPT2).read_bytes()).decode().splitlines()
    header, units, *rows = csv.reader(lines)
    place = header.index("dram__bytes_read.sum")
    units[place] = "Kbyte"
    for row in rows:
        row[place] = f"{float(row[place].replace(',', '')) / 1000:.2f}"
    with (tmp_path / "units.csv").open("w", newline="") as out:
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows([header, units, *rows])
    assert not gather(open_recording(tmp_path / "units.csv")).flaws


def test_rounded_counters_are_not_used(tmp_path: Path) -> None:
    """By default, Nsight Compute prints two decimals in the largest unit that fits."""
    lines = gzip.decompress((FOLDER / GPT2).read_bytes()).decode().splitlines()
    header, units, *rows = csv.reader(lines)
    places = [place for place, unit in enumerate(units) if unit == "byte"]
    for place in places:
        units[place] = "Kbyte"
        for row in rows:
            row[place] = f"{float(row[place].replace(',', '')) / 1000:.2f}" if row[place] else ""
    with (tmp_path / "rounded.csv").open("w", newline="") as out:
        csv.writer(out, quoting=csv.QUOTE_ALL).writerows([header, units, *rows])
    evidence = gather(open_recording(tmp_path / "rounded.csv"))
    assert not any("store_bytes" in one.counters for one in evidence.sightings)
    assert all("tensor_ops" in one.counters for one in evidence.sightings)
    assert any("--print-units base" in note for note in evidence.notes)
    assert check(evidence).verdict is not ClaimVerdict.REFUTED


def test_ids_of_rows_are_kept(tmp_path: Path) -> None:
    assert [one.launch for one in read_evidence(GPT2).sightings] == list(range(51, 100))
    twice = rewrite(GPT2, tmp_path, lambda rows: [*rows[:32], *rows[15:32], *rows[32:]])
    answer = check(twice, num_layers=3)
    assert answer.verdict is ClaimVerdict.REFUTED
    assert "a different number for every launch" in {one.expected for one in answer.refuted_by}


def _drop(rows: Rows) -> Rows:
    return [*rows[:20], *rows[21:]]


def _strip(rows: Rows, text: str = "") -> Rows:
    counted = ("sm__", "dram__", "lts__")
    return [
        {name: text if number >= 32 and name.startswith(counted) else value for name, value in row.items()}
        for number, row in enumerate(rows)
    ]


def _blur(rows: Rows) -> Rows:
    return _strip(rows, "n/a")


def _freeze(rows: Rows) -> Rows:
    return [{**row, **{name: "0" for name in row if name.startswith("gpu__time")}} for row in rows]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_drop, "kernels of the run are missing"),
        (_strip, "kernels lack counters that the others have"),
        (_blur, "kernels lack counters that the others have"),
        (_freeze, "kernels have no duration"),
    ],
    ids=["row", "counters", "text instead of counters", "durations"],
)
def test_what_is_missing_cannot_tell(change: Callable[[Rows], Rows], why: str, tmp_path: Path) -> None:
    answer = check(rewrite(GPT2, tmp_path, change))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert why in answer.why
