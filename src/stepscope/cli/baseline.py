"""`stepscope baseline`: save, list, show and remove what later runs are compared with."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show_tables
from stepscope.errors import StepscopeError
from stepscope.recording.baseline import STORE
from stepscope.render.formats import Format

StoreFlag = Annotated[
    Path, typer.Option("--store", metavar="DIR", help="The directory of the baselines, made to be committed.")
]


class BaselineAction(StrEnum):
    SAVE = "save"
    LIST = "list"
    SHOW = "show"
    REMOVE = "remove"


def baseline(
    action: Annotated[BaselineAction, typer.Argument(metavar="save|list|show|remove", help="What to do.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The name of the baseline.")] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Repeated runs of the same thing: recordings, traces, bench results."),
    ] = None,
    store: StoreFlag = STORE,
    add: Annotated[bool, typer.Option("--add", help="Add the runs to a baseline that exists.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a baseline that exists.")] = False,
    format_: FormatFlag = Format.TEXT,
    detail: Annotated[bool, typer.Option("--detail", help="Show all columns.")] = False,
) -> None:
    """Save runs as a baseline, a small file to commit. `stepscope compare --baseline NAME` compares later runs with it.

    Save at least three runs, better five: how much they differ is the noise that a later change must exceed.
    """
    from stepscope.api.baselines import save_baseline
    from stepscope.explain.gate.gate_tables import baselines_table, runs_table
    from stepscope.recording.baseline import list_names, read_baseline, remove_baseline

    if action is BaselineAction.LIST:
        if name is not None:
            raise StepscopeError("`list` takes no name", hint=f"stepscope baseline show {name}")
        named = [(one, read_baseline(store, one)) for one in list_names(store)]
        show_tables([baselines_table(named)], format_, detail=detail)
        say("next: stepscope baseline show NAME" if named else "next: stepscope baseline save NAME RUN...")
        return
    if name is None:
        raise StepscopeError(f"`{action}` needs the name of a baseline", hint=f"stepscope baseline {action} main")
    if sources and action is not BaselineAction.SAVE:
        raise StepscopeError(f"`{action}` takes one name", hint=f"stepscope baseline {action} {name}")
    match action:
        case BaselineAction.SAVE:
            saved = save_baseline(name, sources or [], store=store, add=add, force=force)
            show_tables([runs_table(name, saved)], format_, detail=detail)
            say(f"next: stepscope compare --baseline {name} RUN --fail-on 3%")
        case BaselineAction.SHOW:
            show_tables([runs_table(name, read_baseline(store, name))], format_, detail=detail)
            say(f"next: stepscope compare --baseline {name} RUN --fail-on 3%")
        case BaselineAction.REMOVE:
            say(f"removed {remove_baseline(store, name)}")
