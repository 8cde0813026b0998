"""Tables of saved activations: memory counts once, and rows add up."""

from collections.abc import Mapping

import polars as pl
import pytest

from stepscope import cost
from stepscope.explain.memory.saved import (
    OUTSIDE,
    compare_saved,
    held_storages,
    saved_and_predicted,
    saved_by_block,
    saved_by_module,
    saved_by_role,
    saved_in_block,
)
from stepscope.findings import Cell, Table
from stepscope.recording.tables import conform
from stepscope.spec import build_case

Row = tuple[int, str, str, str | None, int, int, str]  # node, op, argument, module, storage, bytes, kind


def frame(*rows: Row, dtype: str = "float32") -> pl.DataFrame:
    names = ("node", "op", "argument", "module", "storage", "storage_bytes", "kind")
    columns = [dict(zip(names, row, strict=True)) | {"shape": "[1]", "dtype": dtype} for row in rows]
    return conform("saved", pl.DataFrame(columns))


EAGER = frame(
    (7, "MmBackward0", "self", "blocks.1.up", 5, 60, "activation"),
    (1, "MulBackward0", "self", "blocks.0", 1, 100, "activation"),
    (2, "MmBackward0", "self", "blocks.0.gate", 1, 100, "activation"),
    (2, "MmBackward0", "mat2", "blocks.0.gate", 2, 1000, "parameter"),
    (3, "SigmoidBackward0", "result", "blocks.0.gate", 3, 60, "activation"),
    (4, "GatherBackward0", "index", "(loss)", 4, 8, "input"),
    (9, "ExpBackward0", "result", "(loss)", 6, 30, "activation"),
    (10, "MulBackward0", "other", None, 7, 2, "activation"),
)
COMPILED = frame(
    (1, "CompiledFunctionBackward", "tensors[0]", "(Model)", 1, 100, "activation"),
    (1, "CompiledFunctionBackward", "tensors[1]", "(Model)", 2, 60, "activation"),
    (2, "ExpBackward0", "result", "(loss)", 3, 30, "activation"),
)


def cells(table: Table, *keys: str) -> list[tuple[Cell, ...]]:
    places = [[column.key for column in table.columns].index(key) for key in keys]
    return [tuple(row[place] for place in places) for row in table.rows]


def test_storage_counts_once_for_the_first_node() -> None:
    held = held_storages(EAGER)
    assert held["storage"].to_list() == [1, 3, 5, 6, 7]
    assert held["module"].to_list() == ["blocks.0", "blocks.0.gate", "blocks.1.up", "(loss)", None]


def test_parameters_and_inputs_are_not_counted() -> None:
    for table in (saved_by_module(EAGER), saved_by_block(EAGER)):
        assert sum(size for (size,) in cells(table, "bytes") if isinstance(size, int)) == 252
        assert sum(share for (share,) in cells(table, "share") if isinstance(share, float)) == pytest.approx(1)


def test_the_largest_comes_first() -> None:
    assert cells(saved_by_module(EAGER), "module", "bytes", "count")[0] == ("blocks.0", 100, 1)


def test_block_lists_its_largest_tensors() -> None:
    rows = cells(saved_by_block(EAGER), "block", "bytes", "mostly")
    assert [row[:2] for row in rows] == [("blocks.0", 160), ("blocks.1", 60), (OUTSIDE, 32)]
    assert rows[0][2] == "0 MulBackward0 self 62.5%, gate SigmoidBackward0 result 37.5%"


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("blocks.3.attention.q_proj", "blocks.3"),
        ("transformer.h.0.mlp", "transformer.h.0"),
        ("model.layers.10", "model.layers.10"),
        ("0", "0"),
        ("layers.1.experts.2.up", "layers.1"),
        ("conv2.norm", None),
        ("(loss)", None),
    ],
)
def test_a_block_is_the_path_up_to_its_first_number(module: str, block: str | None) -> None:
    assert held_storages(frame((1, "A", "self", module, 1, 1, "activation")))["block"].to_list() == [block]


def test_one_block_is_listed_tensor_by_tensor() -> None:
    assert cells(saved_in_block(EAGER), "op", "bytes", "share") == [
        ("MulBackward0", 100, 0.625),
        ("SigmoidBackward0", 60, 0.375),
    ]


def test_a_model_without_blocks_says_so() -> None:
    table = saved_in_block(COMPILED)
    assert table.rows == ()
    assert "no blocks found" in table.title


def test_no_saved_tensors_give_empty_tables() -> None:
    nothing = EAGER.clear()
    assert saved_by_module(nothing).rows == saved_by_block(nothing).rows == ()
    assert cells(compare_saved(nothing, nothing)[0], "op", "eager_bytes") == [("all", 0)]


def test_eager_and_compiled_are_compared_by_operator() -> None:
    rows: Mapping[Cell, tuple[Cell, ...]] = {row[0]: row[1:] for row in compare_saved(EAGER, COMPILED)[0].rows}
    assert rows["all"] == (252, 190, 62)
    assert rows["SigmoidBackward0"] == (60, 0, 60)
    assert rows["CompiledFunctionBackward"] == (0, 160, -160)
    assert rows["ExpBackward0"] == (30, 30, 0)


def test_tensors_no_longer_saved_are_found_by_size() -> None:
    rows = cells(compare_saved(EAGER, COMPILED)[1], "each_bytes", "eager_count", "compiled_count", "gone_bytes")
    assert rows == [(60, 2, 1, 60), (2, 1, 0, 2), (100, 1, 1, 0), (30, 1, 1, 0)]
    ops = {row[0]: row[1] for row in cells(compare_saved(EAGER, COMPILED)[1], "each_bytes", "eager_ops")}
    assert ops[60] == "SigmoidBackward0 result, MmBackward0 self"
    assert cells(compare_saved(COMPILED, EAGER)[1], "gone_bytes")[-1] == (-60,)


def test_predicted_and_measured_are_compared_by_part() -> None:
    closed = cost.activations_of(build_case({"precision": "bf16"}).workload)
    saved = pl.concat(
        [
            frame(
                (1, "MmBackward0", "mat2", "blocks.0.attention.q_proj", 1, 7, "activation"),
                (1, "MmBackward0", "self", "blocks.0.attention.q_proj", 2, 11, "activation"),
                (2, "BmmBackward0", "mat2", "blocks.0.attention", 3, 13, "activation"),
                (3, "MulBackward0", "self", "blocks.0.ffn", 4, 17, "activation"),
                (4, "MmBackward0", "self", "lm_head", 5, 19, "activation"),
                dtype="bfloat16",
            ),
            frame((5, "PowBackward0", "self", "final_norm", 6, 23, "activation")),
        ]
    )
    table = saved_and_predicted(saved, closed)
    found = {row[0]: row[1] for row in cells(table, "part", "audit_bytes")}
    assert {part: found[part] for part in ("weights", "projections", "attention", "ffn", "head", "norm", "loss")} == {
        "weights": 7,
        "projections": 11,
        "attention": 13,
        "ffn": 17,
        "head": 19,
        "norm": 23,
        "loss": 0,
    }
    assert found["rope"] == found["embedding"] == 0
    assert table.rows[-1] == ("all", "", closed.bytes, 90, 90 - closed.bytes)
    assert ("head", "B·L·d·2") in cells(table, "part", "formula")


def test_same_module_of_all_layers_is_one_row() -> None:
    table = saved_by_role(
        frame(
            (1, "MmBackward0", "self", "blocks.0.up", 1, 60, "activation"),
            (2, "MmBackward0", "self", "blocks.1.up", 2, 40, "activation"),
            (3, "MulBackward0", "self", "blocks.1.up", 3, 20, "activation"),
            (4, "ExpBackward0", "result", None, 4, 30, "activation"),
        )
    )
    assert cells(table, "module", "modules", "bytes", "count") == [("blocks.*.up", 2, 120, 3), (None, 1, 30, 1)]
