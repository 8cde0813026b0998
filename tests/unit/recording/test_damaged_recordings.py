"""Recordings that were damaged, edited, or written by a later version."""

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.memory import make_memory_profile
from stepscope.explain.trace.profile import make_profile
from stepscope.explain.trace.summary import summarise
from stepscope.recording import parquet, store
from stepscope.recording.memory.reader import read as read_snapshot
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.store import Manifest, Recording
from stepscope.recording.tables import SCHEMAS
from tests.unit.kineto_files import training_step, write_trace
from tests.unit.ncu_files import COUNTED

SNAPSHOT = COUNTED.with_name("h200_tiny_train.pickle.gz")
# A table `stacks` with one changed byte, which makes polars panic.
PANICS = (
    "c-oay&2G~`5MHlMWT`zAkzLu6RauBysfdDOX!9d_*p$!)N^l}XRBoF%POGLhvO`0A<b*i$2o>Tv5RbzF@dV7+tBQ(KN4qmSGvCbT@!Fvn)|tU9"
    "W*x8+BZX+Nb=ZusGAmb^$<`oQa<*y3z_?{7AVuH`)gKT>?JZJTv#mSXLQYN?;U@pA!SdRk`ClP0uCsN;h-?zo7*&*$k{hI2WNGpy-KwH1#i=}<"
    "W;x#{4VHIBy<gftRrXzK7rbDKsccS*uqI(gD&X)od&?2$@GHt*;1R}px^JXOvS0={8&u5)4*+LHzCjKgz;e@e?5g)eb8h!C_*a9K`A?nIi1$r*"
    "ZZR7FZZOXO=<Gh>Unn;{6HFNguvW!z_<GdNCP&j#Y5mq7p=>7tq>HL~4*ti1^7GJ3Au_R>+kto(LVmf#cu$C#!u8Pls5+=#Jp)j4a^1ARb)E|)"
    ";U(s~*sp`By>}OfqxyUTZ5!DCa&}#`mlt$_9>G2A54MZX1F}^8-eA8RF9t>F?f|K0qJ#c^-#;AnQz3SCh}931xlA*+^8R9Rl$>q4=hHMhPR`t*"
    "R<HSPW&GiI9=VOU<p<;FaU4fMBaWLvRDTjQn$mB{ptTjpLEMnjs1<D5Rk&lk=6moJhVa+?1qra2^Z"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recording = open_recording(write_trace(tmp_path / "t.json", training_step()))
    store.save(recording, tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture(scope="module")
def counted() -> Recording:
    return open_recording(COUNTED)


@pytest.fixture(scope="module")
def remembered() -> Recording:
    return read_snapshot(SNAPSHOT)


def test_recording_from_before_collectives_were_described(folder: Path) -> None:
    path = folder / "kernels.parquet"
    pl.read_parquet(path).drop("collective", "process_group", "group_size").write_parquet(path)
    edit_manifest(folder, lambda content: content.pop("digests"))
    kernels = store.load(folder).kernels
    assert kernels["group_size"].null_count() == kernels.height == 7
    assert kernels.columns == list(SCHEMAS["kernels"])
    pl.read_parquet(path).drop("kind").write_parquet(path)
    with pytest.raises(StepscopeError, match=r"kernels\.parquet"):
        store.load(folder)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / store.MANIFEST_NAME
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def edit_table(folder: Path, table: str, **columns: pl.Expr) -> None:
    """Edit a table and update its digest."""
    path = folder / f"{table}.parquet"
    digest = parquet.write_table(pl.read_parquet(path).with_columns(**columns), path)
    edit_manifest(folder, lambda manifest: manifest["digests"].update({table: digest}))


def at(row: int, value: object, column: str) -> pl.Expr:
    kind = pl.lit(value, pl.Int64) if isinstance(value, int) or value is None else pl.lit(value)
    return pl.when(pl.int_range(pl.len()) == row).then(kind).otherwise(pl.col(column))


def refusal(folder: Path) -> str:
    with pytest.raises(StepscopeError) as error:
        store.load(folder)
    assert str(folder) in error.value.message
    return error.value.detail


def test_changed_table_is_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray((folder / "ops.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "ops.parquet").write_bytes(content)
    monkeypatch.setattr("polars.read_parquet", None)
    assert "`ops.parquet`" in refusal(folder)


def test_table_that_makes_polars_panic_is_a_clean_error(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "stacks.parquet").write_bytes(zlib.decompress(base64.b85decode(PANICS)))
    assert "`stacks.parquet`" in refusal(folder)
    assert capfd.readouterr() == ("", "")


def test_a_table_without_a_digest_is_read(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest.pop("digests"))
    assert store.load(folder).kernels.height == 7


def test_small_file_that_claims_to_be_huge_is_not_read(folder: Path) -> None:
    nothing = pl.DataFrame({"stack": pl.repeat(0, 20_000_000, dtype=pl.Int32, eager=True)}).with_columns(
        frames=pl.lit("")
    )
    digest = parquet.write_table(nothing, folder / "stacks.parquet")
    edit_manifest(folder, lambda manifest: manifest["digests"].update(stacks=digest))
    assert "20,000,000 rows" in refusal(folder)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("kernels", "name", None),
        ("kernels", "start_ns", None),
        ("kernels", "end_ns", 2**62),
        ("kernels", "grid_x", -1),
        ("ranges", "source", None),
        ("ops", "end_ns", -1),
        ("links", "forward_ns", None),
    ],
)
def test_invalid_value_is_named_by_table_column_and_row(folder: Path, table: str, column: str, value: object) -> None:
    kind = pl.read_parquet_schema(folder / f"{table}.parquet")[column]
    edit_table(folder, table, **{column: at(0, value, column).cast(kind)})
    detail = refusal(folder)
    assert detail.startswith(f"`{table}.parquet`: column `{column}`, row 0: got `{value}`")


def test_a_column_of_another_type_is_named(folder: Path) -> None:
    edit_table(folder, "kernels", stream=pl.col("stream").cast(pl.String))
    assert "column `stream`" in refusal(folder)


def test_columns_in_another_order_and_unknown_ones_are_read(folder: Path) -> None:
    whole = store.load(folder)
    columns = pl.read_parquet_schema(folder / "kernels.parquet")
    path = folder / "kernels.parquet"
    digest = parquet.write_table(pl.read_parquet(path).select(*reversed(list(columns)), more=pl.lit(1)), path)
    edit_manifest(folder, lambda manifest: manifest["digests"].update(kernels=digest))
    assert store.load(folder).kernels.equals(whole.kernels)


def test_a_kernel_without_a_device_is_explained_with_a_note(folder: Path) -> None:
    edit_table(folder, "kernels", device=at(2, None, "device").cast(pl.Int32))
    recording = store.load(folder)
    assert recording.kernels["device"].to_list() == [0] * 7
    assert summarise(make_profile(recording), ()).notes[-1].startswith("1 kernel has no device")


@pytest.mark.parametrize(
    ("column", "value"), [("kernel", None), ("kernel", -1), ("kernel", 2**40), ("metric", None), ("unit", None)]
)
def test_counters_must_refer_to_kernels(counted: Recording, tmp_path: Path, column: str, value: object) -> None:
    store.save(counted, tmp_path / "kept")
    expression = at(5, value, column) if column == "kernel" else at(5, value, column).cast(pl.String)
    edit_table(tmp_path / "kept", "counters", **{column: expression})
    assert f"column `{column}`, row 5" in refusal(tmp_path / "kept")


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("allocations", "start_event", -5),
        ("allocations", "end_event", 2**62),
        ("segments", "start_event", 2**40),
        ("allocations", "bytes", None),
        ("allocations", "stack", 2**30),
        ("spans", "end_event", None),
        ("spans", "end_event", 2**33),
    ],
)
def test_memory_rows_must_refer_to_events_and_stacks(
    remembered: Recording, tmp_path: Path, table: str, column: str, value: object
) -> None:
    store.save(remembered, tmp_path / "kept")
    kind = pl.read_parquet_schema(tmp_path / "kept" / f"{table}.parquet")[column]
    edit_table(tmp_path / "kept", table, **{column: at(1, value, column).cast(kind)})
    assert f"column `{column}`, row 1" in refusal(tmp_path / "kept")


def test_manifest_with_too_many_events_is_rejected_early(remembered: Recording, tmp_path: Path) -> None:
    store.save(remembered, tmp_path / "kept")
    edit_manifest(tmp_path / "kept", lambda manifest: manifest["memory"].update(events=2**40))
    assert "1,099,511,627,776 events" in refusal(tmp_path / "kept")


def test_events_count_one_device_if_there_are_spans(remembered: Recording, tmp_path: Path) -> None:
    store.save(remembered, tmp_path / "kept")
    edit_table(tmp_path / "kept", "allocations", device=at(0, 1, "device").cast(pl.Int32))
    profile = make_memory_profile(store.load(tmp_path / "kept"))
    assert profile.recording.manifest.memory is not None
    assert profile.num_events == profile.recording.manifest.memory.events


def test_a_category_of_a_later_version_still_adds_up(remembered: Recording, tmp_path: Path) -> None:
    store.save(remembered, tmp_path / "kept")
    edit_table(tmp_path / "kept", "allocations", category=at(0, "caches", "category"))
    profile = make_memory_profile(store.load(tmp_path / "kept"))
    last = profile.num_events - 1
    assert sum(size for _, size in profile.categories_at(last)) == profile.allocated_at(last)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 2**31},
        {"device_sms": -1},
        {"overhead": {"plain_ns": 0}},
        {"overhead": {"plain_ns": 10**300}},
        {"memory": {"events": -1}},
        {"parameters": 10**300},
        {"notes": [1]},
        {"digests": {"kernels": 5}},
    ],
)
def test_numbers_of_a_manifest_have_a_range(folder: Path, change: dict[str, object]) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(change))
    assert f"$.{next(iter(change))}" in refusal(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"schema": "\xff"}', b"\x00", b"", b"[]"])
def test_invalid_manifest_is_an_error(folder: Path, content: bytes) -> None:
    (folder / store.MANIFEST_NAME).write_bytes(content)
    assert store.MANIFEST_NAME in refusal(folder)


def test_additions_of_a_later_version_are_ignored(folder: Path) -> None:
    doubt = {"code": "from-the-future", "text": "the clock was odd"}
    more = {"doubts": [doubt], "tables": ["kernels", "weather", "x" * 5000], "color": "blue", "device": "Unknown 9000"}
    edit_manifest(folder, lambda manifest: manifest.update(more))
    profile = make_profile(store.load(folder))
    assert profile.hardware is None
    assert profile.recording.manifest.doubts[0].code == "from-the-future"


def test_damaged_cached_results_are_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.explain.trace.profile._WORTH_KEEPING", 0)
    recording = store.load(folder)
    first = make_profile(recording, folder)
    (kept,) = folder.glob("attributed-*.parquet")
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    assert make_profile(recording, folder).kernels.equals(first.kernels)
    assert make_profile(recording, folder).kernels.equals(first.kernels)


def test_digests_are_only_on_disk(folder: Path) -> None:
    assert store.load(folder).manifest.digests is None
    assert Manifest(source="stepscope").digests is None
