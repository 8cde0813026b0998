"""What people call a model: `Small Transformer`, `Llama`, `my_model`; with sizes, `Llama, 12 layers, d_model 1024,
168M parameters`. Paths, config fields and `--set` values are settings; the Environment section of a page lists those.
"""

import re
from pathlib import PurePosixPath

from stepscope.cost.model import parameters as count_parameters
from stepscope.recording.rows.bench import NO_SIZES, ConfigSizes
from stepscope.spec import SIZES, Factory, HuggingFace, ModelShape
from stepscope.units import clip, count_noun, say_parameters

MOST_NAME = 40  # characters
# Model types of `transformers` whose name is not just the type with a capital.
_FAMILIES = {
    "albert": "ALBERT",
    "bart": "BART",
    "bert": "BERT",
    "bloom": "BLOOM",
    "codegen": "CodeGen",
    "deberta-v2": "DeBERTa-v2",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gpt2": "GPT-2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_neo": "GPT-Neo",
    "gpt_neox": "GPT-NeoX",
    "gpt_oss": "gpt-oss",
    "gptj": "GPT-J",
    "llama4": "Llama 4",
    "mt5": "mT5",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "opt": "OPT",
    "phi3": "Phi-3",
    "qwen2_moe": "Qwen2 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "roberta": "RoBERTa",
    "stablelm": "StableLM",
    "t5": "T5",
    "vit": "ViT",
    "wav2vec2": "Wav2Vec2",
    "xlm-roberta": "XLM-RoBERTa",
}
# Names of factories that say nothing about the model; their file does.
_GENERIC = re.compile(r"(?:build|make|create|get|load|new|main|setup|factory|model|net|fn|it|_)+", re.IGNORECASE)
_LAYERS = ("num_layers", "num_hidden_layers", "n_layers", "n_layer", "layers", "depth")
_WIDTHS = ("d_model", "hidden_size", "n_embd", "n_embed", "embed_dim", "hidden_dim", "dim", "width")

Model = ModelShape | Factory | HuggingFace


def name_model(model: Model) -> str:
    match model:
        case ModelShape():
            return f"{model.name[0].upper()}{model.name[1:]} Transformer" if model.name in SIZES else "Transformer"
        case HuggingFace():
            return clip(_name_config(model.config), MOST_NAME)
        case Factory():
            return clip(_name_factory(model.target), MOST_NAME)


def describe_model(model: Model, *, parameters: int | None = None, sizes: ConfigSizes = NO_SIZES) -> str:
    """The name and the sizes that are known. `parameters` and `sizes` were measured; the settings of a model come
    first."""
    layers, d_model = sizes.num_layers, sizes.d_model
    if isinstance(model, ModelShape):
        layers, d_model = model.num_layers, model.d_model
        parameters = parameters or count_parameters(model).total
    else:
        given = dict(model.arguments)
        layers, d_model = _find(given, _LAYERS) or layers, _find(given, _WIDTHS) or d_model
    words = [name_model(model)]
    words += [count_noun(layers, "layer")] if layers else []
    words += [f"d_model {d_model}"] if d_model else []
    words += [f"{say_parameters(parameters)} parameters"] if parameters else []
    return ", ".join(words)


def _find(arguments: dict[str, str | int | float | bool], names: tuple[str, ...]) -> int | None:
    found = (arguments[name] for name in names if name in arguments)
    return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def _name_config(config: str) -> str:
    """A model type, or the file or directory that holds a config."""
    path = PurePosixPath(config.replace("\\", "/"))
    is_file = path.suffix == ".json" or "/" in config
    if not is_file:
        return _FAMILIES.get(config, config[0].upper() + config[1:].replace("_", " "))
    named = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return named or path.name


def _name_factory(target: str) -> str:
    """The function or class after the colon, or the file where that is only `build`."""
    place, _, function = target.rpartition(":")
    name = function.rpartition(".")[2]
    if not _GENERIC.fullmatch(name):
        return name
    file = PurePosixPath(place.replace("\\", "/")).name if place.endswith(".py") else place.rpartition(".")[2]
    return file.removesuffix(".py")
