"""Finds where the steps of a training loop begin and end, from what every loop does.

A step ends when its optimizer has stepped. With several optimizers, that is the one that steps least often, the last of
them if they take turns: a GAN with five discriminator steps per generator step has one step per generator step. If the
loop takes batches from a DataLoader in every step, the next step begins with its first batch, so that logging and the
scheduler belong to the step that they follow; otherwise it begins at once.

Optimizers that do not derive from `torch.optim.Optimizer`, or whose `step` is compiled, are not seen. Then the calls of
`zero_grad` separate the steps, and without these every backward pass is a step. The latter takes many passes to say:
the first optimizer step of a loop may come after a hundred micro-batches.
"""

from collections import Counter
from typing import Literal

FoundBy = Literal["optimizer steps", "calls of zero_grad", "backward passes"]
LEAST_STEPS = 2  # before anything can be said about a loop
_LEAST_CLEARED, _LEAST_ALONE = 6, 200  # backward passes without an optimizer step, with and without zero_grad
_PATIENCE = 20  # steps of others, for an optimizer that has stepped once
_IN_MOST_STEPS = 0.8


class StepFinder:
    """Call a method for each event of the loop; it returns whether a new step begins there. `settle` ends the search:
    from then on, the same event marks every step."""

    def __init__(self) -> None:
        self.found_by: FoundBy = "optimizer steps"
        self.backwards = 0
        self._optimizer_steps: Counter[int] = Counter()
        self._others_before: dict[int, int] = {}  # steps of other optimizers before an optimizer's first
        self._cleared = 0  # calls of zero_grad with a backward pass before them
        self._is_dirty = False
        self._loader_steps: Counter[int] = Counter()  # in how many steps a loader was used
        self._requested: set[int] = set()
        self._batches: Counter[int] = Counter()
        self._settled = False
        self._anchor: int | None = None
        self._loader: int | None = None
        self._awaits_batch = False

    # --- Events -------------------------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: int) -> bool:
        self._others_before.setdefault(optimizer, self.optimizer_steps)
        self._optimizer_steps[optimizer] += 1
        if self._settled:
            return self.found_by == "optimizer steps" and optimizer == self._anchor and self._end_step()
        if optimizer != self._find_anchor():
            return False
        self._loader_steps.update(self._requested)
        self._requested.clear()
        return True

    def gradients_cleared(self) -> bool:
        was_dirty, self._is_dirty = self._is_dirty, False
        self._cleared += was_dirty
        if self._settled:
            return was_dirty and self.found_by == "calls of zero_grad" and self._end_step()
        return was_dirty and not self._optimizer_steps and self._are_cleared

    def backward_ran(self) -> bool:
        self.backwards += 1
        self._is_dirty = True
        if self._settled:
            return self.found_by == "backward passes"
        return not self._optimizer_steps and not self._are_cleared and self.backwards >= _LEAST_ALONE

    def batch_requested(self, loader: int) -> bool:
        self._requested.add(loader)
        self._batches[loader] += 1
        if not (self._awaits_batch and loader == self._loader):
            return False
        self._awaits_batch = False
        return True

    # --- Conclusions --------------------------------------------------------------------------------------------------

    @property
    def steps_seen(self) -> int:
        anchor = self._anchor if self._settled else self._find_anchor()
        if anchor is not None:
            return self._optimizer_steps[anchor]
        return max(self._optimizer_steps.values(), default=0) or self._count_without_optimizer()

    @property
    def is_waiting(self) -> bool:
        """Whether an optimizer may step less often than those that have repeated their step: it has stepped only once,
        and its second step may still come. The search must not end before it is clear."""
        total = self.optimizer_steps
        return any(
            steps < LEAST_STEPS and total - self._others_before[one] <= self._others_before[one] + _PATIENCE
            for one, steps in self._optimizer_steps.items()
        )

    @property
    def optimizer_steps(self) -> int:
        return sum(self._optimizer_steps.values())

    def batches_of(self, loader: int) -> int:
        return self._batches[loader]

    def settle(self) -> None:
        """Decide what marks steps."""
        self._settled, self._anchor = True, self._find_anchor()
        if self._anchor is None and not self._optimizer_steps:
            self.found_by = "calls of zero_grad" if self._are_cleared else "backward passes"
        if self._anchor is not None and self._loader_steps:
            loader, steps = self._loader_steps.most_common(1)[0]
            if steps >= _IN_MOST_STEPS * (self._optimizer_steps[self._anchor] - 1):
                self._loader, self._awaits_batch = loader, True

    def _end_step(self) -> bool:
        """Whether the next step begins now; otherwise it begins with its first batch."""
        if self._loader is None:
            return True
        # No batch since the last step ended: the loop no longer uses this loader.
        was_waiting, self._awaits_batch = self._awaits_batch, True
        return was_waiting

    def _find_anchor(self) -> int | None:
        repeated = {one: steps for one, steps in self._optimizer_steps.items() if steps >= LEAST_STEPS}
        if not repeated:
            return None
        fewest = min(repeated.values())
        # In a cycle, those that have stepped once less come later; the last of them ends the cycle.
        latest = [one for one, steps in repeated.items() if steps <= fewest]
        return latest[-1]

    @property
    def _are_cleared(self) -> bool:
        """Whether calls of zero_grad separate backward passes."""
        return self._cleared >= LEAST_STEPS and self.backwards >= _LEAST_CLEARED

    def _count_without_optimizer(self) -> int:
        if self._are_cleared:
            return self._cleared
        return self.backwards if self.backwards >= _LEAST_ALONE else 0
