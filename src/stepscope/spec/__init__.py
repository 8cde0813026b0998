"""What to run: the `Workload`, the named sizes, and grids of workloads.

Flags, TOML files and Python all meet in one flat table of settings, `SETTINGS`. A flag is the setting's name with
dashes, a TOML key is the name itself, and a list of values is an axis of a grid. So each check, default and error
message is written once. The table is built from the fields of `Workload`, `Timing` and `ModelShape`, where the settings
are declared.

Everything here is frozen, hashable and independent of torch, so a laptop can read workloads that ran on a GPU.
"""

from stepscope.spec.backends import Attention
from stepscope.spec.grid import Grid, Settings, build_case, grid_from_flags, grid_from_settings, grid_from_toml
from stepscope.spec.presets import PRESET_SETTING, PRESETS, SETTINGS, Preset
from stepscope.spec.settings import (
    Mode,
    Optimizer,
    Precision,
    Scalar,
    Setting,
    SpecError,
    Strategy,
    complete,
    flag_of,
    parse_bytes,
)
from stepscope.spec.training import Training
from stepscope.spec.workload import (
    DEFAULT_CONTEXT,
    OWN_OPTIMIZER,
    RUN_SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    TIMING_SETTINGS,
    WHOLE_STEP,
    Case,
    Checkpointing,
    Factory,
    HuggingFace,
    ModelShape,
    Timing,
    Workload,
    for_precisions,
    parse_checkpoint,
    with_precision,
)

__all__ = [
    "DEFAULT_CONTEXT",
    "OWN_OPTIMIZER",
    "PRESETS",
    "PRESET_SETTING",
    "RUN_SETTINGS",
    "SETTINGS",
    "SHAPE_SETTINGS",
    "SIZES",
    "TIMING_SETTINGS",
    "WHOLE_STEP",
    "Attention",
    "Case",
    "Checkpointing",
    "Factory",
    "Grid",
    "HuggingFace",
    "Mode",
    "ModelShape",
    "Optimizer",
    "Precision",
    "Preset",
    "Scalar",
    "Setting",
    "Settings",
    "SpecError",
    "Strategy",
    "Timing",
    "Training",
    "Workload",
    "build_case",
    "complete",
    "flag_of",
    "for_precisions",
    "grid_from_flags",
    "grid_from_settings",
    "grid_from_toml",
    "parse_bytes",
    "parse_checkpoint",
    "with_precision",
]
