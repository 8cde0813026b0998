"""What each file of a run shows: readings of its structure that sizes fit; and several files together."""

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

_ODD_READING = 2.0  # surprise of one product for gate and up beside a layer norm


class FittedReading(msgspec.Struct, frozen=True, kw_only=True):
    """One reading that sizes fit."""

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
    """What one file shows: readings that sizes fit, best first."""

    evidence: KernelEvidence
    structure: Structure
    fitted: tuple[FittedReading, ...]
    is_open: bool = False  # other readings may be right: of their sizes only some were looked at, and none fits

    @property
    def is_cut(self) -> bool:
        """Whether there are sizes that were not looked at."""
        return self.is_open or any(one.solution.is_cut for one in self.fitted)


def fit_file(evidence: KernelEvidence, effort: Effort) -> FileFit:
    structure = find_structure(evidence.sightings)
    fitted: list[FittedReading] = []
    is_open = False
    for done, reading in enumerate(structure.readings):
        with effort.share(len(structure.readings) - done) as part:
            solution = solve(observe(structure, reading, evidence.device_sms), part)
        one = _fit_reading(solution, evidence)
        if one is not None:
            fitted.append(one)
        is_open |= one is None and solution.is_cut
    fitted.sort(key=lambda one: one.rank)
    return FileFit(evidence=evidence, structure=structure, fitted=tuple(fitted), is_open=is_open)


def join_files(files: list[FileFit], effort: Effort) -> FileFit:
    """The file that leaves least open, with only those of its candidates that the others leave open, too; reading by
    reading, because the files are read alike."""
    first, *others = files
    joined = []
    for fitted in first.fitted:
        one: FittedReading | None = fitted
        for other in others:
            one = _join_reading(one, other, effort) if one is not None else None
        if one is not None:
            joined.append(one)
    if not joined:
        raise NoTransformerError("no sizes fit all of the files: they are of different runs")
    return msgspec.structs.replace(first, fitted=tuple(sorted(joined, key=lambda one: one.rank)))


def _join_reading(mine: FittedReading, file: FileFit, effort: Effort) -> FittedReading | None:
    """None where the other file has no such reading, or none of the same sizes."""
    roles = set(mine.solution.observation.products)
    alike = [one for one in file.fitted if set(one.solution.observation.products) == roles]
    if not alike:
        return mine if file.is_open else None
    theirs = alike[0]
    if mine.solution.is_cut and not theirs.solution.is_cut:
        mine, theirs = theirs, mine
    solution = _keep_common(mine.solution, theirs.solution, effort)
    # Both were found beside the best candidates, which need not be the right ones where some were not looked at.
    is_open = theirs.solution.has_open_width
    feed_forward = mine.feed_forward if is_open else _meet(mine.feed_forward, theirs.feed_forward)
    vocabulary = mine.vocabulary if theirs.solution.is_cut else _meet(mine.vocabulary, theirs.vocabulary)
    if solution is None or feed_forward is None or vocabulary is None:
        return None
    return msgspec.structs.replace(mine, solution=solution, feed_forward=feed_forward, vocabulary=vocabulary)


def _keep_common(mine: Solution, other: Solution, effort: Effort) -> Solution | None:
    """What was not looked at in one file is not excluded by it: so that file is asked about what the other leaves open.
    Where both were cut, what is common to them is only the likeliest."""
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
    """Sizes of both, where both list any; of what remains the order is the first's. None where they contradict."""
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
    """A tensor of logits in a snapshot is tokens · vocabulary elements, and the embedding vocabulary · width. So are
    activations and weights of other layers, of their own widths: those are left out. Where nothing else bounds the
    vocabulary, what is found is the best guess and no more."""
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
