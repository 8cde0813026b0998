"""Serves the Python API over the Model Context Protocol, for agents and editors: `stepscope mcp`.

A tool is a thin layer over `stepscope.load` and what a `Run` offers. Every answer is text and a document, and both name
the evidence: the file, what recorded it, the clock of the figures, and remarks about what is missing or unreliable.
Files are only read: not even the cache of decoded files is written.

Calls run one after the other: a client may send several about one file at once, which is then read once. Only this
module imports the SDK, which is an optional extra.
"""

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import msgspec
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from stepscope import __version__
from stepscope.api.display import DataTable, RunPart
from stepscope.api.run import Run
from stepscope.api.run import load as load_run
from stepscope.errors import StepscopeError
from stepscope.explain.kernel_names import decode, describe
from stepscope.explain.rules import describe_rule, find_rule, tabulate_rules
from stepscope.explain.trace.compare import By
from stepscope.explain.trace.summary import describe_clock
from stepscope.findings import Page, Table, joint_saving
from stepscope.render.formats import visible
from stepscope.render.terminal import render_page

SCHEMA = "stepscope.mcp/1"
_INSTRUCTIONS = """\
stepscope explains where a training step spends its time and memory. Start with `load`, which says what a file is, then
ask for `findings` (what costs time, and the fix) or `questions`; `table` has the figures behind them. `rule` explains a
finding, `kernel` the name of a GPU kernel, and `compare` tells changes between two runs from noise. A path is a
recording by stepscope, a PyTorch profiler trace, an Nsight Systems export, an Nsight Compute CSV file, a CUDA memory
snapshot, or a directory with one trace per rank. Files are only read. The `unit` of the evidence says whether times are
per step or of the whole trace."""
ToolAnswer = tuple[str, Mapping[str, object]]  # text, and the same as a document
RunPath = Annotated[str, Field(description="A recording, trace, memory snapshot or directory of traces of ranks.")]
Rows = Annotated[int, Field(ge=1, description="Number of rows in long tables.")]
_one_call = threading.Lock()


def serve() -> None:
    """Answer requests on standard input until it is closed. Nothing but the protocol goes to standard output."""
    server = MCPServer("stepscope", instructions=_INSTRUCTIONS, version=__version__, log_level="WARNING")
    only_reads = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    for tool in (load, findings, questions, table, compare, kernel, rule):
        server.add_tool(_as_tool(tool), annotations=only_reads)
    server.run("stdio")


def load(path: RunPath) -> ToolAnswer:
    """Read a run and say what it is: device, step time, idle time, and how much of it is attributed. Start here."""
    run = _open(path)
    headline = run.page().headline
    figures = {"peak_bytes": run.peak_bytes} if run.is_of_memory else {"step_ms": run.step_ms}
    return _answer(headline, [run], {"name": run.name, "headline": headline, "ranks": len(run.opened)} | figures)


def findings(path: RunPath) -> ToolAnswer:
    """What costs time in a run, what matters most first: evidence, estimated saving, and the fix to paste."""
    run = _open(path)
    if run.is_of_memory:
        raise StepscopeError("findings require a trace; this is a memory snapshot", hint="call `questions` instead")
    found, joint = run.findings, joint_saving(run.findings)
    page = Page(headline=run.page().headline, tables=(), findings=found)
    figures = {"findings": found, "joint_saving_ns": joint.saving_ns if joint else None}
    return _answer(render_page(page, width=None), [run], figures)


def questions(path: RunPath) -> ToolAnswer:
    """Answers to common questions about a training step or about memory, each with its figure and the table behind it.
    For an unanswered question: the reason, and the command that records what is missing."""
    run = _open(path)
    answers = run.questions()
    listed = [
        msgspec.to_builtins(msgspec.structs.replace(one, evidence=None))
        | {"evidence": None if one.evidence is None else _as_document(one.evidence)}
        for one in answers
    ]
    return _answer(answers.text(), [run], {"answers": listed})


def table(
    path: RunPath, name: Annotated[RunPart, Field(description="Which table.")] = "classes", top: Rows = 20
) -> ToolAnswer:
    """One table of a run; for several ranks, one per rank. Of a trace: classes, phases, kernels, modules, tree (modules
    with alike layers folded), layers, ops, ranges, steps, streams, roofline, counters, findings, ranks, collectives. Of
    a memory snapshot: categories, phases, steps, modules, layers, largest, freed, leaks, saved."""
    run = _open(path)
    tables = run.tables(name, top=top)
    return _answer("\n".join(map(_as_text, tables)), [run], {"tables": [_as_document(one) for one in tables]})


def compare(
    a: Annotated[str, Field(description="The baseline: a recording or trace.")],
    b: Annotated[str, Field(description="The recording or trace to compare with it.")],
    by: Annotated[By, Field(description="What to break the step down by.")] = "class",
) -> ToolAnswer:
    """What changed from run A to run B, the largest change first, and which changes are noise."""
    runs = [_open(a), _open(b)]
    result = runs[0].compare(runs[1], by=by)
    step = result.comparison.wall
    changes = {"a_ns": step.a_ns, "b_ns": step.b_ns, "ratio": step.ratio, "verdict": step.verdict}
    return _answer(_as_text(result.table), runs, {"step": changes, "table": _as_document(result.table)})


def kernel(name: Annotated[str, Field(description="As a profiler shows it, mangled or not.")]) -> ToolAnswer:
    """Decode the name of a GPU kernel: library, operation, tile, dtype, and what each part of the name means."""
    if not name.strip():
        raise StepscopeError("the kernel name is empty", hint="stepscope kernel ampere_sgemm_128x64_nn")
    decoded = decode(name)
    shown = describe(decoded)
    return _answer(_as_text(shown), [], {"kernel": decoded, "remarks": shown.notes})


def rule(code: Annotated[str, Field(description="Such as SS007. Lists all rules if empty.")] = "") -> ToolAnswer:
    """What a finding means, how to fix it, how it is detected and how its saving is estimated."""
    shown = describe_rule(find_rule(code)) if code else tabulate_rules()
    return _answer(_as_text(shown), [], {"table": _as_document(shown)})


def _answer(text: str, runs: Iterable[Run], figures: Mapping[str, object]) -> ToolAnswer:
    """Add the evidence to an answer: once as text, once in the document."""
    evidence = [_find_evidence(rank) for run in runs for rank in run.ranks]
    text = "\n".join([text.rstrip("\n"), "", *map(_write_evidence, evidence)]).rstrip("\n")
    return text, {"schema": SCHEMA, **figures, "evidence": evidence}


def _find_evidence(run: Run) -> dict[str, Any]:
    manifest = run.opened[0].recording.manifest
    notes = run.memory.summary.notes if run.is_of_memory else run.profile.notes
    return {
        "file": str(run.files[0]),
        "source": manifest.source,
        "device": manifest.device,
        "rank": manifest.rank,
        "unit": "at the peak" if run.is_of_memory else run.profile.clock.say_per_step,
        "clock": None if run.is_of_memory else describe_clock(run.profile),
        "remarks": [*(doubt.text for doubt in manifest.doubts), *notes],
    }


def _write_evidence(evidence: dict[str, Any]) -> str:
    said = [evidence["file"], evidence["source"], evidence["device"] or "unknown device"]
    said += [] if evidence["rank"] is None else [f"rank {evidence['rank']}"]
    if (clock := evidence["clock"]) is not None:
        said.append(f"{clock.step_ns / 1e6:.4g} ms {evidence['unit']} ({clock.kind}, mean of {clock.steps:g})")
    return "\n".join([f"evidence: {', '.join(said)}", *(f"  remark: {one}" for one in evidence["remarks"])])


def _as_text(shown: Table) -> str:
    return DataTable.of(shown).render("md")


def _as_document(shown: Table) -> dict[str, Any]:
    """A table as `--format json` prints it."""
    return msgspec.json.decode(DataTable.of(shown).render("json"), type=dict[str, Any])


def _open(path: str) -> Run:
    """The run at a path, read again if a file changed."""
    if not path or "\0" in path:
        raise StepscopeError(f"not a path: `{path}`", hint="an absolute path, such as /home/me/trace.json.gz")
    full = Path(os.path.expanduser(path)).absolute()  # noqa: PTH111  # Path.expanduser raises for unknown users
    inside = sorted(full.iterdir()) if full.is_dir() else []
    stats = [(one, one.stat()) for one in (full, *inside) if one.exists()]
    return _read(full, tuple((str(one), stat.st_mtime_ns, stat.st_size) for one, stat in stats))


@lru_cache(maxsize=4)
def _read(path: Path, _stamp: tuple[tuple[str, int, int], ...]) -> Run:
    return load_run(path, cache=False)


def _as_tool(tool: Callable[..., ToolAnswer]) -> Callable[..., CallToolResult]:
    """Errors that a user can fix are answers too. A bug is logged to standard error by the SDK."""

    @wraps(tool)
    def call(**arguments: object) -> CallToolResult:
        try:
            with _one_call:
                text, document = tool(**arguments)
        except (StepscopeError, OSError) as error:
            said = f"{error.strerror}: `{error.filename}`" if isinstance(error, OSError) else str(error)
            return CallToolResult(content=[TextContent(text=visible(f"error: {said}"))], is_error=True)
        plain = msgspec.json.decode(msgspec.json.encode(document), type=dict[str, Any])
        return CallToolResult(content=[TextContent(text=visible(text))], structured_content=plain)

    # The SDK derives the schema of the arguments from the signature, and of the answer from the return type.
    call.__signature__ = signature(tool).replace(return_annotation=CallToolResult)  # type: ignore[attr-defined]
    return call
