"""Why a request for memory failed: the request, what was held and where it came from."""

from stepscope.explain.memory.memory_tables import categories_table, largest_table, layers_table, modules_table
from stepscope.explain.memory.out_of_memory import (
    lines_table,
    request_table,
    say_failure,
    say_rest_of_step,
    stack_table,
)
from stepscope.explain.story.sources import Materials
from stepscope.findings import Exhibit, Section, Table
from stepscope.units import say_size

_ROWS = 20


def show_out_of_memory(materials: Materials) -> Section:
    """Empty unless memory ran out."""
    key, title = "oom", "Out of memory"
    oom = materials.out_of_memory
    if oom is None:
        return Section(key=key, title=title)
    profile, event = oom.profile, oom.event
    parts: dict[str, Table] = {
        "oom-request": request_table(oom),
        "oom-categories": categories_table(profile, event=event),
        "oom-modules": modules_table(profile, top=_ROWS, event=event),
        "oom-layers": layers_table(profile, top=_ROWS, event=event),
        "oom-largest": largest_table(profile, top=_ROWS, event=event),
        "oom-lines": lines_table(oom, top=_ROWS),
        "oom-stack": stack_table(oom),
    }
    need = f"To fit, a step must save {say_size(oom.need_bytes)}." if oom.need_bytes else ""
    lead = " ".join(part for part in (f"{say_failure(oom)}.", say_rest_of_step(oom), need) if part)
    exhibits = tuple(Exhibit(key=name, part=table) for name, table in parts.items() if _has_rows(table))
    return Section(key=key, title=title, lead=lead, exhibits=exhibits)


def _has_rows(table: Table) -> bool:
    """Whether the table says more than that everything is unknown."""
    return bool(table.rows) and not (len(table.rows) == 1 and table.rows[0][0] == "unknown")
