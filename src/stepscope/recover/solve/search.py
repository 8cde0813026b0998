"""Fit sizes to each file of a run, for every interpretation of its kernels, and join the results of several files."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import polars as pl

from stepscope.recover.evidence.observation import observe
from stepscope.recover.evidence.order import NoTransformerError
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.evidence.structure import Structure, find_structure
from stepscope.recover.shape import CORE_FIELDS, Core, Cores
from stepscope.recover.solve.candidates import Solution, order, solve
from stepscope.recover.solve.dependent_sizes import Sized, find_feed_forward, find_vocabulary
from stepscope.recover.solve.parameters import Style, find_style
from stepscope.recover.solve.priors import Effort, surprise_of_vocabulary

_ODD_READING = 2.0  # surprise of a joint gate-up GEMM in a model with layer norm


class FittedReading(msgspec.Struct, frozen=True, kw_only=True):
    """An interpretation of a file's kernels for which sizes were found."""

    solution: Solution
    feed_forward: Sized
    vocabulary: Sized
    style: Style

    @property
    def rank(self) -> tuple[float, float]:
        explained = self.solution.best.explained + self.feed_forward.explained + self.vocabulary.explained
        odd = _ODD_READING if "gate_up" in self._roles and self.style.norm == "layer" else 0.0
        return -explained, self.solution.best.surprise + odd

    @property
    def _roles(self) -> Iterable[str]:
        return self.solution.observation.products


class FileFit(msgspec.Struct, frozen=True, kw_only=True):
    """The interpretations of one file for which sizes were found, best first."""

    evidence: KernelEvidence
    structure: Structure
    fitted: tuple[FittedReading, ...]
    is_open: bool = False  # another interpretation may be right: not all of its sizes were examined, and none fitted

    @property
    def is_cut(self) -> bool:
        """Whether some sizes were not examined."""
        return self.is_open or any(one.solution.is_cut for one in self.fitted)


def fit_file(evidence: KernelEvidence, effort: Effort) -> FileFit:
    structure = find_structure(evidence.sightings)
    fitted: list[FittedReading] = []
    is_open = False
    for done, reading in enumerate(structure.readings):
        with effort.share(len(structure.readings) - done) as part:
            observation = observe(structure, reading, evidence.device_sms, is_portable=evidence.is_portable)
            solution = solve(observation, part)
        one = _fit_reading(solution, evidence)
        if one is not None:
            fitted.append(one)
        is_open |= one is None and solution.is_cut
    fitted.sort(key=lambda one: one.rank)
    return FileFit(evidence=evidence, structure=structure, fitted=tuple(fitted), is_open=is_open)


def join_files(files: list[FileFit], effort: Effort) -> FileFit:
    """Return the first file, which is the most specific, with only those candidates that fit the other files too.
    Interpretations are joined one by one, because they are the same in all files."""
    first, *others = files
    joined = []
    for fitted in first.fitted:
        one: FittedReading | None = fitted
        for other in others:
            one = _join_reading(one, other, effort) if one is not None else None
        if one is not None:
            joined.append(one)
    if not joined:
        raise NoTransformerError("no sizes fit all files: they come from different runs")
    return msgspec.structs.replace(first, fitted=tuple(sorted(joined, key=lambda one: one.rank)))


def _join_reading(mine: FittedReading, file: FileFit, effort: Effort) -> FittedReading | None:
    """Return None if the other file does not have this interpretation, or not with the same sizes."""
    roles = set(mine.solution.observation.products)
    alike = [one for one in file.fitted if set(one.solution.observation.products) == roles]
    if not alike:
        return mine if file.is_open else None
    theirs = alike[0]
    if mine.solution.is_cut and not theirs.solution.is_cut:
        mine, theirs = theirs, mine
    solution = _keep_common(mine.solution, theirs.solution, effort)
    # Both were derived from the best candidates, which may be wrong if not all candidates were examined.
    is_open = theirs.solution.has_open_width
    feed_forward = mine.feed_forward if is_open else _meet(mine.feed_forward, theirs.feed_forward)
    vocabulary = mine.vocabulary if theirs.solution.is_cut else _meet(mine.vocabulary, theirs.vocabulary)
    if solution is None or feed_forward is None or vocabulary is None:
        return None
    return msgspec.structs.replace(mine, solution=solution, feed_forward=feed_forward, vocabulary=vocabulary)


def _keep_common(mine: Solution, other: Solution, effort: Effort) -> Solution | None:
    """An incomplete search does not exclude what it skipped, so it is repeated among the candidates of the other file.
    If both are incomplete, the common candidates are only the most likely ones."""
    if other.is_cut and not mine.is_cut:
        other = solve(other.observation, effort, among=mine.consistent)
        if other.is_cut:
            return mine
    return _intersect(mine, other) or (mine if mine.is_cut else None)


def _intersect(mine: Solution, other: Solution) -> Solution | None:
    rows = _to_frame(mine.consistent).with_row_index("place")
    kept = rows.join(_to_frame(other.consistent), on=CORE_FIELDS, how="semi", maintain_order="left")["place"].to_numpy()
    if not len(kept):
        return None
    return order(
        mine.observation,
        mine.consistent.take(kept),
        mine.explained[kept],
        mine.facts,
        is_cut=mine.is_cut,
        is_spent=mine.is_spent,
        num_widths=mine.num_widths,
    )


def _to_frame(cores: Cores) -> pl.DataFrame:
    return pl.DataFrame({name: getattr(cores, name) for name in CORE_FIELDS})


def _meet(first: Sized, second: Sized) -> Sized | None:
    """Return the sizes in both lists, in the order of the first; None if there are none. An empty list is ignored."""
    if not first.best or not second.best:
        return first if first.best else second
    both = tuple(size for size in first.best if size in second.best)
    return replace(first, best=both, is_told=first.is_told or second.is_told) if both else None


def _fit_reading(solution: Solution, evidence: KernelEvidence) -> FittedReading | None:
    if not solution.cores:
        return None
    observation, core = solution.observation, solution.best.core
    feed_forward = find_feed_forward(observation, core)
    if feed_forward.window is None:
        return None
    vocabulary = _narrow(find_vocabulary(observation, core), feed_forward, core, evidence.allocations)
    style = find_style(observation, core.context)
    return FittedReading(solution=solution, feed_forward=feed_forward, vocabulary=vocabulary, style=style)


def _narrow(vocabulary: Sized, feed_forward: Sized, core: Core, allocations: Sequence[int]) -> Sized:
    """Narrow down vocab_size with the allocations of a memory snapshot: logits have tokens · vocab_size elements and
    the embedding has vocab_size · d_model. Sizes that other activations and weights have as well are ignored. If
    nothing else bounds vocab_size, the result is a guess and not certain."""
    sizes = frozenset(allocations)
    window = vocabulary.window
    if not sizes or window is None:
        return vocabulary
    logits = {size // (core.tokens * width) for size in sizes for width in (2, 4) if size % (core.tokens * width) == 0}
    tables = {
        size // (core.d_model * width) for size in sizes for width in (2, 4) if size % (core.d_model * width) == 0
    }
    others = {core.d_model, core.query_width, core.key_width, core.joint_width, 2 * core.key_width}
    others |= {part * size for size in feed_forward.best for part in (1, 2)}
    both = {size for size in logits & tables if size in window} - {part * size for size in others for part in (1, 2)}
    if not vocabulary.best:
        return replace(vocabulary, best=tuple(sorted(both, key=surprise_of_vocabulary)), is_told=False)
    kept = tuple(size for size in vocabulary.best if size in both)
    if not kept:
        return vocabulary
    return replace(vocabulary, best=kept, is_told=True)
