"""What people call a model: no paths, no `--set` values, no class paths."""

import pytest

from stepscope.explain.model_names import MOST_NAME, describe_model, name_model
from stepscope.recording.rows.bench import ConfigSizes
from stepscope.spec import SIZES, Factory, HuggingFace, ModelShape

WIDE = ModelShape(d_model=512, d_ff=2048, num_layers=1, num_heads=8, num_kv_heads=8)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (SIZES["small"], "Small Transformer"),
        (SIZES["2.7B"], "2.7B Transformer"),
        (WIDE, "Transformer"),
        (HuggingFace(config="llama", arguments=(("num_hidden_layers", 12),)), "Llama"),
        (HuggingFace(config="gpt2"), "GPT-2"),
        (HuggingFace(config="qwen2_vl"), "Qwen2 vl"),
        (HuggingFace(config="configs/tiny-llama.json"), "tiny-llama"),
        (HuggingFace(config="/data/models/llama-7b/config.json"), "llama-7b"),
        (HuggingFace(config="./llama-7b"), "llama-7b"),
        (Factory(target="pkg.models.gpt:MiniGPT"), "MiniGPT"),
        (Factory(target="/home/me/work/vision.py:build_vit"), "build_vit"),
        (Factory(target="../research/my_model.py:build", arguments=(("width", 64),)), "my_model"),
        (Factory(target="pkg.models.gpt:make_model"), "gpt"),
    ],
)
def test_name_is_what_people_say(model: ModelShape | HuggingFace | Factory, name: str) -> None:
    assert name_model(model) == name


def test_sizes_come_from_the_settings_and_what_was_measured() -> None:
    llama = HuggingFace(config="llama", arguments=(("num_hidden_layers", 12), ("hidden_size", 1024)))
    assert describe_model(llama, parameters=168_000_000) == "Llama, 12 layers, d_model 1024, 168M parameters"
    of_config = ConfigSizes(num_layers=12, d_model=768)
    assert describe_model(HuggingFace(config="gpt2"), sizes=of_config) == "GPT-2, 12 layers, d_model 768"
    assert describe_model(llama, sizes=of_config) == "Llama, 12 layers, d_model 1024"
    assert describe_model(Factory(target="m:Decoder", arguments=(("depth", 1), ("dim", "wide")))) == "Decoder, 1 layer"
    assert describe_model(SIZES["small"]) == "Small Transformer, 12 layers, d_model 768, 129M parameters"


def test_long_names_are_clipped() -> None:
    assert len(name_model(Factory(target=f"m:{'Net' * 100}"))) <= MOST_NAME
    assert len(name_model(HuggingFace(config=f"a/{'b' * 300}/config.json"))) <= MOST_NAME
