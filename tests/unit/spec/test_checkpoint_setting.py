"""`--checkpoint` is none, a number of blocks, or nested: and a number, with one canonical text each."""

from pathlib import Path

import msgspec
import pytest

from stepscope.spec import (
    SIZES,
    Case,
    Checkpointing,
    SpecError,
    Workload,
    build_case,
    grid_from_flags,
    grid_from_toml,
    parse_checkpoint,
)


@pytest.mark.parametrize(
    ("text", "parsed", "canonical"),
    [
        ("none", None, "none"),
        ("block", Checkpointing(every=1, nested=False), "block"),
        ("1", Checkpointing(every=1, nested=False), "block"),
        ("4", Checkpointing(every=4, nested=False), "4"),
        ("04", Checkpointing(every=4, nested=False), "4"),
        ("nested:3", Checkpointing(every=3, nested=True), "nested:3"),
    ],
)
def test_every_spelling_has_one_canonical_text(text: str, parsed: Checkpointing | None, canonical: str) -> None:
    workload = grid_from_flags({"checkpoint": text}).cases()[0].workload
    assert workload.checkpoint == canonical
    assert workload.checkpointing == parsed == parse_checkpoint(canonical)


def test_two_spellings_of_a_value_are_one_case() -> None:
    assert len(grid_from_flags({"checkpoint": "block,1,2,nested:2"}).cases()) == 3


def test_numbers_are_accepted_from_toml_and_python(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('checkpoint = [1, 2, "nested:2"]')
    assert [case.workload.checkpoint for case in grid_from_toml(file).cases()] == ["block", "2", "nested:2"]
    assert build_case({"checkpoint": 3}).workload.checkpoint == "3"


def test_values_in_results_files_round_trip() -> None:
    for text in ("none", "block"):
        encoded = msgspec.json.encode(build_case({"checkpoint": text}))
        assert f'"checkpoint":"{text}"'.encode() in encoded
        assert msgspec.json.decode(encoded, type=Case).workload.checkpoint == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("blok", ("unknown checkpoint: `blok`", "--checkpoint block")),
        ("nested", ("unknown checkpoint: `nested`", "--checkpoint nested:2")),
        ("nested:x", ("unknown checkpoint", "nested: and a number")),
        ("0", ("at least 1 block, got `0`", "--checkpoint none")),
        ("-2", ("at least 1 block, got `-2`", "--checkpoint 1")),
        ("nested:0", ("at least 1 block, got `nested:0`", "--checkpoint none")),
        ("nested:1", ("groups of a single block", "--checkpoint 1")),
    ],
)
def test_invalid_values_are_rejected_with_a_hint(text: str, said: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as by_flag:
        grid_from_flags({"checkpoint": text})
    with pytest.raises(SpecError) as by_hand:
        Workload(model=SIZES["nano"], checkpoint=text)
    for part in said:
        assert part in str(by_flag.value)
        assert part in str(by_hand.value)


def test_groups_need_a_backward_pass() -> None:
    with pytest.raises(SpecError, match="checkpoint `2` cannot be used with mode `forward`"):
        build_case({"checkpoint": "2", "mode": "forward"})
