"""Which Python frames of a trace are the user's own code, and how they are named.

A trace with stacks has a frame such as `train.py(12): train_step` for every call, where the line is that of the
function. Paths are relative to an entry of the module search path, or absolute. Frames of PyTorch, the standard library
and installed packages say little about a user's program; they are most of the frames.
"""

import re
import sys

_FRAME = re.compile(r"(.+\.py)\((\d{1,9})\): ([\w<][\w.<>]*)")
_INSTALLED = re.compile(r"(?:site|dist)-packages/|/lib/python\d|(?:^|/)torch/|(?:^|/)torchgen/")
_OUTSIDE = re.compile(r"/|~|\.\.|[A-Za-z]:")  # how a path begins that may name a person
# Packages that call a user's code, or are called by it, and are found on the search path like it.
_LIBRARIES = frozenset(
    (
        *("accelerate", "apex", "datasets", "deepspeed", "diffusers", "einops", "fairseq", "flash_attn", "fsspec"),
        *("huggingface_hub", "hydra", "ignite", "IPython", "ipykernel", "jax", "lightning", "lightning_fabric"),
        *("matplotlib", "megatron", "mlflow", "numpy", "omegaconf", "pandas", "peft", "PIL", "pyarrow"),
        *("pytorch_lightning", "safetensors", "scipy", "sklearn", "stepscope", "tensorboard", "timm", "tokenizers"),
        *("torchao", "torchaudio", "torchdata", "torchmetrics", "torchrec", "torchvision", "tqdm", "transformers"),
        *("transformer_engine", "triton", "trl", "wandb", "xformers"),
    )
)


def name_user_frame(name: str) -> str:
    """Return `train.py:12 (train_step)` for a frame of the user's code, without the directories of an absolute path; an
    empty text for any other frame. The body of a module says nothing: its line is always the first one."""
    found = _FRAME.fullmatch(name)
    if found is None or found[3] == "<module>":
        return ""
    path, line, function = found[1].replace("\\", "/"), found[2], found[3]
    if _INSTALLED.search(path):
        return ""
    parts = path.split("/")
    top = parts[0].removesuffix(".py")
    if _OUTSIDE.match(path):
        parts = parts[-1:]
    elif top in _LIBRARIES or top in sys.stdlib_module_names:
        return ""
    return f"{'/'.join(parts[-2:])}:{line} ({function})"
