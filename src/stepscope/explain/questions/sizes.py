"""Questions that compare: inference with training, and a small model with a large one."""

import shlex
from collections.abc import Sequence

import msgspec
import polars as pl

from stepscope.explain.commands import write_command
from stepscope.explain.questions.answers import (
    Answer,
    in_phases,
    missing,
    name_profile,
    share_by,
    time_of,
    why_unknown,
)
from stepscope.explain.trace.profile import Profile, device_word
from stepscope.findings import Cell, Column, Table
from stepscope.spec import Factory, HuggingFace, ModelShape
from stepscope.units import say_list, say_share, say_time

_TWO_SIZES = (
    "stepscope profile --size small --out runs/small && stepscope profile --size large --out runs/large && "
    "stepscope explain runs/small runs/large --questions"
)
# What models call their number of layers; every config of `transformers` has the first.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth")
_MANY_LAYERS = 24


def _record_other(profile: Profile, mode: str) -> str:
    """The commands that record the same model in another mode and ask about both. A recording of stepscope is made
    again, because its directory is unknown; for another tool's file, its name is."""
    case, folder = profile.recording.manifest.case, f"runs/{mode}"
    record = f"stepscope profile --mode {mode} --out {folder}"
    if case is None:
        return _ask_with_file(profile, record, folder)
    again = f"stepscope profile --out runs/{case.workload.mode}"
    return f"{again} && {record} && stepscope explain runs/{case.workload.mode} {folder} --questions"


def _ask_with_file(profile: Profile, record: str, folder: str) -> str:
    file = profile.recording.manifest.file
    return f"{record} && stepscope explain {shlex.quote(file)} {folder} --questions" if file else record


def _ask_two_sizes(profile: Profile) -> str:
    """Another size of a model whose argument for the number of layers is known, else two built-in sizes. Only users
    know how to make the model of another tool's file larger."""
    case = profile.recording.manifest.case
    if case is None:
        return _ask_with_file(profile, "stepscope profile --out runs/large", "runs/large")
    larger = _deepen(case.workload.model)
    if larger is None:
        return _TWO_SIZES
    runs = {"runs/small": case.workload, "runs/large": msgspec.structs.replace(case.workload, model=larger)}
    record = [f"{write_command('profile', workload)} --out {folder}" for folder, workload in runs.items()]
    return " && ".join([*record, f"stepscope explain {' '.join(runs)} --questions"])


def _deepen(model: ModelShape | Factory | HuggingFace) -> Factory | HuggingFace | None:
    """The same model with more layers; None if its arguments do not say how."""
    if isinstance(model, ModelShape):
        return None
    arguments = dict(model.arguments)
    named = next((name for name in _LAYERS if isinstance(arguments.get(name), int)), None)
    if named is None and not isinstance(model, HuggingFace):
        return None
    name = named or _LAYERS[0]
    return msgspec.structs.replace(model, arguments=tuple((arguments | {name: _MANY_LAYERS}).items()))


def share_of_products(main: Profile, profiles: Sequence[Profile]) -> Answer:
    key = "share-of-products"
    question = "How does the GEMM share change from inference to training?"
    inference = next((one for one in profiles if _is_inference(one) and in_phases(one, "forward").height), None)
    if _is_inference(main):
        reason = f"`{name_profile(main)}` has no backward pass"
        return missing(key, question, reason, _record_other(main, "train"))
    forward, whole = in_phases(main, "forward"), main.kernels
    scopes = [("forward", "forward", forward), ("step", "whole step", whole)]
    if inference is not None:
        scopes.insert(0, ("inference", "inference", inference.kernels))
    if inference is None and (reason := why_unknown(main, "forward")):
        return missing(key, question, reason, "stepscope profile --mode train")
    shares = {name: _class_shares(kernels) for name, _, kernels in scopes}
    base = "inference" if inference is not None else "forward"
    before, after = shares[base].get("GEMM", 0.0), shares["step"].get("GEMM", 0.0)
    gains = {kind: shares["step"][kind] - shares[base].get(kind, 0.0) for kind in shares["step"] if kind != "GEMM"}
    risen = [kind for kind in sorted(gains, key=lambda kind: -gains[kind]) if gains[kind] >= 0.01][:3]
    moves = "falls" if after < before - 0.005 else "rises" if after > before + 0.005 else "stays the same"
    where = "inference" if inference is not None else "forward"
    sentence = (
        f"It {moves}: GEMMs take {say_share(before)} of {device_word(main)} time in {where} and {say_share(after)} in "
        "the whole step"
    )
    if risen and moves == "falls":
        sentence += "; " + say_list(f"{kind} +{gains[kind] * 100:.1f} points" for kind in risen)
    if "optimizer" not in main.kernels["phase"].to_list():
        sentence += "; this recording has no optimizer step"
    named = dict.fromkeys(kind for each in shares.values() for kind in each)
    kinds = sorted(named, key=lambda kind: (-shares["step"].get(kind, 0.0), kind))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            kind,
            *(shares[name].get(kind, 0.0) for name, _, _ in scopes),
            100 * (shares["step"].get(kind, 0.0) - shares[base].get(kind, 0.0)),
        )
        for kind in kinds
    )
    columns = [Column(key=f"{name}_share", label=label, kind="share") for name, label, _ in scopes]
    return Answer(
        key=key,
        question=question,
        figure=f"{say_share(before)} → {say_share(after)}",
        sentence=sentence + ".",
        evidence=Table(
            title=f"Share of {device_word(main)} time by class",
            columns=(
                Column(key="class", label="class"),
                *columns,
                Column(key="change_points", label="change in points", kind="number"),
            ),
            rows=rows,
        ),
        command="" if inference is not None else _record_other(main, "inference"),
    )


def _is_inference(profile: Profile) -> bool:
    return not (profile.kernels["phase"] == "backward").any()


def _class_shares(kernels: pl.DataFrame) -> dict[str, float]:
    return dict(share_by(kernels, "class").select("class", "share").iter_rows())


def small_against_large(profiles: Sequence[Profile]) -> Answer:
    key, question = "small-and-large", "How do a small and a large model differ?"
    sized = _by_size(profiles)
    if sized is None:
        reason = (
            "this needs two recordings of models of different sizes, in the same mode"
            if len(profiles) == 1
            else "the recordings do not have two model sizes in the same mode"
        )
        return missing(key, question, reason, _ask_two_sizes(profiles[0]))
    small, large, ordered = sized
    a, b = _traits(small), _traits(large)
    products = [f"{say_share(float(one['GEMM share'] or 0))}" for one in (a, b)]
    tiles = f", most common GEMM tile {a['GEMM tiles']} → {b['GEMM tiles']}"
    idle = [say_share(float(one["idle"])) for one in (a, b) if one["idle"] is not None]
    idles = f"idle {idle[0]} → {idle[1]} of wall time, " if len(idle) == 2 else ""
    kernel = [say_time(float(one["kernel us"] or 0) * 1e3) for one in (a, b)]
    sentence = (
        f"GEMMs {products[0]} → {products[1]} of {device_word(small)} time, {idles}"
        f"mean kernel {kernel[0]} → {kernel[1]}" + (tiles if a["GEMM tiles"] and b["GEMM tiles"] else "")
    )
    sentence += f"; from {name_profile(small)} to {name_profile(large)}"
    if not ordered:
        sentence += " in the order given, because the recordings do not have model sizes"
    return Answer(
        key=key,
        question=question,
        figure=f"GEMMs {products[0]} → {products[1]}",
        sentence=sentence + ".",
        evidence=_traits_table(small, large, a, b),
    )


def _by_size(profiles: Sequence[Profile]) -> tuple[Profile, Profile, bool] | None:
    """The smallest and the largest model by parameters, or two recordings in the given order if these are unknown."""
    known = [one for one in profiles if one.recording.manifest.parameters is not None]
    if len(known) >= 2:
        for mode in (False, True):
            same = [one for one in known if _is_inference(one) is mode]
            ranked = sorted(same, key=lambda one: one.recording.manifest.parameters or 0)
            if ranked and ranked[0].recording.manifest.parameters != ranked[-1].recording.manifest.parameters:
                return ranked[0], ranked[-1], True
        return None
    if len(profiles) == 2 and not known and _is_inference(profiles[0]) is _is_inference(profiles[1]):
        return profiles[0], profiles[1], False
    return None


def _traits(profile: Profile) -> dict[str, Cell]:
    kernels, steps = profile.kernels, profile.num_steps
    shares = _class_shares(kernels)
    return {
        "GEMM share": shares.get("GEMM", 0.0),
        "GEMM tiles": _tiles(kernels),
        "idle": None if profile.is_serialized else profile.idle_share,
        "kernel us": time_of(kernels) / max(1, kernels.height) / 1e3,
        "kernels per step": kernels.height / steps,
        "step ms": profile.step_ns / 1e6,
        **{f"share of {kind}": share for kind, share in shares.items() if kind != "GEMM" and share >= 0.01},
    }


def _tiles(kernels: pl.DataFrame) -> str | None:
    """The GEMM tile with the most time; None if kernel names have no tiles."""
    tiled = kernels.filter((pl.col("class") == "GEMM") & pl.col("tile_m").is_not_null())
    tiles = share_by(tiled, "tile_m", "tile_n").select("tile_m", "tile_n")
    return "×".join(map(str, tiles.row(0))) if tiles.height else None


def _traits_table(small: Profile, large: Profile, a: dict[str, Cell], b: dict[str, Cell]) -> Table:
    names = list(dict.fromkeys([*a, *b]))
    return Table(
        title="Small and large model",
        columns=(
            Column(key="trait", label=""),
            Column(key="small", label=name_profile(small)),
            Column(key="large", label=name_profile(large)),
        ),
        rows=tuple((_label(name), _say_trait(name, a.get(name)), _say_trait(name, b.get(name))) for name in names),
    )


_LABELS = {
    "GEMM share": "GEMM share",
    "GEMM tiles": "top GEMM tile, by time",
    "idle": "idle, of wall time",
    "kernel us": "mean kernel",
    "kernels per step": "kernels per step",
    "step ms": "wall time per step",
}


def _label(name: str) -> str:
    return _LABELS.get(name, name)


def _say_trait(name: str, value: Cell) -> Cell:
    if not isinstance(value, float | int):
        return value if value is not None else ("–" if name in ("GEMM tiles", "idle") else "under 1%")
    match name:
        case "kernel us":
            return say_time(value * 1e3)
        case "step ms":
            return say_time(value * 1e6)
        case "kernels per step":
            return f"{value:,.0f}"
        case _:
            return say_share(value)
