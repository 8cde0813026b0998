"""The result: each field's value, whether it is certain, its alternatives, and its evidence.

A value is certain if all candidates that explain as many element counts as the best one, or one fewer, agree on it.
A wrong value must never be called certain: with little evidence there are many alternatives, with none the value is
null.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from stepscope.recording.readers.ncu import CUT_SHORT
from stepscope.recover.evidence.completeness import StructureDoubt
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.evidence.structure import Structure
from stepscope.recover.facts import Window
from stepscope.recover.shape import CORE_FIELDS, LAYER_SIZES, SIZES, Core, Cores, RunShape
from stepscope.recover.solve.candidates import Solution
from stepscope.recover.solve.dependent_sizes import (
    LARGEST_VOCABULARY,
    WIDEST,
    WIDEST_FEED_FORWARD,
    Sized,
    find_feed_forward,
    find_vocabulary,
)
from stepscope.recover.solve.parameters import Item, Style, itemise, total
from stepscope.recover.solve.priors import Effort
from stepscope.recover.solve.search import FileFit, FittedReading, fit_file, join_files

Value = int | str | None
FIELDS = (*SIZES, "dtype", "parameters")
_SLACK = 1  # how many more counts than the best candidate the truth may leave unexplained
# The counts that the best candidate may leave unexplained if a value is to be certain: one, or this share.
_MOST_UNEXPLAINED = 0.1
_FEWEST_EXPLAINED = 0.8  # share of the counts, below which no size is certain
_MOST_WORK = 100_000_000  # units of effort for all files together: about 20 s on a slow machine, and under 1 GB
# The fields that stay open if attention admits nearly all sizes, with their upper bounds. None: the number of tokens.
_OPEN: dict[str, int | None] = {"num_heads": 256, "num_kv_heads": 256, "d_head": 512, "batch": None, "context": None}
# The fields that also stay open if not all token counts and widths were examined.
_OPEN_BESIDES = {"d_model": WIDEST, "d_ff": WIDEST_FEED_FORWARD, "vocab_size": LARGEST_VOCABULARY}
# The fields of which one rank may have only a shard.
_OF_A_SHARE = ("d_model", "num_heads", "num_kv_heads", "d_ff", "vocab_size", "batch", "context")
_MOST_CANDIDATES = 24
_MOST_ALTERNATIVES = 64
_SMALLEST_VOCABULARY = 4096  # of an LM head; classifiers and poolers have fewer outputs
_PADDING = 8  # the compiler pads a vocabulary to a multiple of this
_LOST = StructureDoubt(text="kernels of this run are missing from the file", of_layers=True, of_sizes=True)


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """`alternatives` do not include the value. If there are too many to list, they are given as the window from `low`
    to `high`; without a `high` the window has no upper bound."""

    value: Value
    certain: bool
    alternatives: tuple[Value, ...] = ()
    low: int | None = None
    high: int | None = None
    evidence: tuple[str, ...] = ()


class Candidate(RunShape, frozen=True, kw_only=True):
    dtype: str | None
    parameters: int | None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    candidates: tuple[Candidate, ...]
    fields: dict[str, Field]
    family: str = ""
    variant: str = ""  # what was seen that a plain decoder does not have
    items: tuple[Item, ...] = ()  # the parameters of the first candidate
    num_consistent: int = 0  # candidates for the attention sizes that no fact excludes
    explained: int = 0
    counts: int = 0
    would_decide: tuple[str, ...] = ()
    left_open: tuple[str, ...] = ()  # what the search did not examine because of its work limit
    notes: tuple[str, ...] = ()


def recover(evidence: Sequence[KernelEvidence], *, work: int = _MOST_WORK) -> Recovery:
    """Recover one model from all files together, which must come from the same run. Raises NoTransformerError if the
    kernels are not those of a decoder, or the files show different ones. `work` limits the search: `left_open` lists
    what was not examined, and no field that depends on it is certain."""
    allocations = tuple(size for one in evidence for size in one.allocations)
    shown = [replace(one, allocations=allocations) for one in evidence if one.sightings]
    assert shown, "the caller has checked that there are kernels"
    effort = Effort(work)
    found: list[FileFit] = []
    for done, one in enumerate(shown):
        with effort.share(len(shown) - done + (len(shown) > 1)) as part:  # one more share, for joining the files
            found.append(fit_file(one, part))
    counts = {one.structure.num_layers for one in found}
    if len(counts) > 1:
        raise NoTransformerError(
            f"the files show different models: num_layers is {' and '.join(map(str, sorted(counts)))}"
        )
    dtypes = {one.structure.dtype for one in found}
    if len(dtypes) > 1:
        raise NoTransformerError(
            f"the files come from different runs: their GEMMs are in {' and '.join(sorted(map(str, dtypes)))}"
        )
    files = [one for one in found if one.fitted]
    files.sort(key=lambda one: (one.is_cut, len(one.fitted[0].solution.consistent)))
    if not files:
        return _answer_without_sizes(found)
    return _assemble(join_files(files, effort))


def _assemble(found: FileFit) -> Recovery:
    structure, evidence, fitted = found.structure, found.evidence, found.fitted
    first = fitted[0]
    # Candidates that were not examined may explain more.
    likely = [one for one in fitted if one.rank[0] <= first.rank[0] + _SLACK or one.solution.is_cut]
    has_open_width = found.is_open or any(one.solution.has_open_width for one in likely)
    fields = {"num_layers": _layers_field(found, likely), "dtype": _dtype_field(structure)}
    for name in CORE_FIELDS:
        fields[name] = _core_field(name, likely)
    fields["d_ff"] = _sized_field([one.feed_forward for one in likely], _feed_forward_evidence(first))
    fields["vocab_size"] = _vocabulary_field(first)
    if not _agree_on_tokens(likely):
        # Both were derived from the best candidate's tokens and width.
        fields |= {name: msgspec.structs.replace(fields[name], certain=False) for name in ("d_ff", "vocab_size")}
    if found.is_cut:
        fields |= {name: _leave_open(fields[name], _largest(name, likely)) for name in _OPEN}
        fields["vocab_size"] = msgspec.structs.replace(fields["vocab_size"], certain=False)
    if has_open_width:
        fields |= {name: _leave_open(fields[name], high) for name, high in _OPEN_BESIDES.items()}
    left_open = tuple(_find_left_open(found))
    notes = [*evidence.notes, *left_open]
    doubts = [doubt.text for doubt in _find_doubts(found, likely) if doubt.of_sizes]
    if first.solution.best.explained < min(_FEWEST_EXPLAINED * first.solution.facts, first.solution.facts - 2):
        doubts.append("too few element counts are explained: kernels may be missing or misread")
    if doubts:
        notes += doubts
        fields |= {name: msgspec.structs.replace(fields[name], certain=False) for name in LAYER_SIZES}
    if first.solution.observation.is_assumed:
        notes.append(
            "the block sizes of compiled kernels are assumed to be Inductor's: no size that depends on them is certain"
        )
        fields |= {
            name: _doubt(fields[name]) for name in (*CORE_FIELDS, "d_ff", "vocab_size") if name not in _shown(first)
        }
    if evidence.exchanges_within(structure.layer_indices):
        notes.append("collectives ran during the forward pass: the sizes may be those of one rank's shard of the model")
        fields |= {name: msgspec.structs.replace(fields[name], certain=False) for name in _OF_A_SHARE}
    candidates = tuple(_candidates(structure, first))
    items = _itemise(structure, first)
    fields["parameters"] = _parameters_field(candidates, first)
    solution = first.solution
    return Recovery(
        candidates=candidates,
        fields={name: fields[name] for name in FIELDS},
        family=first.style.family,
        items=items,
        num_consistent=len(solution.consistent),
        explained=solution.best.explained,
        counts=solution.facts,
        would_decide=tuple(_would_decide(fields, evidence, structure)),
        left_open=left_open,
        notes=tuple(notes),
    )


def _doubt(field: Field) -> Field:
    return msgspec.structs.replace(field, certain=False)


def _shown(fitted: FittedReading) -> set[str]:
    """Return the fields that an attention kernel's grid shows exactly."""
    attentions = fitted.solution.observation.attentions
    windows = {"batch": [one.batch for one in attentions], "num_heads": [one.heads for one in attentions]}
    return {name for name, found in windows.items() if any(window and window.is_exact for window in found)}


def _find_left_open(found: FileFit) -> Iterable[str]:
    """Yield a sentence for each part of the search that was incomplete."""
    if found.is_open or any(one.solution.is_spent for one in found.fitted):
        examined = sum(len(one.solution.consistent) for one in found.fitted)
        yield (
            f"too many sizes fit: the search stopped after {examined:,} candidates and shows the most likely ones; "
            "no size is certain"
        )
    elif found.is_cut:
        yield "the attention kernels fit most sizes: only the most common batch sizes and head counts were tried"
    if any(one.feed_forward.is_cut for one in found.fitted):
        yield "too many values of d_ff fit: none was tried"
    if any(one.vocabulary.is_cut for one in found.fitted):
        yield "too many values of vocab_size fit: not all were tried"


def _leave_open(field: Field, high: int | None) -> Field:
    """Replace the alternatives by a window, because the candidates do not include all of them."""
    evidence = (*field.evidence, "the most common of many values that fit")
    return Field(value=field.value, certain=False, low=1, high=high, evidence=evidence)


def _largest(name: str, likely: list[FittedReading]) -> int | None:
    """Return the upper bound of a field that attention leaves open."""
    if any(one.solution.has_open_width for one in likely):
        return _OPEN[name]
    return _OPEN[name] or max(int(_agreeing(one.solution).tokens.max()) for one in likely)


def _agreeing(solution: Solution) -> Cores:
    """Return the candidates that must agree on a value for it to be certain."""
    best = solution.best.explained
    if solution.facts - best > max(1, _MOST_UNEXPLAINED * solution.facts):
        return solution.consistent
    return solution.consistent.take(solution.explained >= best - _SLACK)


def _agree_on_tokens(likely: list[FittedReading]) -> bool:
    agreeing = [_agreeing(fitted.solution) for fitted in likely]
    pairs = {pair for cores in agreeing for pair in zip(cores.tokens.tolist(), cores.d_model.tolist(), strict=True)}
    return len(pairs) == 1


def _core_field(name: str, likely: list[FittedReading]) -> Field:
    """Return the field with its alternatives from most to least common, as far as candidates were ranked."""
    solution = likely[0].solution
    ranked = [getattr(one.core, name) for fitted in likely for one in fitted.solution.cores]
    agreeing = [value for fitted in likely for value in np.unique(getattr(_agreeing(fitted.solution), name)).tolist()]
    value, *others = dict.fromkeys([*ranked, *agreeing])
    return _field(value, others, certain=not others, evidence=_core_evidence(name, solution))


def _field(value: int, others: Iterable[int], *, certain: bool, evidence: tuple[str, ...]) -> Field:
    alternatives = tuple(others)
    if len(alternatives) <= _MOST_ALTERNATIVES:
        return Field(value=value, certain=certain, alternatives=alternatives, evidence=evidence)
    every = (value, *alternatives)
    return Field(value=value, certain=certain, low=min(every), high=max(every), evidence=evidence)


def _sized_field(found: Sequence[Sized], evidence: tuple[str, ...]) -> Field:
    sized = found[0]
    if not sized.best:
        low, high = (sized.window.low, sized.window.high) if sized.window else (None, None)
        return Field(value=None, certain=False, low=low, high=high, evidence=evidence)
    values = list(dict.fromkeys(value for one in found for value in one.best))
    others = [value for value in values if value != sized.best[0]]
    return _field(sized.best[0], others, certain=not others and sized.is_told, evidence=evidence)


def _vocabulary_field(fitted: FittedReading) -> Field:
    found = _sized_field([fitted.vocabulary], _vocabulary_evidence(fitted))
    value = found.value
    compiled = any(one.name.library == "Inductor" for one in fitted.solution.observation.reading.zones["final"])
    if isinstance(value, int) and value < _SMALLEST_VOCABULARY:
        unsure = (*found.evidence, "an LM head usually has more outputs: this may be a classifier")
        return msgspec.structs.replace(found, certain=False, evidence=unsure)
    if not compiled or not isinstance(value, int) or value % _PADDING:
        return found
    if found.low is not None:
        return msgspec.structs.replace(found, certain=False, low=min(found.low, value - _PADDING + 1))
    padded = tuple(range(value - _PADDING + 1, value))
    others = tuple(dict.fromkeys((*found.alternatives, *padded)))
    return msgspec.structs.replace(found, certain=False, alternatives=others)


def _find_doubts(found: FileFit, likely: Sequence[FittedReading]) -> list[StructureDoubt]:
    """Return the doubts of the file and of these interpretations, or of all if none has sizes."""
    readings = [one.solution.observation.reading for one in likely] or found.structure.readings
    lost = [_LOST] if found.evidence.is_incomplete else []
    return list(dict.fromkeys((*lost, *found.structure.doubts, *(doubt for one in readings for doubt in one.doubts))))


def _layers_field(found: FileFit, likely: Sequence[FittedReading]) -> Field:
    """Certain if an embedding comes before the first layer and an LM head after the last: the file has all layers."""
    structure = found.structure
    best = [fitted.solution.observation.reading for fitted in found.fitted[:1]]
    readings = structure.readings if found.is_cut or not best else best
    has_head = all("head" in reading.products for reading in readings)
    is_cut = CUT_SHORT in found.evidence.notes
    passes = f"each of {structure.num_passes} forward passes" if structure.num_passes > 1 else "the forward pass"
    said = f"the same GEMMs around attention {structure.num_layers} times in {passes}"
    doubts = [doubt.text for doubt in _find_doubts(found, likely) if doubt.of_layers]
    if structure.may_be_one_layer:
        doubts.append("every attention call is followed by the same kernels: this may be one layer run repeatedly")
    if not (has_head and structure.has_start) or is_cut:
        doubts.append("the file may not contain all layers")
    if doubts:
        fewest = 1 if structure.may_be_one_layer else structure.num_layers
        return Field(value=structure.num_layers, certain=False, low=fewest, evidence=(said, *doubts))
    whole = "no gap in the launch numbers" if found.evidence.is_numbered else "assumes that the file has every kernel"
    return Field(value=structure.num_layers, certain=True, evidence=(said, whole))


def _dtype_field(structure: Structure) -> Field:
    """Certain if all projections use the same type. The LM head and attention scores may use another."""
    products = structure.readings[0].products
    inside = [one for role, one in products.items() if role not in ("head", "scores", "values")]
    source = (
        "the operations of the tensor cores" if products["output"].counted_dtype else "the names of the GEMM kernels"
    )
    said = (f"from {source}: {products['output'].name.short}",) if structure.dtype else ()
    is_agreed = {one.dtype for one in inside} == {structure.dtype} != {None}
    if misnamed := next((one for one in inside if one.is_misnamed), None):
        unsure = f"#{misnamed.index} is named {misnamed.name.dtype} but computed in {misnamed.counted_dtype}"
        return Field(
            value=structure.dtype, certain=False, evidence=(*said, f"the evidence contradicts itself: {unsure}")
        )
    return Field(value=structure.dtype, certain=is_agreed, evidence=said)


def _candidates(structure: Structure, fitted: FittedReading) -> Iterable[Candidate]:
    cores = fitted.solution.cores
    for scored in cores[:_MOST_CANDIDATES]:
        observation = fitted.solution.observation
        feed_forward = find_feed_forward(observation, scored.core)
        vocabulary = find_vocabulary(observation, scored.core) if scored is not cores[0] else fitted.vocabulary
        d_ff = feed_forward.best[0] if feed_forward.best else None
        vocab_size = vocabulary.best[0] if vocabulary.best else None
        yield Candidate(
            num_layers=structure.num_layers,
            d_ff=d_ff,
            vocab_size=vocab_size,
            dtype=structure.dtype,
            parameters=_count(structure.num_layers, scored.core, d_ff, vocab_size, fitted.style),
            **{name: getattr(scored.core, name) for name in CORE_FIELDS},
        )


def _count(num_layers: int, core: Core, d_ff: int | None, vocab_size: int | None, style: Style) -> int | None:
    if d_ff is None or vocab_size is None:
        return None
    return total(itemise(core, num_layers=num_layers, d_ff=d_ff, vocab_size=vocab_size, style=style))


def _itemise(structure: Structure, fitted: FittedReading) -> tuple[Item, ...]:
    if not fitted.feed_forward.best or not fitted.vocabulary.best:
        return ()
    return itemise(
        fitted.solution.best.core,
        num_layers=structure.num_layers,
        d_ff=fitted.feed_forward.best[0],
        vocab_size=fitted.vocabulary.best[0],
        style=fitted.style,
    )


def _parameters_field(candidates: tuple[Candidate, ...], fitted: FittedReading) -> Field:
    """Never certain: no kernel shows the parameters that a forward pass does not use, such as unused positions."""
    value = candidates[0].parameters
    norm = "RMS norm" if fitted.style.norm == "rms" else "layer norm"
    tied = "tied to" if fitted.style.is_tied else "separate from"
    said = (
        f"{fitted.style.family}: {norm}, LM head {tied} the embedding (assumed)",
        *((f"{fitted.style.positions:,} learned positions (assumed)",) if fitted.style.positions else ()),
    )
    others = sorted({one.parameters for one in candidates if one.parameters is not None} - {value})
    return Field(value=value, certain=False, alternatives=tuple(others[:_MOST_ALTERNATIVES]), evidence=said)


def _core_evidence(name: str, solution: Solution) -> tuple[str, ...]:
    observation = solution.observation
    core = solution.best.core
    attention = "attention" if observation.structure.is_fused else "softmax and its GEMMs"
    says = {
        "d_model": f"norms over {core.tokens:,} rows, next to kernels over {core.tokens * core.d_model:,} elements",
        "num_heads": f"{attention} over {core.batch} · {core.num_heads} sequences of length {core.context}",
        "num_kv_heads": f"projections with {core.query_width:,} (query) and {core.key_width:,} (key) columns",
        "d_head": f"{core.query_width:,} query columns / {core.num_heads:,} heads",
        "batch": f"{core.tokens:,} tokens / context {core.context:,}",
        "context": f"{core.tokens:,} tokens / batch {core.batch:,}",
    }
    return (says[name],)


def _feed_forward_evidence(fitted: FittedReading) -> tuple[str, ...]:
    sized = fitted.feed_forward
    window = f"the GEMMs allow {_spell(sized.window)}" if sized.window else "no GEMM depends on it"
    return (window, *_told(sized, "between the GEMMs"))


def _vocabulary_evidence(fitted: FittedReading) -> tuple[str, ...]:
    sized = fitted.vocabulary
    if sized.window is None:
        return ("the evidence has no LM head GEMM",)
    first, *others = dict.fromkeys(sized.apart or (sized.window,))
    parts = [f"the LM head GEMM allows {_spell(first)}"]
    parts += [f"{_spell(one)} if it ran on fewer tokens" for one in others]
    return (", or ".join(parts), *_told(sized, "after the LM head"))


def _spell(window: Window) -> str:
    return f"only {window.low:,}" if window.is_exact else f"{window.low:,} to {window.high:,}"


def _told(sized: Sized, where: str) -> tuple[str, ...]:
    return (f"explains {sized.explained} of {sized.to_explain} element counts {where}",) if sized.to_explain else ()


def _would_decide(fields: dict[str, Field], evidence: KernelEvidence, structure: Structure) -> Iterable[str]:
    unsure = [name for name, field in fields.items() if not field.certain and name != "parameters"]
    if not unsure:
        return
    if not evidence.has_counters:
        yield "add counters of the same pass (stepscope profile --counters, or ncu --csv --page raw)"
    if "vocab_size" in unsure and not structure.is_training:
        yield "add a training step: the loss has batch · context · vocab_size elements"
    if "vocab_size" in unsure and not evidence.allocations:
        yield "add a memory snapshot: it has the exact sizes of the logits and the embedding"
    if {"batch", "context", "num_heads"} & set(unsure):
        yield "run it with another batch or context and compare: the model's own sizes stay the same"


def _answer_without_sizes(files: Sequence[FileFit]) -> Recovery:
    """Return only num_layers and dtype, for evidence that does not determine the sizes."""
    found = files[0]
    structure, evidence = found.structure, found.evidence
    fields = {name: Field(value=None, certain=False) for name in FIELDS}
    fields["num_layers"] = _layers_field(found, ())
    fields["dtype"] = _dtype_field(structure)
    left_open = tuple(dict.fromkeys(text for one in files for text in _find_left_open(one)))
    why = left_open or (
        "no size can be determined: either none fits, or the grids of these kernels do not depend on it",
    )
    return Recovery(
        candidates=(),
        fields=fields,
        would_decide=tuple(_would_decide(fields, evidence, structure)),
        left_open=left_open,
        notes=(*evidence.notes, *why),
    )
