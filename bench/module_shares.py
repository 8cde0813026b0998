"""How much GPU time of compiled and graphed steps has a known module, phase and layer, and whether that is right.

    python bench/module_shares.py runs/modules                      # on a GPU: record, then print the table
    python bench/module_shares.py runs/modules --models small --variants eager,graph --limit 300
    python bench/module_shares.py runs/modules --from               # print the table of what was recorded
    python bench/module_shares.py runs/modules --models nano --variants eager,compiled --device cpu

Each model is recorded with `stepscope profile` in several variants of one step. The eager one is the check: compiling
and capturing change neither the GEMMs nor the modules that they belong to, so a module class (q, k, v, the LM head, …)
has the same share of all GEMMs in each variant, and about the same share of their time. `moved` is the share that is in
another class than in the eager step: half of the sum of all differences. The preset `fast` merges GEMMs, so there only
the time can be compared.

Recordings that exist are kept, so an interrupted run resumes. Exits with 1 if a recording failed.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

import stepscope
from result_rows import fail
from stepscope.explain.trace.module_tree import fold_modules, list_kinds
from stepscope.explain.trace.profile import UNKNOWN, Profile

MODELS = {
    "nano": ["--size", "nano", "--context", "64"],
    "small": ["--size", "small", "--context", "1024"],
    "medium": ["--size", "medium", "--context", "1024"],
    "llama": ["--hf", "llama", "--context", "1024"]
    + [f"--set={one}" for one in ("hidden_size=1024", "num_hidden_layers=24", "num_attention_heads=16")]
    + [f"--set={one}" for one in ("num_key_value_heads=16", "intermediate_size=4096", "vocab_size=10000")],
}
VARIANTS = {
    "eager": [],
    "compiled": ["--compile"],
    "graph": ["--graph"],
    "compiled-graph": ["--compile", "--graph"],
    "fast": ["--preset", "fast"],
}
SHARED = ["--batch", "4", "--precision", "bf16", "--optimizer", "adamw-fused"]
BUILT_IN = ["--attention", "flash"]


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    variant: str
    kernels: int
    step_ms: float
    phase: float
    module: float
    layer: float
    moved: float | None = None
    moved_time: float | None = None

    def cells(self) -> tuple[str, ...]:
        shares = (f"{share:.1%}" for share in (self.phase, self.module, self.layer))
        moved = ("" if share is None else f"{share:.1%}" for share in (self.moved, self.moved_time))
        return (self.model, self.variant, f"{self.kernels:,}", f"{self.step_ms:.1f}", *shares, *moved)


HEAD = (
    *("model", "variant", "kernels", "step, ms", "phase known", "module known", "in a layer"),
    *("GEMMs moved", "GEMM time moved"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", default="small,medium,llama")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=540.0, metavar="S", help="nothing starts later than this")
    parser.add_argument("--from", dest="only_read", action="store_true", help="record nothing")
    given = parser.parse_args()
    models, variants = given.models.split(","), given.variants.split(",")
    if unknown := {*models} - {*MODELS} | {*variants} - {*VARIANTS}:
        fail(f"unknown: {', '.join(sorted(unknown))}; models are {', '.join(MODELS)}, variants {', '.join(VARIANTS)}")
    failed = [] if given.only_read else record(given.folder, models, variants, given.device, given.limit)
    rows = [row for model in models for row in compare(given.folder, model, variants)]
    print_table([HEAD, *(row.cells() for row in rows)])
    for problem in failed:
        print(problem, file=sys.stderr)
    raise SystemExit(1 if failed else 0)


def place(folder: Path, model: str, variant: str) -> Path:
    return folder / f"{model}-{variant}"


def record(folder: Path, models: list[str], variants: list[str], device: str, limit_s: float) -> list[str]:
    """Record what is missing, and return what failed."""
    began, failed = time.monotonic(), []
    for model in models:
        for variant in variants:
            out = place(folder, model, variant)
            if out.exists():
                continue
            if time.monotonic() - began > limit_s:
                failed.append(f"not recorded within {limit_s:.0f} s: {out}")
                continue
            settings = [*MODELS[model], *SHARED, *([] if model == "llama" else BUILT_IN), *VARIANTS[variant]]
            command = [sys.executable, "-m", "stepscope", "profile", *settings, "--device", device, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(f"{time.monotonic() - began:4.0f} s  {out.name}: {done.returncode}", file=sys.stderr, flush=True)
            if done.returncode:
                failed.append(f"{' '.join(command)}\n{done.stderr.strip()}")
    return failed


def compare(folder: Path, model: str, variants: list[str]) -> list[Row]:
    """One row per recording, compared with the eager one."""
    found = {one: place(folder, model, one) for one in ("eager", *variants) if place(folder, model, one).exists()}
    profiles = {one: stepscope.load(path).profile for one, path in found.items()}
    return [describe(model, one, profiles[one], profiles.get("eager")) for one in variants if one in profiles]


def describe(model: str, variant: str, profile: Profile, eager: Profile | None) -> Row:
    known = profile.coverage()
    row = Row(
        model=model,
        variant=variant,
        kernels=round(profile.kernels["count"].sum() / profile.num_steps),
        step_ms=profile.step_ns / 1e6,
        phase=known["phase"],
        module=known["module"],
        layer=profile.layer_share,
    )
    if eager is None or variant == "eager":
        return row
    moved, moved_time = (find_moved(share_gemms(profile, of), share_gemms(eager, of)) for of in ("count", "time_ns"))
    return replace(row, moved=None if variant == "fast" else moved, moved_time=moved_time)


def share_gemms(profile: Profile, of: str) -> dict[str, float]:
    """The share of all GEMMs, or of their time, in each class of modules: the same module of all layers is a class."""
    levels = fold_modules(list_kinds(profile.kernels))  # of all modules, which decide what a layer is
    found = profile.time_by("module", kernels=profile.kernels.filter(pl.col("class") == "GEMM"))
    total = max(1, int(found[of].sum()))
    shares: dict[str, float] = {}
    for module, value in found.select("module", of).iter_rows():
        name = ".".join(level.role for level in levels.get(module, ())) or UNKNOWN
        shares[name] = shares.get(name, 0.0) + value / total
    return shares


def find_moved(shares: Mapping[str, float], expected: Mapping[str, float]) -> float:
    names = shares.keys() | expected.keys()
    return sum(abs(shares.get(one, 0.0) - expected.get(one, 0.0)) for one in names) / 2


def print_table(rows: list[tuple[str, ...]]) -> None:
    head, *body = rows
    print(f"| {' | '.join(head)} |")
    print(f"| --- | --- |{' --: |' * (len(head) - 2)}")
    for row in body:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
