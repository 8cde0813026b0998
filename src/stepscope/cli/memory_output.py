"""A profile of memory on the terminal, for the two verbs that have one: `memory` and `explain`."""

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stepscope.cli.output import say, show, show_tables, terminal_width
from stepscope.errors import StepscopeError
from stepscope.report.formats import Format

if TYPE_CHECKING:
    from stepscope.explain.memory import MemoryProfile

DEFAULT_DETAIL = 0.1
SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%?")


class MemoryPart(StrEnum):
    """The parts of a page on memory."""

    CATEGORIES = "categories"
    PHASES = "phases"
    STEPS = "steps"
    MODULES = "modules"
    LAYERS = "layers"
    LARGEST = "largest"
    FREED = "freed"
    LEAKS = "leaks"
    SAVED = "saved"


class Stacked(StrEnum):
    """What `--by` accepts: what the areas of the picture are."""

    CATEGORY = "category"
    MODULE = "module"


def check_view(*, questions: bool, part: str | None, step: str, detail: str | None) -> None:
    """Refuses, before anything runs, what could not be shown afterwards."""
    parse_detail(detail)
    if questions and part is not None:
        raise StepscopeError("`--questions` and `--table` are two things to print", hint="leave one out")
    if step not in ("last", "all") and not step.isdecimal():
        raise StepscopeError(f"`--step {step}` is no step", detail="expected last, all or a number", hint="--step last")


def parse_detail(text: str | None) -> float:
    """The share of pieces that a picture tells apart: `10%` and `0.1` are a tenth; the word `yes`, which `--detail`
    alone becomes, is about columns."""
    if text is None or text == "yes":
        return DEFAULT_DETAIL
    found = SHARE.fullmatch(text.strip())
    value = float(found[1]) / (100 if text.strip().endswith("%") else 1) if found else -1.0
    if not 0 <= value <= 1:
        raise StepscopeError(f"`--detail {text}` is no share", detail="expected 0% to 100%", hint="--detail 10%")
    return value


def draw(
    profile: "MemoryProfile",
    path: Path,
    *,
    by: Literal["category", "module"],
    step: str,
    detail: str | None,
    force: bool,
) -> None:
    from stepscope.jobs.experiments import memory_view
    from stepscope.report.figures import check_figure, save

    check_figure(path, force=force)
    save(memory_view.draw_profile(profile, by=by, step=step), path, detail=parse_detail(detail))
    say(f"picture: {path}")


def print_profile(
    profile: "MemoryProfile", format_: Format, *, part: str | None, top: int, questions: bool, detail: str | None
) -> None:
    """The page, one part of it, or the answers."""
    from stepscope.explain.memory.memory_tables import make_part, memory_page
    from stepscope.jobs.experiments import memory_view
    from stepscope.report.terminal import render_page

    width = terminal_width()
    if questions:
        words = format_ is Format.TEXT
        text, tables = memory_view.answer_profile(profile, width, words=words, evidence=detail is not None)
        show(text)
        show_tables(tables, format_)
    elif part is not None:
        table = make_part(profile, part, top=top)
        show_tables([table], format_, detail=detail == "yes")
    elif format_ is Format.JSON:
        show(memory_view.encode_profile(profile))
    elif format_ is Format.TEXT:
        show(render_page(memory_page(profile), width=width))
    else:
        raise StepscopeError(
            f"the page is text or json, not `{format_.value}`", hint=f"--table categories --format {format_.value}"
        )
