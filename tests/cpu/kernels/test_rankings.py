"""The measured order of backends: the table that the package has, its lookup, and how a benchmark writes it."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope.kernels.attention import backends, rankings
from stepscope.kernels.attention.rankings import MeasuredShape, Ranking

BENCH = Path(__file__).parents[3] / "bench"


def shape(length: int, *, programs: int = 64, group: int = 1, **other: Any) -> MeasuredShape:
    values: dict[str, Any] = {"direction": "forward", "causal": True, "head_dim": 64, "value_dim": 64} | other
    return MeasuredShape(length=length, programs=programs, group=group, **values)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
        shape(512): "a",
        shape(4096): "b",
        shape(4096, programs=1024): "c",
        shape(4096, group=4): "d",
        shape(4096, group=16): "e",
        shape(4096, causal=False): "f",
        shape(4096, head_dim=192, value_dim=128): "g",
    }
    found = tuple(Ranking(shape=one, backends=(name,)) for one, name in measured.items())
    monkeypatch.setattr(rankings, "read", lambda: {"sm_90": found})
    rankings.rank.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (shape(1400), "a"),  # below the geometric mean of 512 and 4096
        (shape(2048), "b"),
        (shape(1 << 20), "b"),
        (shape(4096, programs=250), "b"),
        (shape(4096, programs=260), "c"),
        (shape(3000, group=2), "d"),
        (shape(4096, group=9), "e"),
        (shape(3000, causal=False), "f"),
        (shape(3000, head_dim=192, value_dim=128), "g"),
    ],
    ids=str,
)
def test_the_nearest_shape_of_the_same_kind_decides(wanted: MeasuredShape, expected: str) -> None:
    assert rankings.rank("sm_90", wanted) == (expected,)
    assert rankings.rank("sm_100", wanted) == ()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "short", [shape(16), shape(2047), shape(4096, programs=15), shape(1000, causal=False)], ids=str
)
def test_a_call_with_far_less_work_takes_the_default_order(short: MeasuredShape) -> None:
    assert rankings.rank("sm_90", short) == ()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("other", [{"direction": "backward"}, {"head_dim": 128}, {"value_dim": 128}], ids=str)
def test_nothing_is_known_about_other_kinds(other: dict[str, Any]) -> None:
    assert rankings.rank("sm_90", shape(4096, **other)) == ()


def test_the_table_of_the_package_names_backends_for_both_passes() -> None:
    found = rankings.read()["sm_90"]
    assert {one.shape.direction for one in found} == {"forward", "backward"}
    assert {name for one in found for name in one.backends} <= set(backends.KERNELS)
    assert len({one.shape for one in found}) == len(found)


# --- The benchmark ---


@pytest.fixture
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_speed", BENCH / "attention_speed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(ms: dict[str, list[float]], **other: Any) -> dict[str, Any]:
    plain = {
        "benchmark": "attention_speed",
        "architecture": "sm_90",
        "direction": "forward",
        "dtype": "bf16",
        "causal": True,
        "batch": 4,
        "heads": 32,
        "groups": 8,
        "length": 2048,
        "head_dim": 128,
        "value_dim": 128,
        "tflops": {},
    }
    return plain | {"ms": ms} | other


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        ({"hopper": 100, "fa4": 98, "sdpa-cudnn": 110}, ("hopper", "fa4", "sdpa-cudnn")),
        ({"hopper": 100, "fa4": 96, "sdpa-cudnn": 90}, ("sdpa-cudnn", "fa4", "hopper")),
        ({"auto": 1, "sdpa-flash": 1, "hopper+deterministic": 1, "hopper": 100, "fa4": 90}, ("fa4", "hopper")),
        ({"fa4": 98, "triton": 100, "sdpa-cudnn": 300}, ("triton", "fa4", "sdpa-cudnn")),
    ],
    ids=str,
)
def test_another_backend_comes_first_if_it_is_faster_by_a_margin(
    bench: ModuleType, ms: dict[str, float], expected: tuple[str, ...]
) -> None:
    assert bench.rank(row({name: [time] * 3 for name, time in ms.items()})) == expected


def test_ours_come_first_where_a_call_is_short(bench: ModuleType) -> None:
    assert bench.rank(row({"hopper": [0.2], "fa4": [0.1]})) == ("hopper", "fa4")
    assert bench.rank(row({"hopper": [0.4], "fa4": [0.2]})) == ("fa4", "hopper")


def test_rows_become_a_table(bench: ModuleType, tmp_path: Path) -> None:
    rows = [
        row({"hopper": [1.0], "fa4": [0.5]}),
        row({"hopper": [1.0], "fa4": [2.0]}, direction="backward", heads=8),
        row({"triton": [1.0]}, dtype="fp32"),
        row({"hopper": [1.0], "fa4": [9.0]}, architecture="sm_100"),
        row({"hopper": [1.0], "fa4": [0.5]}, direction="backward", heads=8),  # replaces the one above
    ]
    bench.write_rankings(rows, tmp_path / "table.json")
    found = rankings.read(tmp_path / "table.json")
    plain = {"causal": True, "head_dim": 128, "value_dim": 128}
    assert found == {
        "sm_90": (
            Ranking(shape=shape(2048, programs=128, group=4, **plain), backends=("fa4", "hopper")),
            Ranking(shape=shape(2048, programs=32, direction="backward", **plain), backends=("fa4", "hopper")),
        ),
        "sm_100": (Ranking(shape=shape(2048, programs=128, group=4, **plain), backends=("hopper", "fa4")),),
    }


def test_the_table_of_the_package_is_that_of_the_stored_results(bench: ModuleType, tmp_path: Path) -> None:
    bench.write_rankings(bench.read(BENCH / "results/attention_speed_h200.jsonl"), tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == json.loads(rankings.FILE.read_text())


def test_flops_count_each_gemm_with_its_head_dim(bench: ModuleType) -> None:
    case = bench.make_case("bf16", "full", 2, 3, 10, 192, (), value_dim=128)
    gemm = 2 * 2 * 3 * 10 * 10 / 1e12
    assert case.tflop("forward") == pytest.approx(gemm * (192 + 128))
    assert case.tflop("backward") == pytest.approx(gemm * (3 * 192 + 2 * 128))


@pytest.mark.parametrize(
    ("row_of", "expected"),
    [
        # The fastest peer counts, and `hopper` is only shown.
        (
            {"auto": [1.0], "hopper": [2.0], "fa4": [1.0], "sdpa-cudnn": [3.0]},
            [("auto / fa4 1.00, 1 (hopper 0.50)", False)],
        ),
        ({"auto": [2.0], "sdpa-flash": [1.0]}, [("auto / sdpa-flash 0.50, 1 **missed**", True)]),
        ({"hopper": [1.0], "fa4": [2.0]}, []),
    ],
    ids=["met", "missed", "without auto"],
)
def test_targets_compare_with_the_fastest_peer(
    bench: ModuleType, row_of: Any, expected: list[tuple[str, bool]]
) -> None:
    assert list(bench.judge(row(row_of), None)) == expected


def test_short_sequences_are_judged_by_both_passes_together(bench: ModuleType) -> None:
    forward = row({"auto": [3.0], "fa4": [1.0]}, groups=32)
    backward = row({"auto": [1.0], "fa4": [4.0]}, groups=32, direction="backward")
    assert list(bench.judge(forward, forward)) == []
    assert list(bench.judge(backward, forward)) == [("both passes: auto / fa4 1.25, 1", False)]


def test_an_implementation_that_does_not_run_misses_its_target(bench: ModuleType) -> None:
    lacking = row({"fa4": [1.0]}, left_out={"auto": "no"})
    assert list(bench.judge(lacking, None)) == [("auto does not run **missed**", True)]
