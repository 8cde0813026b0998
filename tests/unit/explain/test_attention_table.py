"""The tables and figures of attention, from rows like those of a sweep."""

from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.attention_tables import (
    DOUBTS,
    AttentionQuantity,
    attention_figure,
    attention_table,
    describe_attention,
    make_tables,
    outcome_of,
    parse_peer,
)
from stepscope.findings import Cell, Table
from stepscope.recording.rows.attention_case import AttentionRow
from stepscope.recording.rows.bench import Doubt
from stepscope.recording.rows.results_file import ResultsFile, read_rows
from stepscope.render.figures import save
from stepscope.spec.backends import Implementation
from tests.unit.attention_rows import MS, attend


def cells(table: Table, key: str) -> list[Cell]:
    index = [column.key for column in table.columns].index(key)
    return [one[index] for one in table.rows]


def shown(table: Table) -> list[str]:
    return [column.key for column in table.columns if not column.detail]


def sweep() -> list[AttentionRow]:
    """Four implementations: one runs out of memory, and one does not support head dimension 16."""
    names: tuple[Implementation, ...] = ("naive", "sdpa-flash", "sdpa-cudnn", "hopper")
    rows = []
    for name in names:
        for head_dim in (16, 64):
            for length in (1024, 4096):
                if name == "naive" and length == 4096:
                    rows.append(attend(name, "oom", head_dim=head_dim, length=length, reason="CUDA out of memory"))
                elif name == "hopper" and head_dim == 16:
                    rows.append(attend(name, "unsupported", head_dim=head_dim, length=length, reason="no such head"))
                else:
                    rows.append(attend(name, head_dim=head_dim, length=length))
    return rows


def test_implementations_of_one_shape_are_adjacent() -> None:
    table = attention_table(sweep(), part="time")
    assert cells(table, "head_dim") == [16] * 8 + [64] * 8
    assert cells(table, "length") == [*[1024] * 4, *[4096] * 4] * 2
    assert cells(table, "implementation") == ["naive", "sdpa-flash", "sdpa-cudnn", "hopper"] * 4


def test_failed_cases_are_rows_with_a_reason() -> None:
    table = attention_table(sweep(), part="time")
    by_remark = dict(zip(cells(table, "remarks"), cells(table, "forward_median_ms"), strict=False))
    assert by_remark == {"": 1.0, "oom": None, "unsupported": None}
    assert "oom: naive: CUDA out of memory" in table.notes
    assert "unsupported: hopper: no such head" in table.notes


def test_default_peer_is_the_fastest_sdpa_backend_of_each_direction() -> None:
    rows = [
        attend("sdpa-flash", forward_ns=(4 * MS,) * 5, backward_ns=(6 * MS,) * 5),
        attend("sdpa-cudnn", forward_ns=(2 * MS,) * 5, backward_ns=(8 * MS,) * 5),
        attend("hopper", forward_ns=(1 * MS,) * 5, backward_ns=(12 * MS,) * 5),
    ]
    table = attention_table(rows, part="time")
    assert cells(table, "forward_vs_peer") == [0.5, 1.0, 2.0]
    assert cells(table, "backward_vs_peer") == [1.0, 0.75, 0.5]
    assert set(cells(table, "forward_peer")) == {"sdpa-cudnn"}
    assert set(cells(table, "backward_peer")) == {"sdpa-flash"}


def test_named_peer_is_used_for_ratios() -> None:
    rows = [attend("sdpa-cudnn"), attend("naive", forward_ns=(3 * MS,) * 5, backward_ns=(3 * MS,) * 5)]
    table = attention_table(rows, part="time", peer="naive")
    assert cells(table, "forward_vs_peer") == [1.0, 3.0]
    assert any(note.startswith("vs naive") for note in table.notes)


def test_ratio_needs_a_peer_with_the_same_mask_and_precision() -> None:
    rows = [attend("sdpa-cudnn", causal=False), attend("hopper"), attend("sdpa-cudnn", precision="fp32")]
    table = attention_table(rows, part="time")
    ratios = dict(zip(cells(table, "implementation"), cells(table, "forward_vs_peer"), strict=True))
    assert ratios["hopper"] is None
    assert {"mask", "precision"} <= set(shown(table))


def test_without_a_peer_ratio_columns_are_hidden() -> None:
    table = attention_table([attend("naive"), attend("triton")], part="time")
    assert "forward_vs_peer" not in shown(table)
    assert not any(note.startswith("vs ") for note in table.notes)


def test_an_unknown_peer_is_refused_with_the_nearest_name() -> None:
    assert parse_peer("sdpa-cudnn") == "sdpa-cudnn"
    with pytest.raises(StepscopeError, match="unknown peer: `sdpa-cudn`") as raised:
        parse_peer("sdpa-cudn")
    assert raised.value.hint == "--peer sdpa-cudnn"


def test_rates_follow_from_the_median_and_the_convention() -> None:
    row = attend("triton", forward_ns=(MS,) * 4 + (9 * MS,), backward_ns=(2 * MS,) * 5)
    table = attention_table([row], part="time")
    forward = 4 * 8 * 1024 * 1024 * 64 / 2
    assert cells(table, "forward_tflops") == [pytest.approx(forward / 1e-3 / 1e12)]
    assert cells(table, "backward_tflops") == [pytest.approx(2.5 * forward / 2e-3 / 1e12)]
    assert cells(table, "forward_of_peak") == [pytest.approx(forward / 1e-3 / 500e12)]
    assert outcome_of(row) == "forward 1 ms, backward 2 ms"


def test_measured_memory_is_shown_with_its_prediction() -> None:
    table = attention_table([attend("triton"), attend("sdpa-flash")], part="memory")
    assert [a - b for a, b in _pairs(table, "before_backward")] == [512, 512]
    assert [a - b for a, b in _pairs(table, "peak")] == [1024, 1024]
    assert cells(table, "peak_bound") == ["at least", "exact"]
    assert any("at the peak: exact for triton; a lower bound" in note for note in table.notes)
    assert {"peak_reserved_bytes", "before_backward_reserved_bytes"} <= set(shown(table))
    assert "forward_median_ms" not in [column.key for column in table.columns]


def _pairs(table: Table, moment: str) -> list[tuple[int, int]]:
    measured, closed = cells(table, f"{moment}_bytes"), cells(table, f"{moment}_form_bytes")
    return [(int(a or 0), int(b or 0)) for a, b in zip(measured, closed, strict=True)]


def test_untried_case_says_so_and_has_a_prediction() -> None:
    row = attend(
        "naive", "oom", length=65536, reason="not tried: it takes 772 GiB by the closed form, and there are 140"
    )
    table = attention_table([row], part="memory")
    assert cells(table, "remarks") == ["oom, not tried"]
    assert int(cells(table, "peak_form_bytes")[0] or 0) > 700 * 2**30


def test_quality_warnings_are_only_in_the_time_table() -> None:
    row = attend(doubts=(Doubt(code="spread", text="20 %"),))
    time, memory = make_tables([row])
    assert cells(time, "remarks") == ["spread"]
    assert f"spread: {DOUBTS['spread']} (1 case)" in time.notes
    assert "remarks" not in shown(memory)


def test_every_quality_warning_is_explained() -> None:
    import re

    import stepscope

    folder = Path(stepscope.__file__).parent / "measure"
    sources = [folder / "soundness.py", *(folder / "attention").glob("*.py")]
    raised = {code for file in sources for code in re.findall(r'Doubt\(\s*code="([^"]+)"', file.read_text())}
    assert {"few", "spread", "host-bound", "throttled", "shared"} <= raised
    assert set(DOUBTS) <= raised


def test_full_table_has_every_column_once() -> None:
    table = attention_table(sweep(), part="all")
    keys = [column.key for column in table.columns]
    assert {"forward_p20_ms", "both_p80_ms", "peak_formula", "dq_error", "status", "reason"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_rows_of_one_shape_show_their_differing_settings() -> None:
    plain = attend()
    more = ({"seed": 5}, {"seconds": 3.0}, {"repetitions": 7}, {"memory_limit": 8_000_000_000})
    others = [msgspec.structs.replace(plain, case=msgspec.structs.replace(plain.case, **one)) for one in more]
    table = attention_table([plain, *others], part="time")
    assert {"seed", "seconds", "repetitions", "memory_limit"} <= set(shown(table))
    assert cells(table, "memory_limit").count("8 GB") == 1
    assert len({point.panel for point in attention_figure([plain, *others], "both").points}) == 5
    assert "seed" not in shown(attention_table([plain], part="time"))


def test_case_description() -> None:
    assert describe_attention(attend("naive").case) == "naive D 64 L 1024 batch 8 bf16 causal"


def test_rows_survive_the_results_file(tmp_path: Path) -> None:
    rows = sweep()
    with ResultsFile.open(tmp_path / "results.jsonl", AttentionRow) as results:
        for row in rows:
            results.append(row)
    assert read_rows(tmp_path / "results.jsonl", AttentionRow) == (tuple(rows), ())


# --- Pictures -------------------------------------------------------------------------------------------------------


def test_figure_has_a_panel_per_head_dim_and_a_line_per_implementation() -> None:
    figure = attention_figure([*sweep(), attend("naive", "oom", length=8192)], "both")
    assert list(dict.fromkeys(point.panel for point in figure.points)) == ["D 16", "D 64"]
    assert {point.series for point in figure.points} == {"naive", "sdpa-flash", "sdpa-cudnn", "hopper"}
    assert (figure.x.log, figure.y.log) == (True, True)
    assert "out of memory: naive at length 4096 and above; 2 unsupported" in figure.subtitle


def test_other_differences_get_their_own_panels() -> None:
    figure = attention_figure([attend(precision="bf16"), attend(precision="fp32")], "forward")
    assert {point.panel for point in figure.points} == {"D 64, bf16", "D 64, fp32"}


@pytest.mark.parametrize(
    ("quantity", "y"),
    [
        ("forward", 1.0),
        ("backward", 2.0),
        ("both", 3.0),
        ("forward-rate", 4 * 8 * 1024**2 * 64 / 2 / 1e-3 / 1e12),
        ("backward-rate", 2.5 * 4 * 8 * 1024**2 * 64 / 2 / 2e-3 / 1e12),
        ("before-backward", (8 * 1024 * (64 * 2 + 4) + 512) / 2**20),
    ],
)
def test_each_quantity_is_drawn_in_its_unit(quantity: AttentionQuantity, y: float) -> None:
    (point,) = attention_figure([attend()], quantity).points
    assert point.y == pytest.approx(y)


def test_figure_is_drawn(tmp_path: Path) -> None:
    save(attention_figure(sweep(), "peak"), tmp_path / "peak.svg")
    content = (tmp_path / "peak.svg").read_text()
    assert content.index(">hopper<") < content.index(">naive<"), "the fastest comes first in the legend"


def test_warning_of_a_later_version_uses_its_own_text() -> None:
    doubts = (Doubt(code="tomorrow", text="something new was seen"),)
    assert "tomorrow: something new was seen (1 case)" in attention_table([attend(doubts=doubts)], part="time").notes
