"""Small traces recorded on an H200 (torch 2.11, two steps of `nano`): attribution is complete and time adds up.

They were made by `stepscope profile --size nano --context 64 --record-steps 2` with `--checkpoint block`, with
`--precision bf16 --compile yes`, and with `--precision bf16 --attention sdpa --optimizer adamw-fused`; what the reader
does not look at was taken out.
"""

import gzip
import json
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording.readers import kineto

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("h200_*.json.gz"))
LAYERS = 4


def load(name: str) -> Profile:
    (path,) = (one for one in FIXTURES if name in one.name)
    return make_profile(kineto.read(path))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_nanosecond_of_the_file_is_accounted_for(path: Path) -> None:
    """Compared with the file itself, summed with decimals."""
    events = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    on_device = [one for one in events if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    profile = make_profile(kineto.read(path))
    assert profile.gpu_time_ns == sum(Decimal(one["dur"]) for one in on_device) * 1000
    assert profile.kernels.height == len(on_device)
    (device,) = profile.devices
    for account in (device.whole, *device.streams.values()):
        assert sum(account.classes.values()) + account.overlap_ns + account.idle_ns == profile.wall_ns


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_class_phase_and_module_are_known(path: Path) -> None:
    known = make_profile(kineto.read(path)).coverage()
    assert min(known.values()) >= 0.98, known


def test_both_steps_do_the_same() -> None:
    for path in FIXTURES:
        profile = make_profile(kineto.read(path))
        counts = profile.kernels.filter(pl.col("step").is_not_null()).group_by("step").len()
        assert sorted(counts["step"]) == [0, 1]
        assert counts["len"].n_unique() == 1, path.name


def test_backward_of_a_layer_has_twice_the_gemms_of_its_forward() -> None:
    kernels = load("sdpa").kernels.filter((pl.col("class") == "GEMM") & (pl.col("step") == 0))
    inside = kernels.filter(pl.col("layer").is_not_null())
    counts = dict(inside.group_by("phase").len().rows())
    assert counts == {"forward": 7 * LAYERS, "backward": 14 * LAYERS}
    per_module = inside.filter(pl.col("phase") == "backward").group_by("module").len()
    assert set(per_module["len"]) == {2}


def test_fused_attention_is_attention_forward_and_backward() -> None:
    found = load("sdpa").kernels.filter((pl.col("class") == "attention") & (pl.col("step") == 0))
    assert set(found["phase"]) == {"forward", "backward"}
    assert set(found["module"]) == {f"blocks.{layer}.attention" for layer in range(LAYERS)}


def test_checkpointed_blocks_are_recomputed() -> None:
    kernels = load("checkpoint").kernels.filter(pl.col("step") == 0)
    again = kernels.filter("recomputed")
    assert set(again["phase"]) == {"backward"}
    assert set(again["layer"]) == set(range(LAYERS))
    products = kernels.filter((pl.col("class") == "GEMM") & pl.col("layer").is_not_null())
    assert products.filter(pl.col("phase") == "forward")["op_row"].n_unique() == 9 * LAYERS
    # The last GEMM of a block is not recomputed: backward already has what it needs.
    assert products.filter("recomputed")["op_row"].n_unique() == 8 * LAYERS
    parts = kernels.filter((pl.col("phase") == "backward") & ~pl.col("recomputed") & pl.col("part").is_not_null())
    assert set(parts["part"]) == {"scores", "softmax", "values"}


def test_compiled_code_is_one_module_with_its_phases() -> None:
    kernels = load("compiled").kernels.filter(pl.col("step") == 0)
    assert set(kernels["module"].drop_nulls()) == {"(TransformerLM)", "(optimizer)", "(loss)"}
    assert set(kernels["phase"]) == {"forward", "loss", "backward", "optimizer"}
    assert (kernels["name"].str.starts_with("triton_")).any()
