import re
from collections.abc import Iterator

import msgspec
import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recover.evidence.recording import operations_each
from stepscope.recover.facts import (
    Attention,
    Elements,
    Fact,
    Gather,
    Product,
    Rows,
    Sighting,
    Update,
    Window,
    find_window,
)
from stepscope.recover.families import FAMILIES, Platform, read_fact, read_facts
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence
from tests.unit.recover.families import (
    launches,
    test_concatenation,
    test_norms,
    test_optimizers,
    test_reductions,
    test_scans,
    test_softmax,
)
from tests.unit.recover.families.launches import seen

LAUNCHES: list[tuple[Sighting, type]] = [
    (seen(launches.vectorized(launches.ADD_BF16, 8), (375,)), Elements),
    (seen(test_concatenation.VECTORIZED, (375, 3)), Elements),
    (seen(test_norms.FORWARD.format(kind="float", rms="0"), (128,), (32, 4)), Rows),
    (seen(test_softmax.FORWARD, (600,), (1024,)), Rows),
    (seen(test_reductions.MEAN, (64,), (32, 16)), Rows),
    (seen(test_scans.SCAN, (1,), (256, 2)), Rows),
    (seen("void at::native::vectorized_gather_kernel<16, long>(char*)", (600,), (96,)), Gather),
    (seen(test_optimizers.ONE_LIST, (311,), (512,)), Update),
    (seen("triton_poi_fused_add_0", (100,)), Elements),
]


@pytest.mark.parametrize("launch", [launch for launch, _ in LAUNCHES])
def test_a_kernel_is_read_by_one_family(launch: Sighting) -> None:
    assert sum(bool(read(launch, Platform())) for read in FAMILIES.values()) == 1


@pytest.mark.parametrize(("launch", "kind"), LAUNCHES)
def test_every_family_is_reachable(launch: Sighting, kind: type) -> None:
    assert isinstance(read_fact(launch), kind)
    assert all(isinstance(choice, kind) for choice in read_facts(launch))


def test_the_version_reaches_elementwise_kernels() -> None:
    launch = seen(launches.vectorized(launches.ADD_FLOAT), (96,))
    assert read_fact(launch, Platform(recent=True)) == Elements(count=Window(95 * 1024 + 1, 96 * 1024))
    assert len(read_facts(launch)) == 2


@pytest.mark.parametrize("name", ["", "spin_kernel", "nvjet_sm90_tst"])
def test_unknown_kernels_have_no_facts(name: str) -> None:
    assert read_fact(seen(name, (100,))) is None
    assert read_facts(seen(name, (100,))) == ()


@pytest.mark.parametrize("launch", [launch for launch, _ in LAUNCHES])
@pytest.mark.parametrize("sizes", [{"grid": (0, 1, 1)}, {"block": (32, 0, 1)}, {"grid": (-1, 1, 1)}])
def test_an_empty_launch_has_no_facts(launch: Sighting, sizes: dict[str, tuple[int, int, int]]) -> None:
    empty = msgspec.structs.replace(launch, counters={"store_bytes": 4096}, **sizes)
    assert read_fact(empty) is None


HOSTILE_NUMBERS = ("0", "", "9" * 4400)  # Python does not read numbers with more than 4,300 digits


def hostile_launches() -> Iterator[Sighting]:
    """Yield the recorded GEMM and attention kernels with every number in their names replaced."""
    recorded = {one.name.name: one for file in (*COUNTERS, *TRACES) for one in read_evidence(file).sightings}
    for name, one in recorded.items():
        if one.name.kernel_class in ("GEMM", "attention"):
            for found in re.finditer(r"\d+", name):
                for number in HOSTILE_NUMBERS:
                    changed = decode(name[: found.start()] + number + name[found.end() :])
                    yield msgspec.structs.replace(one, name=changed)


def ask(fact: Fact) -> None:
    if isinstance(fact, Product):
        fact.admits(128, 64, 32, 1)
        find_window(fact, rows=128, columns=64)
    elif isinstance(fact, Attention):
        fact.admits(2, 4, 2, 128, 128, 64, causal=True)


def test_no_number_in_a_name_stops_a_reader() -> None:
    hostile = list(hostile_launches())
    assert len(hostile) > 1000
    for launch in hostile:
        operations_each(launch)
        for fact in read_facts(launch):
            ask(fact)
