"""What is shown of a kernel on request: its name as recorded, and what the name says in plain words; and the label of
the layer that it belongs to."""

import re

import polars as pl

from stepscope.explain.trace.names import cut_name
from stepscope.explain.trace.profile import UNKNOWN

OUTSIDE_LAYERS = "(outside layers)"
# So many kernels are described; a recording with more names than that is a hostile one or makes a name for each call.
MOST_DESCRIBED = 2_000
_NUMBERED = re.compile(r"^(?:.*?\.)??(\d+)(?=\.|$)")


def label_layers(kernels: pl.DataFrame) -> pl.Series:
    """For each kernel its layer's name, null where it belongs to none or nobody knows. A layer is called by the path
    that leads to its number, so that the third of the encoder is not the third of the decoder."""
    known = kernels.select("module", "layer").unique()
    labels = [_label(module, layer) for module, layer in known.iter_rows()]
    table = known.with_columns(label=pl.Series(labels, dtype=pl.String))
    joined = kernels.select("module", "layer").join(
        table, on=["module", "layer"], how="left", nulls_equal=True, maintain_order="left"
    )
    return joined["label"]


def _label(module: str | None, layer: int | None) -> str | None:
    if layer is None:
        return None
    found = _NUMBERED.match(module or "")
    # Paths that are made of classes count their layers otherwise, and have no path to the number.
    return cut_name(found[0]) if found and int(found[1]) == layer else f"layer {layer}"


def name_layers(kernels: pl.DataFrame) -> pl.Series:
    """The same without nulls: a module outside of all layers is known to be there."""
    labels = label_layers(kernels)
    rest = pl.when(kernels["module"].is_not_null()).then(pl.lit(OUTSIDE_LAYERS)).otherwise(pl.lit(UNKNOWN))
    return pl.select(pl.coalesce(labels, rest).alias("label")).to_series()
