"""Rules about many small kernels where few would do."""

from typing import get_args

import numpy as np
import polars as pl

from stepscope.cost import ADAM_BYTES, SGD_BYTES
from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, POINTWISE, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule, compile_model, settle, workload_of
from stepscope.recording.store import Manifest
from stepscope.spec import Optimizer

# A fused chain still reads its inputs and writes its result, and a sum over rows needs a second pass. Assumed.
# Without modules, a row of kernels may be several chains.
LEAST_OF_CHAIN, LEAST_OF_ROW = 0.2, 0.35
# Of the host's time in an optimizer that launches kernels tensor by tensor, what a fused one still needs to walk over
# the tensors: 1.8 ms until its launch, of 14 to 19 ms (219 tensors, 8 kernels each, H200).
FUSED_UPDATE_HOST_SHARE = 0.12
ADAM_UNFUSED_BYTES = 80
LEAST_LAYOUT_SHARE = 0.02
_COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
# Operators whose helper kernels (casts and layout changes inside of a library) are not the user's to fuse.
_LIBRARY = r"convolution|linear$|mm$|attention|c10d"
_ADAM = r"(?i)adam|addcdiv|addcmul"
# Optimizers that read and write what Adam does: values of `--optimizer` and names of classes, in lower case. Adamax and
# Adam8bit are not among them.
_ADAM_NAMES = ("adam", "adamw", "adamw-torch", "adamw-fused", "fusedadam", "fusedadamw")
_MANY_TENSORS = r"(?i)foreach|multi_tensor"
_FUSED = r"(?i)fused_?adam|FusedAdam|fused_?sgd|FusedSgd|fused_adagrad"


def find_chains(evidence: StepEvidence) -> Hit | None:
    compiled = evidence.profile.recording.manifest.compiled or bool(evidence.kernels["is_fused"].any())
    chains = _chains(evidence.kernels)
    if compiled or not chains.height:
        return None
    longest, total = pl.col("time_ns").max(), pl.col("time_ns").sum()
    least = pl.when(pl.col("module").first().is_null()).then(LEAST_OF_ROW).otherwise(LEAST_OF_CHAIN) * total
    fused = chains.with_columns(fused_ns=pl.max_horizontal(longest, least).over("group"))
    gain = evidence.merged(fused, host_share=evidence.compiled_host_share)
    where = _name_costliest(fused)
    count, num = fused["group"].n_unique() / evidence.num_steps, fused.height / evidence.num_steps
    text = (
        f"{num:,.0f} kernels a step in {count:,.0f} chains, {ms(evidence.per_step(fused))} of GPU time; as one kernel "
        f"a chain about {ms(evidence.per_step(fused) - gain.gpu_ns)}{where}"
    )
    return settle(evidence, gain, text)


def _chains(kernels: pl.DataFrame) -> pl.DataFrame:
    """row, group, time_ns, module of the kernels that stand in a chain of two or more."""
    small = (
        pl.col("class").is_in(POINTWISE)
        & (pl.col("kind") == "kernel")
        & ~pl.col("is_fused")
        & ~pl.col("op").fill_null("").str.contains(_LIBRARY)
        & (pl.col("phase").fill_null("") != "optimizer")
    )
    ordered = kernels.with_columns(small=small).sort("stream", "row")
    same = pl.all_horizontal(
        *(pl.col(name).eq_missing(pl.col(name).shift()) for name in ("stream", "small", "module", "phase", "step"))
    )
    marked = ordered.with_columns(group=(~same).fill_null(value=True).cum_sum()).filter("small")
    return marked.filter(pl.len().over("group") > 1).select("row", "group", "time_ns", "module", "phase")


def _name_costliest(chains: pl.DataFrame) -> str:
    """The kind of module in which most of it is, where modules are known."""
    kind = (
        pl.col("module")
        .str.replace(r"^.*\.\d+\.", "")
        .str.replace_all(r"_\d+", "")
        .str.replace(r"^.*\.(\w*\.\w+)$", "$1")
    )
    by_kind = chains.filter(pl.col("module").is_not_null()).group_by(kind.alias("kind"), "phase")
    named = by_kind.agg(pl.col("time_ns").sum()).sort("time_ns", descending=True)
    if not named.height:
        return ""
    share = named["time_ns"][0] / max(1, chains["time_ns"].sum())
    return f"; most of it in the {named['phase'][0] or 'step'} of {named['kind'][0]} ({share:.0%})"


def _is_cast() -> pl.Expr:
    """A copy whose target and source differ in type: by the operator's types where they were recorded."""
    kinds = pl.col("dtypes").str.extract_groups(r'^\[\s*"([^"]+)",\s*"([^"]+)"')
    target, source = kinds.struct[0], kinds.struct[1]
    known = (pl.col("op") == "aten::copy_") & target.is_not_null()
    return pl.when(known).then(target != source).otherwise(pl.col("is_cast"))


def _copies(evidence: StepEvidence) -> pl.DataFrame:
    """Copies that a program asked for; where no operator is known, PyTorch's own kernels."""
    asked = pl.when(pl.col("op").is_null()).then(pl.col("library") == "ATen").otherwise(pl.col("op").is_in(_COPIES))
    outside = pl.col("phase").fill_null("") != "optimizer"
    copies = (pl.col("class") == "copy") & ~pl.col("is_fused") & (pl.col("kind") == "kernel") & outside & asked
    return evidence.kernels.filter(copies).with_columns(cast=_is_cast())


def find_layout_copies(evidence: StepEvidence) -> Hit | None:
    copies = _copies(evidence).filter(~pl.col("cast"))
    time = evidence.per_step(copies)
    if time < LEAST_LAYOUT_SHARE * evidence.step_ns:
        return None
    gain = evidence.gain_of(evidence.durations, evidence.mark(copies))
    backward = evidence.per_step(copies.filter(pl.col("phase") == "backward")) / time
    text = f"{copies.height / evidence.num_steps:,.0f} copies a step that change only the layout, {ms(time)}"
    if copies["phase"].is_not_null().all():
        text += f", {backward:.0%} of it in backward"
    return settle(evidence, gain, text)


def find_casts(evidence: StepEvidence) -> Hit | None:
    casts = _copies(evidence).filter("cast")
    if not casts.height:
        return None
    time = evidence.per_step(casts)
    gain = evidence.gain_of(evidence.durations, evidence.mark(casts))
    two_sizes = pl.col("shapes").str.replace_all(" ", "").str.contains(r"^\[\[\d+,\d+\],")
    to_half = pl.col("dtypes").str.contains(r'^\[\s*"c10::(?:BFloat16|Half)",\s*"float"')
    weights = casts.filter((pl.col("phase") == "forward") & two_sizes & to_half)
    text = f"{casts.height / evidence.num_steps:,.0f} casts a step, {ms(time)}"
    if weights.height:
        text += f"; {ms(evidence.per_step(weights))} of it casts weights anew in each step"
    return settle(evidence, gain, text)


def find_unfused_optimizer(evidence: StepEvidence) -> Hit | None:
    update = evidence.kernels.filter(
        (pl.col("phase") == "optimizer")
        & pl.col("class").is_in(["optimizer", *POINTWISE])
        & (pl.col("kind") == "kernel")
        & ~pl.col("is_fused")
    )
    if not update.height or update["name"].str.contains(_FUSED).any() or update["op"].str.contains(_FUSED).any():
        return None
    fused = _fused_update_ns(evidence, update)
    if fused is None:
        return None
    time = evidence.per_step(update)
    groups = update.select("row", group="step", fused_ns=pl.lit(min(fused, time)))
    host_share = np.ones(evidence.kernels.height)
    # Where a launch serves many tensors, the host's time is its walk over them, which a fused optimizer makes as well.
    one_by_one = update.filter(~(pl.col("op").fill_null("") + pl.col("name")).str.contains(_MANY_TENSORS))
    host_share[one_by_one["row"].to_numpy()] = FUSED_UPDATE_HOST_SHARE
    gain = evidence.merged(groups, host_share=host_share, after_all=True)
    text = (
        f"{update.height / evidence.num_steps:,.0f} kernels a step update the weights in {ms(time)} of GPU time; one "
        f"pass over the weights takes {ms(min(fused, time))}"
    )
    return settle(evidence, gain, text)


def _fused_update_ns(evidence: StepEvidence, update: pl.DataFrame) -> float | None:
    """How long a fused update takes; None where nothing says what is updated."""
    is_adam = bool(
        update["op"].str.contains(_ADAM).any()
        or update["name"].str.contains(_ADAM).any()
        or evidence.profile.recording.ranges["name"].str.contains(r"(?i)Optimizer\.step#AdamW?\.").any()
    )
    case, manifest = evidence.case, evidence.profile.recording.manifest
    hardware, parameters = evidence.hardware, manifest.parameters
    if parameters and hardware is not None and hardware.bandwidth:
        name = manifest.optimizer or (case.workload.optimizer if case else None) or ""
        is_adam = name.lower() in _ADAM_NAMES if name else is_adam
        if name and not is_adam and name.lower() != "sgd":
            return None  # a factory's own: how much of it a fused one would be is not known
        moved = parameters * (ADAM_BYTES if is_adam else SGD_BYTES)
        return moved / (hardware.bandwidth * BANDWIDTH_SHARE) * 1e9
    return evidence.per_step(update) * ADAM_BYTES / ADAM_UNFUSED_BYTES if is_adam else None


def _fuse_optimizer(manifest: Manifest) -> dict[str, object]:
    """Not of a factory's own, which no flag replaces."""
    if manifest.optimizer not in (None, *get_args(Optimizer)):
        return {}
    return {"optimizer": "adamw-fused"} if workload_of(manifest).optimizer in ("adamw", "adamw-torch", None) else {}


RULES = (
    Rule(
        code="SS003",
        title="chains of small operations that could be one kernel",
        check=find_chains,
        meaning="""Each elementwise operation, copy and sum is a kernel of its own that reads its input from memory and
            writes its result back. Fused, the intermediate results never leave the chip.""",
        seen="""Two or more such kernels in a row on one stream, of one module and phase, outside of the optimizer, not
            from a compiler.""",
        saving="""A chain is taken to cost what its longest kernel does, and at least a fifth of itself (a third where
            modules are not known): a fused kernel still reads its inputs and writes its result. These shares are
            assumed. Replayed with the host's time that SS001 has, to the same estimates and errors where the host is
            the limit. Where the GPU is, it was not measured. Overlaps with SS001, SS004, SS006 and SS008.""",
        builtin="--compile",
        own=(
            "model = torch.compile(model)",
            "# or a fused layer: torch.nn.RMSNorm, F.scaled_dot_product_attention, a kernel of Liger's",
        ),
        change=compile_model,
    ),
    Rule(
        code="SS006",
        title="copies between layouts",
        check=find_layout_copies,
        meaning="""A tensor that is transposed, permuted or expanded is copied to be contiguous, often because of a
            view(), reshape() or contiguous(), or because a gradient arrives in the other layout.""",
        seen="Copies on the device that do not change the data type, at least 2 % of the step.",
        saving="""All of their time, which is the most that can be had: what reads the tensor next then reads it
            strided.""",
        builtin="--compile, which fuses them into their neighbours",
        own=(
            "q, k, v = qkv.unbind(2)  # choose the layout in which the next operation reads, once",
            "model = model.to(memory_format=torch.channels_last)  # convolutions",
        ),
        paste="model = torch.compile(model)  # copies become part of their neighbours",
        change=compile_model,
    ),
    Rule(
        code="SS007",
        title="an optimizer of many kernels",
        check=find_unfused_optimizer,
        meaning="""AdamW needs 28 bytes a parameter: read weight, gradient and two averages, write all but the gradient.
            Operation by operation it moves about 80, in thousands of launches.""",
        seen="Elementwise or foreach kernels in the optimizer's phase, none of them fused.",
        saving="""The optimizer's time less 28 bytes a parameter (12 for SGD) at 89 % of the bandwidth; where the number
            of parameters is not known and the operations are Adam's, 65 % of it. Replayed: kernels one by one cost the
            host eight times what the fused one does, and kernels for many tensors the same. 9.0 ms were estimated where
            the optimizer's phase went from 19.0 to 4.6 ms, in the fastest steps from 13.9 to 4.4; the steps' own times
            varied by more.""",
        builtin="--optimizer adamw-fused",
        own=(
            "optimizer = torch.optim.AdamW(model.parameters(), fused=True)",
            "# gradient clipping: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)",
        ),
        paste="optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
        change=_fuse_optimizer,
    ),
    Rule(
        code="SS008",
        title="casts between data types",
        check=find_casts,
        meaning="""Under autocast, weights are cast to 16 bits anew in each step and activations wherever a 32-bit
            operation meets a 16-bit one.""",
        seen="Copies on the device whose source and target differ in data type.",
        saving="""All of their time. Compiling fuses the casts of activations; those of weights go only if the weights
            are kept in 16 bits, with a 32-bit copy in the optimizer.""",
        builtin="--compile",
        own=(
            "model = torch.compile(model)  # casts become part of their neighbours",
            "model = model.to(torch.bfloat16)  # with an optimizer that keeps fp32 weights of its own",
        ),
        change=compile_model,
    ),
)
