"""A `transformers` model with its weights in half precision, as a replay runs it."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from stepscope.jobs.replay import LocalGpu
from stepscope.jobs.workers.messages import Probed, ProbedModel
from stepscope.recover.evidence.recording import gather
from stepscope.recover.replay.program import CAST_MODEL
from stepscope.spec import Factory, Workload
from stepscope.step import build
from tests.unit.rows import ENVIRONMENT

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}


def workload(folder: Path, config: dict[str, object], *, with_loss: bool = False) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    arguments = (("config", str(path)), ("dtype", "bf16"), ("with_loss", with_loss))
    return Workload(
        model=Factory(target=CAST_MODEL, arguments=arguments),
        batch=2,
        context=16,
        mode="train" if with_loss else "inference",
        attention="sdpa",
        device="cpu",
    )


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("with_loss", [False, True])
def test_weights_are_stored_in_half_precision(tmp_path: Path, config: dict[str, object], with_loss: bool) -> None:
    step = build(workload(tmp_path, config, with_loss=with_loss), torch.device("cpu"))
    assert {parameter.dtype for parameter in step.module.parameters()} == {torch.bfloat16}
    assert ("labels" in step.inputs[0]) == with_loss
    assert step.inputs[0]["input_ids"].shape == (2, 16)
    step.run()
    assert (step.loss is not None) == with_loss
    assert step.loss_is_finite()


def test_the_model_runs_in_the_process_of_a_replay(tmp_path: Path) -> None:
    """On a CPU, its operators are recorded and there are no GPU kernels."""
    asked = workload(tmp_path, LLAMA)
    with LocalGpu() as machine:
        on_cpu = msgspec.structs.replace(ENVIRONMENT, device="cpu")
        machine._probed = Probed(environment=on_cpu, models=(ProbedModel(source=None, takes_context=True),))
        recording = machine.record(asked)
    assert gather(recording).sightings == ()
    products = recording.ops.filter(recording.ops["name"].is_in(["aten::mm", "aten::linear", "aten::addmm"]))
    assert products.height >= 3 * 2 * 7  # three steps of two layers with seven linear layers each
