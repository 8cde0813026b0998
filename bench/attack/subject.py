"""A recorded run with known truth, as a forger sees it: its file, its layers, and the strongest true claim about it."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from attack.documents import Document, Kind, Launch, read_document
from recovery import FIXTURES, truth_of
from stepscope.explain.kernel_names import decode
from stepscope.recover.shape import SIZES

ClaimFields = Mapping[str, Any]
_GATED = ("llama", "qwen2", "qwen3", "builtin")
_TIED = ("gpt2",)  # of the recorded families, by the defaults of their configs
TRUTHS: Mapping[str, Mapping[str, Any]] = json.loads((FIXTURES / "truth.json").read_text())


def find_files() -> list[Path]:
    return sorted([*FIXTURES.glob("*.csv.gz"), *FIXTURES.glob("*.json.gz")])


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive layers of one pass: `layers` blocks of `period` kernels with the same names and grids."""

    start: int
    period: int
    layers: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.layers

    def slice(self, layer: int) -> slice:
        return slice(self.start + layer * self.period, self.start + (layer + 1) * self.period)


@dataclass(frozen=True)
class Subject:
    document: Document
    truth: Mapping[str, Any]
    # A true claim without the fields that this file cannot test: what a forger would start from.
    claim: ClaimFields

    @property
    def name(self) -> str:
        return self.document.path.name

    @property
    def run(self) -> str:
        return self.name.partition(".")[0]

    @property
    def kind(self) -> Kind:
        return self.document.kind

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.document.launches

    @property
    def is_tied(self) -> bool:
        return self.truth["family"] in _TIED

    @property
    def is_gated(self) -> bool:
        return self.truth["family"] in _GATED

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The layers of every forward and backward pass, in order."""
        found = tuple(find_regions(self.launches, self.truth["num_layers"], largest=self._longest_period))
        return found or (_between_attentions(self.launches),)

    @property
    def forward(self) -> Region:
        return self.regions[0]

    @property
    def _longest_period(self) -> int:
        # A trace has two training steps, and each has more kernels than twice a pass over the layers.
        steps = 2 if self.kind == "training trace" else 1
        layers: int = self.truth["num_layers"]
        return len(self.launches) // (steps * layers)

    def products(self, layer: int = 0) -> list[int]:
        """Return the positions of the GEMMs of a layer of the first forward pass."""
        block = self.forward.slice(layer)
        return [index for index in range(block.start, block.stop) if is_gemm(self.launches[index])]

    @property
    def longest_product(self) -> int:
        """Return the position of the longest GEMM of the last layer of the first forward pass."""
        return max(self.products(self.forward.layers - 1), key=lambda index: self.launches[index].duration_ns)

    @property
    def head(self) -> int:
        """Return the position of the LM head of the first forward pass: the longest GEMM after the layers, or the first
        of those that take about as long, which are its gradients."""
        end = self.regions[1].start if len(self.regions) > 1 else len(self.launches)
        found = [index for index in range(self.forward.end, end) if is_gemm(self.launches[index])]
        longest = max(self.launches[index].duration_ns for index in found)
        share = 0.5 if self.kind == "training trace" else 1.0
        return next(index for index in found if self.launches[index].duration_ns >= share * longest)

    def forge(self, launches: Iterable[Launch], **claimed: Any) -> "Forged":
        """Return the file with other kernels, and the claim with changes; None removes a field."""
        document = self.document.with_launches(launches)
        return Forged(files=((document.file, document.write()),), claim=self.false_claim(**claimed))

    def edit(self, index: int, change: Callable[[Launch], Launch], **claimed: Any) -> "Forged":
        launches = list(self.launches)
        launches[index] = change(launches[index])
        return self.forge(launches, **claimed)

    def edit_all(self, change: Callable[[Launch], Launch], **claimed: Any) -> "Forged":
        return self.forge([change(one) for one in self.launches], **claimed)

    def false_claim(self, **claimed: Any) -> dict[str, Any]:
        fields = {**self.claim, **claimed}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgedReport:
    """A signed report, and what the verifier has: the signer's public key and the nonce that was sent."""

    content: bytes
    public_key: str
    nonce: str


@dataclass(frozen=True, kw_only=True)
class Forged:
    """Evidence files by name, and the claim, or the signed report, that they are to support."""

    files: tuple[tuple[str, bytes], ...]
    claim: ClaimFields
    report: ForgedReport | None = None


def is_gemm(launch: Launch) -> bool:
    return decode(launch.name).kernel_class == "GEMM"


def find_regions(launches: Sequence[Launch], layers: int, *, largest: int) -> Iterator[Region]:
    """Yield blocks that repeat once per layer and contain a GEMM, the longest first chosen, in launch order. Where the
    first or the last layer differs in a kernel (compiled models), a region has one layer fewer."""
    keys = [(one.name, one.grid, one.block) for one in launches]
    found: list[Region] = []
    for period in range(largest, 1, -1):
        for start, length in _runs(keys, period):
            count = (length + period) // period
            if count in (layers, layers - 1) and count > 1:
                found.append(Region(start, period, count))
    found = [one for one in found if any(is_gemm(launches[index]) for index in range(one.start, one.end))]
    chosen: list[Region] = []
    for one in sorted(found, key=lambda one: (one.layers, one.period), reverse=True):
        if all(one.end <= other.start or one.start >= other.end for other in chosen):
            chosen.append(one)
    yield from sorted(chosen, key=lambda one: one.start)


def _between_attentions(launches: Sequence[Launch]) -> Region:
    """Return the layers from one attention to the next, for compiled models: only the part before the first attention
    and that after the last are special."""
    places = [index for index, one in enumerate(launches) if decode(one.name).kernel_class == "attention"]
    return Region(places[0], places[1] - places[0], len(places) - 1)


def _runs(keys: Sequence[object], period: int) -> Iterator[tuple[int, int]]:
    """Yield where each run of kernels that equal the kernel one period later starts, and how long it is."""
    start = 0
    for index in range(len(keys) - period + 1):
        if index == len(keys) - period or keys[index] != keys[index + period]:
            if index - start >= period:
                yield start, index - start
            start = index + 1


# --- True claims


def full_claim(truth: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: truth[name] for name in (*SIZES, "dtype")}
    return {**sizes, "gated": truth["family"] in _GATED}


def without(claim: ClaimFields, names: Sequence[str]) -> dict[str, Any]:
    """Return a claim without some fields. num_kv_heads and d_head have defaults, which would be claimed instead: if
    they differ from the truth, num_heads goes as well."""
    kept = {name: value for name, value in claim.items() if name not in names}
    heads = kept.get("num_heads")
    if heads is None:
        return kept
    wrong_kv = "num_kv_heads" not in kept and claim.get("num_kv_heads", heads) != heads
    width, head = kept.get("d_model"), claim.get("d_head")
    wrong_head = "d_head" not in kept and None not in (width, head) and width != heads * (head or 0)
    if wrong_kv or wrong_head:
        del kept["num_heads"]
    return kept


# The fields that cannot be tested on this file, or None if the claim is refuted.
Untested = Callable[[Path, ClaimFields], Sequence[str] | None]


def strongest_claim(path: Path, truth: Mapping[str, Any], find_untested: Untested) -> dict[str, Any]:
    """Return the true claim without the fields that `verify` cannot test on this file, if d_model is not one of them:
    otherwise little is left that a forgery could make false."""
    claim = tried = full_claim(truth)
    while "d_model" in tried and (untested := find_untested(path, tried)) is not None:
        claim = tried
        if not untested:
            break
        tried = without(claim, untested)
    return claim


@cache
def open_subject(path: Path, find_untested: Untested) -> Subject:
    truth = {**truth_of(path, TRUTHS), "traced_layers": TRUTHS[path.name.partition(".")[0]]["num_layers"]}
    return Subject(read_document(path), truth, strongest_claim(path, truth, find_untested))
