"""The table and figures of `stepscope comm`, and the fitted links."""

import pytest

from stepscope.explain.experiments.comm_tables import (
    bus_gb_per_s,
    comm_figure,
    comm_table,
    describe_comm,
    fit_links,
    outcome_of_comm,
    rank_spread,
    slowest_rank,
)
from stepscope.findings import Cell, Table
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.rows.collective_case import CommMeasurement
from stepscope.units import say_message_bytes
from tests.unit.comm_rows import MB, MS, communicate


def column(table: Table, key: str) -> list[Cell]:
    (at,) = (place for place, one in enumerate(table.columns) if one.key == key)
    return [row[at] for row in table.rows]


def test_the_slowest_rank_of_each_repetition_counts() -> None:
    row = communicate(samples_ns=((2 * MS, 9 * MS, 2 * MS), (4 * MS, 3 * MS, 8 * MS)))
    assert column(comm_table([row]), "median_ms") == [8.0]  # of 4, 9 and 8
    assert column(comm_table([row]), "algorithm_gb_per_s") == [pytest.approx(1.0)]
    assert rank_spread(row) == pytest.approx(1 - 3 / 9)  # of 1/2, 2/3 and 3/4
    assert slowest_rank(row) == "1"


def test_no_slowest_rank_without_a_majority() -> None:
    row = communicate(samples_ns=((2 * MS, 9 * MS), (4 * MS, 3 * MS)))
    assert slowest_rank(row) == ""


def test_bus_bandwidth_is_algorithm_bandwidth_times_the_factor() -> None:
    times = ((8 * MS,) * 5,) * 4  # 8 MB in 8 ms: 1 GB/s
    found = {
        collective: bus_gb_per_s(communicate(collective, ranks=4, samples_ns=times))
        for collective in ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
    }
    assert found == {
        "all-reduce": pytest.approx(1.5),
        "all-gather": pytest.approx(0.75),
        "reduce-scatter": pytest.approx(0.75),
        "broadcast": pytest.approx(1.0),
    }
    assert bus_gb_per_s(communicate(ranks=1)) is None


def test_rows_are_sorted_and_failures_have_a_reason() -> None:
    rows = [
        communicate("broadcast", "oom", message_bytes=10**9),
        communicate(message_bytes=16 * MB, ranks=4),
        communicate(message_bytes=16 * MB, doubts=(Doubt(code="spread", text="wide"),)),
        communicate(message_bytes=2 * MB),
    ]
    table = comm_table(rows)
    assert column(table, "message") == ["2 MB", "16 MB", "16 MB", "1 GB"]
    assert column(table, "ranks") == [2, 2, 4, 2]
    assert column(table, "remarks") == ["", "spread", "", "oom"]
    assert column(table, "median_ms")[3] is None
    assert "oom: broadcast: the reason for oom" in table.notes
    assert any(note.startswith("spread: repetitions differ") for note in table.notes)
    assert table.title.startswith("nccl, cuda tensors, fp32, Test GPU")


def test_fitted_link_is_a_note_and_matches_the_data() -> None:
    rows = [communicate(message_bytes=size * MB) for size in (1, 8, 64)]
    (links,) = fit_links(rows)
    link = links.links["all-reduce"]
    assert link.latency_ns == pytest.approx(MS)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert (links.place.backend, links.place.ranks, links.place.device_name) == ("nccl", 2, "Test GPU")
    note = "all-reduce, 2 ranks, nccl: 1 ms + message / 1 GB/s (fit error 0% over 3 sizes)"
    assert note in comm_table(rows).notes


def test_each_place_is_fitted_separately() -> None:
    rows = [communicate(message_bytes=size, ranks=ranks) for size in (MB, 8 * MB) for ranks in (1, 2, 4)]
    rows += [communicate(message_bytes=size, interface="eth1") for size in (MB, 8 * MB)]
    rows += [communicate(message_bytes=size, dtype="bf16") for size in (MB, 8 * MB)]
    rows += [communicate("broadcast", message_bytes=MB)]  # one size cannot be fitted
    found = fit_links(rows)
    assert {(one.place.ranks, one.place.interface, one.place.dtype) for one in found} == {
        (2, None, "fp32"),
        (4, None, "fp32"),
        (2, "eth1", "fp32"),
        (2, None, "bf16"),
    }
    assert all(list(one.links) == ["all-reduce"] for one in found)


@pytest.mark.parametrize(
    ("size", "said"), [(10**9, "1 GB"), (1_500_000_000, "1.5 GB"), (MB, "1 MB"), (1024, "1.024 kB"), (24, "24 B")]
)
def test_sizes_are_decimal(size: int, said: str) -> None:
    assert say_message_bytes(size) == said


def test_case_description() -> None:
    row = communicate("all-gather", ranks=4, dtype="bf16", samples_ns=((8 * MS,) * 5,) * 4)
    assert describe_comm(row.case) == "all-gather 8 MB bf16, 4 ranks, nccl"
    assert outcome_of_comm(row) == "8 ms, 0.75 GB/s bus bandwidth"


def test_figure_has_a_panel_per_collective_and_a_line_per_rank_count() -> None:
    rows = [
        communicate(collective, message_bytes=size, ranks=ranks)
        for collective in ("broadcast", "all-reduce")
        for size in (MB, 8 * MB)
        for ranks in (2, 4)
    ]
    figure = comm_figure([*rows, communicate("all-gather", "error")], "bus")
    assert list(dict.fromkeys(point.panel for point in figure.points)) == ["all-reduce", "broadcast"]
    assert {point.series for point in figure.points} == {"2", "4"}
    assert "1 error" in figure.subtitle
    for point in figure.points:
        assert point.low is not None
        assert point.high is not None
        assert point.low <= point.y <= point.high
    by_time = comm_figure(rows[:1], "time").points[0]
    assert by_time.x == 1.0
    assert by_time.y == pytest.approx(2.0)


def test_warning_of_a_later_version_uses_its_own_text() -> None:
    doubts = (Doubt(code="tomorrow", text="something new was seen"),)
    notes = comm_table([communicate(doubts=doubts), communicate(ranks=4, doubts=doubts)]).notes
    assert "tomorrow: something new was seen (2 cases)" in notes


@pytest.mark.parametrize(
    ("samples_ns", "expected"),
    [
        (((1, 2), (3,)), "the same number of samples"),
        (((), ()), "positive durations"),
        (((0, 1), (1, 1)), "positive durations"),
        (((-5,), (5,)), "positive durations"),
    ],
)
def test_impossible_samples_are_rejected(samples_ns: tuple[tuple[int, ...], ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        CommMeasurement(clock="host", samples_ns=samples_ns, processor_ns=(1, 1))
