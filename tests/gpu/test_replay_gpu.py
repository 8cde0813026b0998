"""A replay on a real GPU: the claimed model launches the kernels of its own recording, and another model does not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import stepscope

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 16000,
}
CHALLENGE = ["--nonce", "5f0c21", "--max-tokens", "2048"]
RUN = ["--batch", "6", "--context", "336", "--precision", "bf16", "--mode", "inference"]


def profile(folder: Path, config: dict[str, Any], *more: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    done = stepscope(folder, "profile", "--hf", "config.json", *RUN, "--out", "evidence", *more)
    if "ERR_NVGPUCTRPERM" in done.stderr:
        pytest.skip("counters are not permitted here")
    assert done.returncode == 0, done.stderr


def replay(folder: Path, layers: int) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    done = stepscope(
        folder, "verify", "evidence", "--claim", "config.json", "--dtype", "bf16", *CHALLENGE,
        "--replay", str(layers), "--format", "json",
    )  # fmt: skip
    assert done.returncode in (0, 1, 3), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
def test_two_layers_show_the_kernels_of_the_claimed_model(tmp_path: Path) -> None:
    profile(tmp_path, CONFIG)
    (found,) = replay(tmp_path, 2)["replays"]
    assert found["verdict"] == "agrees", found["why"]
    assert found["comparison"]["equal"] == found["comparison"]["compared"] > 100


@pytest.mark.timeout(300)
def test_a_narrower_model_is_refuted(tmp_path: Path) -> None:
    profile(tmp_path, CONFIG | {"intermediate_size": 1280})
    assert replay(tmp_path, 2)["verdict"] == "refuted"


@pytest.mark.skipif(shutil.which("ncu") is None, reason="no ncu here")
@pytest.mark.timeout(600)
def test_counters_are_replayed(tmp_path: Path) -> None:
    profile(tmp_path, CONFIG, "--counters")
    (found,) = replay(tmp_path, 2)["replays"]
    assert found["verdict"] == "agrees", found["why"]
    assert {"tensor_ops", "store_bytes"} <= set(found["comparison"]["counters"])
