"""Which parameters FSDP shards, and which are gathered together: those that are used together.

A unit is a set of matrices that is gathered before a module runs and freed after it. The module whose call does that is
the unit's door. Doors are the repeated blocks of a model, the members of its outermost lists, and outside those
every module that owns a matrix: embedding and head. A matrix with several doors, such as the weight of a tied head, is
a unit of its own, gathered at each of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a module has a parameter: `module.attribute`, with its full name `name`."""

    name: str
    module: nn.Module
    attribute: str


@dataclass(slots=True, kw_only=True)
class Member:
    """A parameter, and every place where it is registered."""

    parameter: nn.Parameter
    sites: list[Site] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first name, the one that `named_parameters` uses."""
        return self.sites[0].name


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered together, and the modules whose calls do it, by their position in the model."""

    name: str
    members: list[Member]
    doors: list[nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Units in the order of their first doors; everything else is replicated."""

    units: list[UnitPlan]
    replicated: list[Member]


def plan_units(module: nn.Module) -> Plan:
    doors = _find_doors(module)
    order = {door: place for place, door in enumerate(dict.fromkeys(doors.values()))}
    sharded: dict[tuple[int, ...], list[Member]] = {}
    replicated = []
    for member in _find_members(module):
        if member.parameter.dim() < 2 or not member.parameter.is_floating_point():
            replicated.append(member)
            continue
        behind = tuple(sorted({order[doors[site.module]] for site in member.sites}))
        sharded.setdefault(behind, []).append(member)
    names = {part: name for name, part in module.named_modules()}
    by_place = list(order)
    units = [
        UnitPlan(
            name=_name_unit(members, [names[by_place[place]] for place in places]),
            members=members,
            doors=[by_place[place] for place in places],
        )
        for places, members in sorted(sharded.items())
    ]
    return Plan(units=units, replicated=replicated)


def _name_unit(members: list[Member], doors: list[str]) -> str:
    return (doors[0] or "the root") if len(doors) == 1 else members[0].name


def _find_members(module: nn.Module) -> Iterator[Member]:
    members: dict[nn.Parameter, Member] = {}
    for path, part in module.named_modules():
        for attribute, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            member = members.setdefault(parameter, Member(parameter=parameter))
            name = f"{path}.{attribute}" if path else attribute
            member.sites.append(Site(name=name, module=part, attribute=attribute))
    yield from members.values()


def _find_doors(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the door of each module, in model order."""
    doors: dict[nn.Module, nn.Module] = {}

    def visit(part: nn.Module, *, listed: bool) -> None:
        if listed and not _is_container(part):
            for inner in part.modules():
                doors.setdefault(inner, part)
            return
        doors.setdefault(part, part)
        for child in part.children():
            visit(child, listed=listed or _is_list_of_blocks(part))

    visit(module, listed=False)
    return doors


def _is_container(module: nn.Module) -> bool:
    """It has no forward of its own, so it is never called."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_list_of_blocks(module: nn.Module) -> bool:
    """A list of layers, or a sequence of layers of one class: a sequence of different modules is the inside of one
    layer.
    """
    if isinstance(module, nn.ModuleList):
        return True
    return isinstance(module, nn.Sequential) and len({type(child) for child in module.children()}) == 1
