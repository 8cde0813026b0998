"""A unit: the matrices that are gathered together, and whether they are gathered."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stepscope.parallel.communicator import Communicator
from stepscope.parallel.fsdp.flat_buffer import Flat, GatheredBytes, ParameterPlace
from stepscope.parallel.fsdp.plan import Member, UnitPlan

OnGradient = Callable[[Tensor], None]


class ShardedUnit:
    """Frozen and trained matrices are in separate buffers, so that no gradients are sent for the frozen ones."""

    def __init__(
        self, plan: UnitPlan, compute_dtype: torch.dtype | None, communicator: Communicator, ledger: GatheredBytes
    ) -> None:
        self.name = plan.name
        self.doors: Sequence[nn.Module] = plan.doors
        self._ledger = ledger
        self.flats = [Flat(plan.name, members, compute_dtype, communicator) for members in _group(plan.members)]
        # Gathered or being gathered.
        self.is_resident = False
        # Gathered ahead of a use that has not started.
        self.is_ahead = False

    @property
    def gathered_bytes(self) -> int:
        return sum(flat.gathered_bytes for flat in self.flats)

    @property
    def version(self) -> int:
        """Changes whenever this rank's parameters do."""
        return sum(flat.shard._version for flat in self.flats)

    @property
    def trained_flats(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.is_trained]

    def gather(self, make_hook: Callable[["ShardedUnit", Flat, ParameterPlace], OnGradient]) -> None:
        """Start gathering. A unit that is already gathered takes part for the other ranks, and gets the same values."""
        if not self.is_resident:
            self._ledger.add(self.gathered_bytes)
        self.is_resident = True
        for flat in self.flats:
            flat.wait_gathered()
            for place in flat.require_grad_as_pieces():
                hook = make_hook(self, flat, place)
                place.full.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            flat.start_gather()

    def wait(self) -> None:
        for flat in self.flats:
            flat.wait_gathered()

    def free(self) -> None:
        if self.is_resident:
            self.is_resident = self.is_ahead = False
            for flat in self.flats:
                flat.free()
            self._ledger.remove(self.gathered_bytes)

    def is_around(self, others: Sequence["ShardedUnit"]) -> bool:
        """Another unit is used inside a call that uses this one."""
        inner = {part for door in self.doors for part in door.modules() if part is not door}
        return any(door in inner for other in others for door in other.doors)

    def has_all_gradients(self) -> bool:
        return all(flat.has_all_gradients() for flat in self.trained_flats)


def _group(members: list[Member]) -> list[list[Member]]:
    groups: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        groups.setdefault((member.parameter.dtype, member.parameter.requires_grad), []).append(member)
    return list(groups.values())
