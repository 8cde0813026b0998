"""`stepscope run`: record a few steps of a training script that knows nothing about stepscope."""

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from stepscope.errors import StepscopeError
from stepscope.jobs.workers.cpu_limits import limit_instructions
from stepscope.loop.place import choose_place, find_rank
from stepscope.loop.script import ScriptRequest


def run(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT ARGUMENTS…", help="The script, followed by its own arguments.")
    ],
    module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, like `python -m`.")] = False,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Number of steps to record.")] = 3,
    skip: Annotated[int, typer.Option(metavar="N", min=0, help="Number of warm-up steps to skip first.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html|DIR",
            help="The page, or a directory for page and recordings.  [default: report.html and runs/run/SCRIPT]",
        ),
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the script after the recording.")] = False,
    sources: Annotated[
        bool, typer.Option("--sources/--no-sources", help="Record one more step, with Python stacks, for source lines.")
    ] = True,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run of another command, or another file at --out.")
    ] = False,
) -> None:
    """Run a training script, record a few of its steps, and write a page about them. The script needs no changes.

    Steps are found by optimizer steps and backward passes, whatever library is on top. Put options before the script;
    what follows it belongs to the script. After the recording the script continues. The exit status is the script's.

    Several ranks: torchrun --nproc-per-node 8 -m stepscope run train.py
    """
    target, *arguments = script
    _require_target(target, is_module=module)
    request = ScriptRequest(
        target=target, is_module=module, folder="", page="", skip=skip, steps=steps, sources=sources, stop=stop
    )
    place = choose_place(out, request.name)
    rank, world_size = find_rank()
    if rank == 0:
        place.prepare(
            command=shlex.join(["stepscope", *sys.argv[1:]]),
            script=request.name,
            world_size=world_size,
            force=force,
        )
    limit_instructions()  # before torch is loaded, which may use instructions that this CPU forbids
    _become(msgspec.structs.replace(request, folder=str(place.folder), page=str(place.page)), arguments)


def _require_target(target: str, *, is_module: bool) -> None:
    if is_module:
        return  # importing its package may already load torch
    path = Path(target)
    if path.is_dir():
        raise StepscopeError(f"`{target}` is a directory", hint=f"stepscope run {target}/SCRIPT.py, or -m PACKAGE")
    if not path.exists():
        hint = f"stepscope run -m {target}" if _is_module(target) else "stepscope run [OPTIONS] SCRIPT.py [ARGUMENTS]"
        raise StepscopeError(f"file not found: `{target}`", hint=hint)


def _is_module(name: str) -> bool:
    top = name.partition(".")[0]
    return top.isidentifier() and find_spec(top) is not None


def _become(request: ScriptRequest, arguments: list[str]) -> NoReturn:
    """Replace this process with one in which nothing is loaded and no signal is handled yet."""
    # Flags of the interpreter, such as -O or -X, apply to the script too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "stepscope.loop.script", msgspec.json.encode(request).decode()]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command, *arguments])
