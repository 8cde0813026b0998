"""Mixtures of experts: the time of their parts, and the tokens of each expert."""

from collections.abc import Sequence

import msgspec

from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.experts import (
    PRODUCTS,
    ExpertLoad,
    experts_table,
    find_expert_loads,
    loads_table,
    say_loads,
)
from stepscope.explain.trace.profile import Profile, kernel_word
from stepscope.findings import Bars, Exhibit, Section, Table
from stepscope.units import say_percent

_MOST_BARS = 64


def show_experts(materials: Materials) -> Section:
    profile = materials.profile
    assert profile is not None, "only a profile has experts"
    table, loads = experts_table(profile), find_expert_loads(profile)
    exhibits = [Exhibit(key="experts-time", part=msgspec.structs.replace(table, notes=table.notes[:1]))]
    if loads:
        exhibits += [
            Exhibit(key="experts-tokens", part=_draw(max(loads, key=lambda one: one.imbalance))),
            Exhibit(key="experts-loads", part=loads_table(loads)),
        ]
    return Section(key="experts", title="Experts", lead=_say_experts(profile, table, loads), exhibits=tuple(exhibits))


def _say_experts(profile: Profile, table: Table, loads: Sequence[ExpertLoad]) -> str:
    shares = {row[0]: row[2] for row in table.rows if isinstance(row[2], float)}
    whole = f"Mixtures of experts take {say_percent(sum(shares.values()))} of the {kernel_word(profile)} time"
    if PRODUCTS in shares:
        whole += f", {say_percent(shares[PRODUCTS])} in the GEMMs of experts"
    told = say_loads(loads)
    return f"{whole}. {told[0].upper()}{told[1:]}."


def _draw(load: ExpertLoad) -> Bars:
    shown = load.tokens[:_MOST_BARS]
    rest = len(load.tokens) - len(shown)
    return Bars(
        title=f"Tokens per expert in {load.module}",
        kind="count",
        labels=tuple(str(number) for number in range(len(shown))),
        series=("tokens",),
        values=(tuple(map(float, shown)),),
        notes=("the layer with the largest imbalance", *((f"{rest} more experts",) if rest else ())),
    )
