"""Rules about many small kernels that could be few."""

from dataclasses import replace
from typing import get_args

import numpy as np
import polars as pl

from stepscope.cost import ADAM_BYTES, SGD_BYTES
from stepscope.explain.rules.evidence import BANDWIDTH_SHARE, POINTWISE, Gain, StepEvidence, ms
from stepscope.explain.rules.rule import COMPILE, Hit, Rule, compile_model, count_per_step, settle, workload_of
from stepscope.recording.store import Manifest
from stepscope.spec import Optimizer
from stepscope.units import say_percent

# The least that fusing leaves of a chain's time: a fused kernel still reads its inputs and writes its result, and a sum
# over rows needs a second pass. Both shares are assumptions. Without modules, a run of kernels may be several chains.
LEAST_OF_CHAIN, LEAST_OF_ROW = 0.2, 0.35
# The share of an optimizer's CPU time that a fused one still needs to walk over the tensors, compared with one that
# launches kernels tensor by tensor: 1.8 ms until its launch, of 14 to 19 ms (219 tensors, 8 kernels each, H200).
FUSED_UPDATE_HOST_SHARE = 0.12
LEAST_UPDATE_SHARE = 0.05  # of the step, to report an update whose fused version is unknown
LEAST_LAYOUT_SHARE = 0.02
_COPIES = ("aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy")
# Operators whose helper kernels (casts and layout changes inside a library) the user cannot fuse.
_LIBRARY = r"convolution|linear$|mm$|attention|c10d"
_ADAM = r"(?i)adam|addcdiv|addcmul"
# Bytes per parameter in one pass, and as PyTorch's separate operations.
_ADAM_MOVES = (ADAM_BYTES, 80)
_ADAGRAD_MOVES = (20, 48)
# SGD's operations depend on its arguments: momentum is a `mul_`, and weight decay an `add` to a new tensor.
_MOMENTUM, _DECAY = r"::(?:_foreach_)?mul_$", r"::(?:_foreach_)?add$"
_SGD_MOVES = {
    (False, False): (SGD_BYTES, 12),
    (False, True): (SGD_BYTES, 24),
    (True, False): (20, 32),
    (True, True): (20, 44),
}
_MANY_TENSORS = r"(?i)foreach|multi_tensor"
# One kernel for all tensors: PyTorch's (`fused=True`), Apex's and DeepSpeed's (`AdamFunctor`), bitsandbytes'.
_FUSED = r"(?i)fused_?(?:adam|sgd|adagrad|lamb)|(?:adam|sgd|lamb|adagrad|novograd)\w*functor|koptimizer(?:32|8|static)"
# Optimizers of PyTorch that have the argument `fused`, and others that have `foreach`.
_HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_HAS_FOREACH = ("Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
# Values of `--optimizer`.
_CLASSES = {"adamw": "AdamW", "adamw-torch": "AdamW", "adamw-fused": "AdamW", "adamw-onelaunch": "AdamW", "sgd": "SGD"}
_OPTIMIZER_STEP = r"^Optimizer\.step#(\w+)\."


def find_chains(evidence: StepEvidence) -> Hit | None:
    chains = _chains(evidence.kernels)
    if evidence.is_compiled or not chains.height:
        return None
    longest, total = pl.col("time_ns").max(), pl.col("time_ns").sum()
    least = pl.when(pl.col("module").first().is_null()).then(LEAST_OF_ROW).otherwise(LEAST_OF_CHAIN) * total
    fused = chains.with_columns(fused_ns=pl.max_horizontal(longest, least).over("group"))
    # The CPU time of these launches only: SS001 is about all of them.
    in_chain = evidence.mark(fused)
    gain = evidence.merged(fused, host_share=np.where(in_chain, evidence.compiled_host_share, 1.0))
    where = _name_costliest(fused)
    kernels = count_per_step(evidence, fused.height, "small kernel")
    chains_per_step = fused["group"].n_unique() / evidence.num_steps
    text = (
        f"the kernels run in {chains_per_step:,.0f} chains and take {ms(evidence.per_step(fused))} of GPU time; one "
        f"kernel per chain would take about {ms(evidence.per_step(fused) - gain.gpu_ns)}{where}"
    )
    return settle(evidence, gain, text, title=f"{kernels} could be fused")


def _chains(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return row, group, time_ns and module of the kernels in chains of two or more."""
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
    """Return the kind of module that takes most of the time, if modules are known."""
    kind = (
        pl.col("module")
        .str.replace(r"^.*\.\d+\.", "")
        .str.replace_all(r"_\d+", "")
        .str.replace(r"^.*\.(\w*\.\w+)$", "$1")
    )
    by_kind = chains.filter(pl.col("module").is_not_null()).group_by(kind.alias("kind"), "phase")
    named = by_kind.agg(pl.col("time_ns").sum()).sort("time_ns", "kind", "phase", descending=[True, False, False])
    if not named.height:
        return ""
    share = named["time_ns"][0] / max(1, chains["time_ns"].sum())
    return f"; {say_percent(share)} of it in the {named['phase'][0] or 'step'} of {named['kind'][0]}"


def _is_cast() -> pl.Expr:
    """Whether target and source of a copy differ in dtype: by the operator's dtypes if they were recorded."""
    kinds = pl.col("dtypes").str.extract_groups(r'^\[\s*"([^"]+)",\s*"([^"]+)"')
    target, source = kinds.struct[0], kinds.struct[1]
    known = (pl.col("op") == "aten::copy_") & target.is_not_null()
    return pl.when(known).then(target != source).otherwise(pl.col("is_cast"))


def _copies(evidence: StepEvidence) -> pl.DataFrame:
    """Return the copies that the program asked for and that run as PyTorch's own kernels: a compiler can fuse these,
    unlike those of a hand-written extension."""
    asked = (pl.col("library") == "ATen") & pl.col("op").is_in(_COPIES).fill_null(value=True)
    outside = pl.col("phase").fill_null("") != "optimizer"
    copies = (pl.col("class") == "copy") & ~pl.col("is_fused") & (pl.col("kind") == "kernel") & outside & asked
    return evidence.kernels.filter(copies).with_columns(cast=_is_cast())


def find_layout_copies(evidence: StepEvidence) -> Hit | None:
    copies = _copies(evidence).filter(~pl.col("cast"))
    time = evidence.per_step(copies)
    if time < LEAST_LAYOUT_SHARE * evidence.step_ns:
        return None
    gain = _fused_away(evidence, copies)
    backward = evidence.per_step(copies.filter(pl.col("phase") == "backward")) / time
    count = count_per_step(evidence, copies.height, "copy", "copies")
    text = f"the copies take {ms(time)} of GPU time"
    if copies["phase"].is_not_null().all():
        text += f", {say_percent(backward)} of it in backward"
    return _unless_compiled(evidence, settle(evidence, gain, text, title=f"Layout changes: {count}"))


def _fused_away(evidence: StepEvidence, copies: pl.DataFrame) -> Gain:
    """Return the gain if compiled code does without these kernels."""
    change = evidence.replay.unchanged()
    change.removed = evidence.mark(copies)
    change.time_ns[change.removed] = 0.0
    change.host_share = np.where(change.removed, evidence.compiled_host_share, 1.0)
    return evidence.gain(change)


def _unless_compiled(evidence: StepEvidence, hit: Hit | None) -> Hit | None:
    """Return the hit, as a remark if the model is compiled already."""
    return replace(hit, action="", paste="") if hit is not None and evidence.is_compiled else hit


def find_casts(evidence: StepEvidence) -> Hit | None:
    casts = _copies(evidence).filter("cast")
    if not casts.height:
        return None
    time = evidence.per_step(casts)
    gain = _fused_away(evidence, casts)
    two_sizes = pl.col("shapes").str.replace_all(" ", "").str.contains(r"^\[\[\d+,\d+\],")
    to_half = pl.col("dtypes").str.contains(r'^\[\s*"c10::(?:BFloat16|Half)",\s*"float"')
    weights = casts.filter((pl.col("phase") == "forward") & two_sizes & to_half)
    count = count_per_step(evidence, casts.height, "cast")
    text = f"the casts take {ms(time)} of GPU time"
    if weights.height:
        text += f"; {ms(evidence.per_step(weights))} of it casts the weights again in every step"
    return _unless_compiled(evidence, settle(evidence, gain, text, title=f"Dtype conversions: {count}"))


def find_unfused_optimizer(evidence: StepEvidence) -> Hit | None:
    update = evidence.kernels.filter(
        (pl.col("phase") == "optimizer")
        & pl.col("class").is_in(["optimizer", *POINTWISE])
        & (pl.col("kind") == "kernel")
        & ~pl.col("is_fused")
    )
    if not update.height or _is_fused(update):
        return None
    name, time = _name_optimizer(evidence), evidence.per_step(update)
    # If a launch serves many tensors, the CPU time is the walk over them, which a fused optimizer needs as well.
    one_by_one = update.filter(~(pl.col("op").fill_null("") + pl.col("name")).str.contains(_MANY_TENSORS))
    title = f"Optimizer launches {count_per_step(evidence, update.height, 'kernel')}"
    text = f"the update takes {ms(time)} of GPU time"
    action, paste = _update_at_once(name, one_by_one=bool(one_by_one.height))
    fused = _fused_update_ns(evidence, update, name)
    if fused is None:
        if time < LEAST_UPDATE_SHARE * evidence.step_ns or update["op"].n_unique() == 1:
            return None
        text += ", in several passes over the weights"
        return Hit(title=title, evidence=text, about_ns=time, action=action, paste=paste)
    groups = update.select("row", group="step", fused_ns=pl.lit(min(fused, time)))
    host_share = np.ones(evidence.kernels.height)
    host_share[one_by_one["row"].to_numpy()] = FUSED_UPDATE_HOST_SHARE
    gain = evidence.merged(groups, host_share=host_share, after_all=True)
    text += f"; one pass over the weights would take {ms(fused)}" if fused < time else ", in many launches"
    hit = settle(evidence, gain, text, title=title)
    return replace(hit, action=action, paste=paste) if hit is not None else None


def _is_fused(update: pl.DataFrame) -> bool:
    return bool(update["name"].str.contains(_FUSED).any() or update["op"].str.contains(_FUSED).any())


def _name_optimizer(evidence: StepEvidence) -> str:
    """Return the optimizer's class, empty if unknown. Of several, the one whose update can be fused, or all if none
    can."""
    case, manifest = evidence.case, evidence.profile.recording.manifest
    if name := manifest.optimizer or (case.workload.optimizer if case else None):
        return _CLASSES.get(name, name)
    names = (
        evidence.profile.recording.ranges["name"].str.extract(_OPTIMIZER_STEP).drop_nulls().unique().sort().to_list()
    )
    fused = [name for name in names if name in _HAS_FUSED]
    if fused:
        return fused[0] if len(fused) == 1 else ""
    return " and ".join(names)


def _update_at_once(name: str, *, one_by_one: bool) -> tuple[str, str]:
    """Return what to do, and the code for it, with the optimizer that the run has: another one computes something
    else."""
    if name in _HAS_FUSED:
        paste = f"optimizer = torch.optim.{name}(model.parameters(), lr=lr, fused=True)  # and the other arguments"
        return "Use `fused=True`", paste
    if not name:
        return "Use `fused=True`", _FUSED_TRUE
    if one_by_one and name in _HAS_FOREACH:
        paste = f"optimizer = torch.optim.{name}(model.parameters(), lr=lr, foreach=True)  # and the other arguments"
        return f"Use `foreach=True`, because `fused` is not an argument of {name}", paste
    return f"Compile the update, because `fused` is not an argument of {name}", _COMPILED_UPDATE


def _fused_update_ns(evidence: StepEvidence, update: pl.DataFrame, name: str) -> float | None:
    """Return how long a fused update takes, None if the recording does not say what is updated."""
    moves = _find_moves(update, name)
    if moves is None:
        return None
    one_pass, separate = moves
    hardware, parameters = evidence.hardware, evidence.profile.recording.manifest.parameters
    if parameters and hardware is not None and hardware.bandwidth:
        return parameters * one_pass / (hardware.bandwidth * BANDWIDTH_SHARE) * 1e9
    return evidence.per_step(update) * one_pass / separate


def _find_moves(update: pl.DataFrame, name: str) -> tuple[int, int] | None:
    """Return the bytes per parameter that a fused update and this one move, None for an unknown optimizer."""
    ops = update["op"].drop_nulls()
    if name == "SGD":
        return _SGD_MOVES[bool(ops.str.contains(_MOMENTUM).any()), bool(ops.str.contains(_DECAY).any())]
    if name == "Adagrad":
        return _ADAGRAD_MOVES
    is_adam = bool(ops.str.contains(_ADAM).any() or update["name"].str.contains(_ADAM).any())
    return _ADAM_MOVES if name in ("Adam", "AdamW") or (not name and is_adam) else None


def _fuse_optimizer(manifest: Manifest) -> dict[str, object]:
    """An optimizer that a factory brings cannot be replaced by a flag."""
    if manifest.optimizer not in (None, *get_args(Optimizer)):
        return {}
    return {"optimizer": "adamw-fused"} if workload_of(manifest).optimizer in ("adamw", "adamw-torch", None) else {}


_FUSED_TRUE = (
    "optimizer = Optimizer(model.parameters(), lr=lr, fused=True)"
    "  # the class that you use: Adam, AdamW, SGD and Adagrad have `fused`"
)
_COMPILED_UPDATE = (
    "update = torch.compile(optimizer.step)  # once\n"
    "update()  # instead of optimizer.step(); a learning rate in a tensor, lr=torch.tensor(lr), avoids recompiling"
)

RULES = (
    Rule(
        code="SS003",
        title="Small kernels could be fused",
        action="Compile the model",
        check=find_chains,
        meaning="""Each elementwise operation, copy and sum is a separate kernel that reads its input from memory and
            writes its result back. In a fused kernel, intermediate results never leave the chip.""",
        seen="""Two or more such kernels in a row on one stream, in the same module and phase, outside the optimizer and
            not generated by a compiler.""",
        saving="""A fused chain is assumed to take as long as its longest kernel, and at least a fifth of the chain (a
            third if modules are unknown), because it still reads its inputs and writes its result. The launches of the
            chains cost as much CPU time as in SS001; the other launches, which compiling makes cheaper as well, are
            counted there. For GPU-bound steps the estimate was not checked.""",
        builtin="--compile",
        own=(
            COMPILE,
            "# or use a fused layer: torch.nn.RMSNorm, F.scaled_dot_product_attention, a Liger kernel",
        ),
        change=compile_model,
    ),
    Rule(
        code="SS006",
        title="Copies only change the memory layout",
        action="Compile the model, which fuses the copies into neighboring kernels",
        check=find_layout_copies,
        meaning="""A transposed, permuted or expanded tensor is copied to make it contiguous. The usual causes are
            view(), reshape() and contiguous(), or a gradient that arrives in another layout.""",
        seen="PyTorch's own copy kernels that keep the dtype and take at least 2% of the step.",
        saving="All of their time. This is an upper bound: the next operation then reads the tensor with strides.",
        builtin="--compile, which fuses the copies into neighboring kernels",
        own=(
            "q, k, v = qkv.unbind(2)  # choose the layout that the next operation reads",
            "model = model.to(memory_format=torch.channels_last)  # for convolutions",
        ),
        paste=COMPILE,
        change=compile_model,
    ),
    Rule(
        code="SS007",
        title="Optimizer launches many small kernels",
        action="Use `fused=True`",
        check=find_unfused_optimizer,
        meaning="""AdamW needs 28 bytes per parameter: it reads the weight, the gradient and two averages, and writes
            all but the gradient. As separate operations it moves about 80 bytes per parameter, in thousands of
            launches.""",
        seen="""Elementwise or foreach kernels in the optimizer phase, none of them a fused update (of PyTorch, Apex,
            DeepSpeed or bitsandbytes). The class of the optimizer, if it was recorded, decides what to do: Adam, AdamW,
            SGD and Adagrad have the argument `fused`. For others, at least 5% of the step.""",
        saving="""The optimizer's time minus 28 bytes per parameter (12 for SGD, 20 with momentum and for Adagrad) at
            89% of the bandwidth. If the number of parameters is unknown, the bytes of one pass are compared with those
            of PyTorch's separate operations: 28 of 80 for Adam, 20 of 48 for Adagrad, 20 of 32 for SGD with momentum,
            of 44 with weight decay as well. For optimizers without `fused` the saving is not estimated. In the replay,
            separate kernels cost the CPU eight times as much as a fused one, and foreach kernels the same. In one check
            the estimate was 9.0 ms, and the optimizer phase went from 19.0 to 4.6 ms (from 13.9 to 4.4 ms in the
            fastest steps); the step times varied by more than that.""",
        builtin="--optimizer adamw-fused",
        own=(
            "optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # or Adam, SGD, Adagrad",
            "update = torch.compile(optimizer.step)  # for other optimizers",
            "# for gradient clipping: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)",
        ),
        paste=_FUSED_TRUE,
        change=_fuse_optimizer,
    ),
    Rule(
        code="SS008",
        title="Dtype conversions run as separate kernels",
        action="Compile the model, which fuses the casts into neighboring kernels",
        check=find_casts,
        meaning="""Under autocast, weights are cast to 16 bits again in every step, and activations wherever a 32-bit
            operation meets a 16-bit one.""",
        seen="PyTorch's own copy kernels whose source and target have different dtypes.",
        saving="""All of their time. Compiling fuses the casts of activations. The casts of weights disappear only if
            the weights are kept in 16 bits, with a 32-bit copy in the optimizer.""",
        builtin="--compile",
        own=(
            COMPILE,
            "model = model.to(torch.bfloat16)  # with an optimizer that keeps fp32 weights",
        ),
        change=compile_model,
    ),
)
