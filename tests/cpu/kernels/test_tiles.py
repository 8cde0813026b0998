"""The table of tiles, a user's own tuning on top of it, and the choice that tuning makes."""

from itertools import product
from pathlib import Path

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.kernels.attention import tiles, triton_launch, tune
from stepscope.kernels.attention.tiles import ARITHMETICS, PASSES, WIDTHS, Architecture, Tile, TileKey
from stepscope.kernels.attention.tune import Trial, TuneProblem

ARCHITECTURES: tuple[Architecture, ...] = ("hopper", "ampere")
KEY = TileKey(stage="forward", arithmetic="half", width=64, causal=True, architecture="hopper")


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))
    triton_launch.tuned_tiles.cache_clear()
    return tmp_path


def test_every_problem_has_tiles_that_the_kernels_accept() -> None:
    for stage, arithmetic, width, causal, architecture in product(
        PASSES, ARITHMETICS, WIDTHS, (False, True), ARCHITECTURES
    ):
        key = TileKey(stage=stage, arithmetic=arithmetic, width=width, causal=causal, architecture=architecture)
        for tile in tiles.candidates(key):
            assert min(tile.block_m, tile.block_n) >= 16
        assert len(set(tiles.candidates(key))) == len(tiles.candidates(key))
        assert tiles.choose(key) == tiles.candidates(key)[0]


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (17, (32, 0)),
        (40, (64, 0)),
        (64, (64, 0)),
        (96, (128, 0)),
        (128, (128, 0)),
        (129, (128, 64)),
        (192, (128, 64)),
        (193, (256, 0)),
        (256, (256, 0)),
    ],
)
def test_heads_are_padded_to_one_or_two_powers_of_two(head_dim: int, parts: tuple[int, int]) -> None:
    width = tiles.padded_width(head_dim)
    assert width in WIDTHS
    assert (tiles.main_width(width), width - tiles.main_width(width)) == parts


@pytest.mark.parametrize("widths", [(192, 128), (128, 192), (16, 192)], ids=str)
def test_tile_of_two_widths_is_that_of_the_wider(widths: tuple[int, int]) -> None:
    device = torch.device("cpu")
    for stage in PASSES:
        key = triton_launch.tile_key(stage, "half", widths, device, causal=True)
        assert (key.width, key.v_width) == widths
        assert tiles.candidates(key) == tiles.candidates(
            triton_launch.tile_key(stage, "half", (192, 192), device, causal=True)
        )


def test_heads_of_one_padded_width_share_a_key() -> None:
    key = triton_launch.tile_key("forward", "half", (160, 192), torch.device("cpu"), causal=True)
    assert key == triton_launch.tile_key("forward", "half", (192, 129), torch.device("cpu"), causal=True)
    assert (key.width, key.v_width) == (192, 0)


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "hopper"), ((8, 0), "ampere"), ((12, 0), "ampere")])
def test_gpu_without_the_shared_memory_of_hopper_gets_small_tiles(capability: tuple[int, int], expected: str) -> None:
    assert tiles.architecture(capability) == expected


def test_tuned_tiles_apply_to_the_same_gpu_only(cache_folder: Path) -> None:
    path = triton_launch.keep_tuned("NVIDIA H200", {KEY: Tile(64, 32, 4, 2)})
    assert path == cache_folder / "tiles.json"
    assert triton_launch.tuned_tiles("NVIDIA H200") == {KEY: Tile(64, 32, 4, 2)}
    assert triton_launch.tuned_tiles("NVIDIA A100") == {}


def test_tiles_that_cannot_be_saved_are_an_error_with_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(StepscopeError) as failed:
        triton_launch.keep_tuned("NVIDIA H200", {KEY: Tile(64, 32, 4, 2)})
    assert "STEPSCOPE_CACHE" in failed.value.hint


def test_a_second_tuning_replaces_its_keys_and_keeps_the_others(cache_folder: Path) -> None:
    other = TileKey(stage="backward_keys", arithmetic="tf32", width=64, causal=True, architecture="hopper")
    triton_launch.keep_tuned("a", {KEY: Tile(64, 32, 4, 2), other: Tile(16, 16, 4, 1)})
    triton_launch.keep_tuned("b", {KEY: Tile(32, 32, 4, 1)})
    triton_launch.keep_tuned("a", {KEY: Tile(128, 64, 8, 3)})
    assert triton_launch.tuned_tiles("a") == {KEY: Tile(128, 64, 8, 3), other: Tile(16, 16, 4, 1)}
    assert triton_launch.tuned_tiles("b") == {KEY: Tile(32, 32, 4, 1)}


@pytest.mark.parametrize("content", [b"not JSON", b"[{}]", b'[{"gpu": 3}]', b'[{"gpu": "\xff"}]', b"[" * 100_000])
def test_damaged_file_is_an_error_and_not_ignored(cache_folder: Path, content: bytes) -> None:
    (cache_folder / "tiles.json").write_bytes(content)
    with pytest.raises(StepscopeError, match="cannot read the tuned tiles"):
        triton_launch.tuned_tiles("NVIDIA H200")


def test_tuned_tile_takes_precedence_over_the_table(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    triton_launch.keep_tuned("NVIDIA H200", {KEY: Tile(16, 16, 1, 1)})
    device = torch.device("cuda", 7)
    try:
        assert triton_launch.tile_for("forward", "half", (60, 60), device, causal=True) == Tile(16, 16, 1, 1)
        assert triton_launch.tile_for("forward", "half", (60, 60), device, causal=False) == tiles.choose(KEY)
    finally:
        triton_launch.tile_for.cache_clear()


def test_tuning_chooses_the_fastest_that_ran() -> None:
    trials = [
        Trial(key=KEY, tile=Tile(16, 16, 4, 1), milliseconds=2.0),
        Trial(key=KEY, tile=Tile(32, 16, 4, 1), milliseconds=None, problem="too large"),
        Trial(key=KEY, tile=Tile(64, 16, 4, 1), milliseconds=1.0),
        Trial(key=KEY, tile=Tile(128, 16, 4, 1), milliseconds=3.0),
    ]
    assert tune.fastest(trials) == {KEY: Tile(64, 16, 4, 1)}


def test_tuning_requires_a_gpu() -> None:
    problem = TuneProblem(head_dim=64, dtype=torch.bfloat16, causal=True)
    with pytest.raises(ValueError, match=r"`device` must be a CUDA GPU, but got `cpu`"):
        tune.tune(problem, device=torch.device("cpu"))
