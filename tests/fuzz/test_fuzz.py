"""A few hundred damaged inputs of every kind: each gives a result or a clear error. `make fuzz` runs many more."""

import random
from pathlib import Path

import pytest

from tests.fuzz import fuzzer
from tests.fuzz.faulty_worker import CLASSES
from tests.fuzz.fuzzer import FINE, Summary, fuzz
from tests.fuzz.seeds import build_seeds
from tests.fuzz.worker import write_input

COUNT, SEED = 400, 17


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return fuzz(count=COUNT, seed=SEED, kept=tmp_path_factory.mktemp("failed"))


@pytest.mark.parametrize("name", [seed.name for seed in build_seeds()])
def test_no_damaged_input_breaks_a_reader(summary: Summary, name: str) -> None:
    assert sum(summary.by_input[name].values()) > 0
    assert [case for case in summary.failures if case.seed == name] == []


def test_most_kinds_of_input_are_both_read_and_rejected(summary: Summary) -> None:
    """Otherwise the damage would be too coarse or too fine to test anything."""
    assert all(summary.classes[name] > COUNT / 5 for name in FINE)


def test_the_same_number_makes_the_same_input(tmp_path: Path) -> None:
    seeds = [seed for seed in build_seeds() if seed.kind != "signed"]  # keys are random
    for number in range(40):
        made = [write_input(tmp_path / f"{number}-{turn}", seeds, {}, random.Random(number)) for turn in "ab"]
        a, b = (sorted((tmp_path / f"{number}-{turn}").rglob("*")) for turn in "ab")
        assert made[0] == made[1]
        assert [path.read_bytes() for path in a if path.is_file()] == [
            path.read_bytes() for path in b if path.is_file()
        ]


def test_every_kind_of_failure_is_recognized_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzer, "BUSY_S", 5.0)
    monkeypatch.setattr(fuzzer, "MEMORY_BYTES", 1 << 30)
    found = fuzz(count=len(CLASSES), seed=1, only="claim", worker="tests.fuzz.faulty_worker", kept=tmp_path)
    assert found.classes == {name: CLASSES.count(name) for name in CLASSES}
    assert [case.class_ for case in found.failures] == [name for name in CLASSES if name not in FINE]
    assert len(list(tmp_path.rglob("command.sh"))) == len(found.failures)
    assert all((path.parent / "claim.toml").exists() for path in tmp_path.rglob("command.sh"))
