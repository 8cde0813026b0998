"""What to run: the `Workload`, the named sizes, and grids of them.

The first of the three waists. People come in by flags, by TOML or from Python, and all three meet in one flat table
of settings (`SETTINGS`): a flag is a setting's name with dashes, a TOML key is the name itself, and a list of values
on any of them is an axis of a grid. So a check, a default or an error message is written once and holds for all
three.

Everything here is frozen and hashable, and free of torch: a laptop reads workloads that a GPU ran.
"""

from stepscope.spec.choices import Attention, Mode, Optimizer, Precision, Scalar, SpecError, Strategy
from stepscope.spec.grid import Grid, grid_from_flags, grid_from_settings, grid_from_toml
from stepscope.spec.settings import (
    OWN_MODEL_SETTINGS,
    RUN_SETTINGS,
    SETTINGS,
    SHAPE_SETTINGS,
    TIMING_SETTINGS,
    WORKLOAD_SETTINGS,
    Setting,
    Settings,
    build_case,
    parse_bytes,
)
from stepscope.spec.training import Training
from stepscope.spec.workload import (
    DEFAULT_CONTEXT,
    OWN_OPTIMIZER,
    SIZES,
    Case,
    Checkpointing,
    Factory,
    HuggingFace,
    ModelShape,
    Timing,
    Workload,
    parse_checkpoint,
)

__all__ = [
    "DEFAULT_CONTEXT",
    "OWN_MODEL_SETTINGS",
    "OWN_OPTIMIZER",
    "RUN_SETTINGS",
    "SETTINGS",
    "SHAPE_SETTINGS",
    "SIZES",
    "TIMING_SETTINGS",
    "WORKLOAD_SETTINGS",
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
    "Scalar",
    "Setting",
    "Settings",
    "SpecError",
    "Strategy",
    "Timing",
    "Training",
    "Workload",
    "build_case",
    "grid_from_flags",
    "grid_from_settings",
    "grid_from_toml",
    "parse_bytes",
    "parse_checkpoint",
]
