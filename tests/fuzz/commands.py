"""The commands that inputs are passed to: every verb that reads a file and does not need torch."""

from random import Random
from typing import get_args

from stepscope.api.display import MemoryPart, RunPart
from tests.fuzz.seeds import Seed

_FORMATS = ("text", "md", "latex", "csv", "json")
_PARTS = get_args(RunPart)
_MEMORY_PARTS = get_args(MemoryPart)
_GOOD = ("small.json", "good.json", "good.csv")


def choose_command(seed: Seed, chance: Random) -> list[str]:
    entry, format_ = seed.entry, ["--format", chance.choice(_FORMATS)]
    detail = chance.choice(([], ["--detail"]))
    page = ["report", entry, "--out", "page.html", "--force"]
    match seed.kind:
        case "trace" | "counters":
            return chance.choice(_of_trace(seed, chance))
        case "memory":
            part = ["--table", chance.choice(_MEMORY_PARTS)]
            views: tuple[list[str], ...] = (
                [],
                ["--questions"],
                ["--format", "json"],
                [*part, *format_, *detail],
                ["--plot", "memory.html"],
            )
            shown = ["explain", entry, *chance.choice(views)]
            return chance.choice((shown, shown, shown, page, ["recover", "good.json", entry]))
        case "bench" | "attention" | "comm":
            return chance.choice(([seed.kind, "--from", entry, *format_, *detail], page))
        case "memory-rows":
            return chance.choice((["memory", "--from", entry, *format_, *detail], page))
        case "precision":
            part = ["--table", chance.choice(("dtypes", "errors", "underflow", "accumulation", "norm"))]
            shown = ["precision", "--from", entry]
            return chance.choice((shown, [*shown, *part, *format_, *detail], [*shown, "--format", "json"], page))
        case "optimise":
            part = ["--table", chance.choice(("changes", "check"))]
            shown = ["optimise", "--from", entry]
            return chance.choice((shown, [*shown, *part, *format_], [*shown, "--format", "json"], page))
        case "report-data":
            return chance.choice((page, page, ["explain", f"{entry}/profile"]))
        case "training":
            return ["train", "--from", entry, *format_, *detail, *chance.choice(([], ["--memory"]))]
        case "claim":
            return ["verify", chance.choice(_GOOD), "--claim", entry, *format_]
        case "config":
            bench = ["bench", "--config", entry, "--slurm", "--print-sbatch"]
            return chance.choice((bench, ["train", "--config", entry, "--slurm", "--print-sbatch"]))
        case "links":
            # Read before anything runs; a file in place of the directory stops the command.
            return ["comm", "--out", "good.csv"]
        case "signed":
            return ["verify", "--signed", entry, "--public-key", "signed.pub", *format_]
        case "public-key":
            return ["verify", "--signed", "signed.json", "--public-key", entry]
        case _:
            assert seed.kind == "study", seed.kind
            return ["recover", "good.json", "small.json", "--study", "--settings", entry, *format_]


def _of_trace(seed: Seed, chance: Random) -> list[list[str]]:
    entry, format_ = seed.entry, ["--format", chance.choice(_FORMATS)]
    page = ["report", entry, "--out", "page.html", "--force"]
    good = chance.choice(_GOOD)
    pair = chance.choice(((entry, good), (good, entry), (entry, entry)))
    by = ["--by", chance.choice(("phase", "class", "module", "kernel"))]
    gate = chance.choice(([], ["--fail-on", "5%"]))
    commands = [
        ["explain", entry],
        ["explain", entry, "--format", "json"],
        ["explain", entry, "--questions", *format_, *chance.choice(([], ["--detail"]))],
        ["explain", entry, "--table", chance.choice(_PARTS), *format_],
        ["explain", entry, "--table", chance.choice(_PARTS), "--format", "csv", "--detail"],
        ["explain", *pair],
        page,
        [*page, "small.json"],
        ["recover", entry, *format_],
        ["recover", entry, "--use-shapes"],
        ["verify", entry, "--claim", "claim.toml", *format_],
        ["compare", *pair, *by, *format_, *gate],
        ["explain", entry, "--save", "saved", "--perfetto", "out.json"],
    ]
    if seed.name.startswith("kineto"):
        commands.append(["explain", entry, "--bounded", *chance.choice(([], ["--table", chance.choice(_PARTS)]))])
    return commands
