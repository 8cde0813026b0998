"""What to run: the `Workload`, the named sizes, and grids of them.

The first of the three waists. People come in by flags, by TOML or from Python, and all three meet in one flat table
of settings (`SETTINGS`): a flag is a setting's name with dashes, a TOML key is the name itself, and a list of values
on any of them is an axis of a grid. So a check, a default or an error message is written once and holds for all
three. The table itself is read off the fields of `Workload`, `Timing` and `ModelShape`, where each setting is declared.

Everything here is frozen and hashable, and free of torch: a laptop reads workloads that a GPU ran.
"""

from stepscope.spec.backends import Attention
from stepscope.spec.grid import Grid, Settings, build_case, grid_from_flags, grid_from_settings, grid_from_toml
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
    SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    TIMING_SETTINGS,
    Case,
    Checkpointing,
    Factory,
    HuggingFace,
    ModelShape,
    Timing,
    Workload,
    for_precisions,
    parse_checkpoint,
)

__all__ = [
    "DEFAULT_CONTEXT",
    "OWN_OPTIMIZER",
    "RUN_SETTINGS",
    "SETTINGS",
    "SHAPE_SETTINGS",
    "SIZES",
    "TIMING_SETTINGS",
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
    "complete",
    "flag_of",
    "for_precisions",
    "grid_from_flags",
    "grid_from_settings",
    "grid_from_toml",
    "parse_bytes",
    "parse_checkpoint",
]
