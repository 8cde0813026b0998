"""Averages gradients over ranks while they are being computed.

Autograd calls a hook per parameter, which moves the gradient into its bucket while it is still in the cache.

Ranks may compute gradients in different orders, or not compute some at all. Messages are sent in the same order on all
ranks: a bucket waits for those before it. At first that is the reverse registration order. In the first step rank 0
records the order in which gradients become ready, and all ranks use it from the second step on.

The last bucket is sent in `finish`, with a flag for gradients that came too late for their own bucket, for example
after several backward passes. If any rank set it, all buckets are reduced once more. So ranks need not agree on how
often a parameter was used, and that costs no extra message.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from stepscope.parallel.buckets import Bucket, BucketLimits, Slot, build_buckets
from stepscope.parallel.communicator import Communicator


class GradientAverager:
    """The gradients of named parameters, in buckets.

    `under_way`: some are in buckets and not yet averaged. `suspended`: new gradients are left in `.grad`.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]],
        communicator: Communicator,
        limits: BucketLimits,
        *,
        overlapped: bool,
    ) -> None:
        self.under_way = False
        self.suspended = False
        self._communicator = communicator
        self._limits = limits
        self._overlapped = overlapped
        self._scale = 1 / communicator.world
        unplaced = Bucket((), "none", self._scale)
        self.slots = [Slot(index, name, param, unplaced) for index, (name, param) in enumerate(params)]
        self.buckets = build_buckets(reversed(self.slots), limits, self._scale)
        self._late = False
        self._num_sent = 0
        # Slot indices in the order their gradients arrive, until an order is agreed on.
        self._observed: list[int] | None = [] if overlapped else None
        # Autograd has a thread per device, and all of them call the hooks.
        self._lock = threading.Lock()
        self._attach_hooks()

    def finish(self) -> None:
        """Average the gradients of all ranks. Every rank must call this, even one without any."""
        if self._send_and_deliver():
            self._send_and_deliver()
        for slot in self.slots:
            slot.expected = slot.arrived or 1
            slot.arrived = 0
        self.under_way = False
        if self._observed is not None:
            self._adopt_order(self._observed)

    def _attach_hooks(self) -> None:
        hooks = []
        for slot in self.slots:
            hook = _make_hook(weakref.ref(self), slot)
            hooks.append(slot.param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _detach_hooks, hooks).atexit = False

    def _receive(self, slot: Slot) -> None:
        """Called when a parameter's gradient is ready."""
        bucket = slot.bucket
        if bucket.is_out:
            slot.arrived += 1
            self._late = True
            return
        if self.suspended:
            return
        self.under_way = True
        slot.arrived += 1
        if self._observed is not None:
            self._observed.append(slot.index)
        bucket.take(slot)
        if slot.arrived == slot.expected:
            bucket.awaited -= 1
            if bucket.awaited == 0 and self._overlapped:
                self._send_complete()

    def _send_complete(self) -> None:
        """Send in order, and never the last one."""
        while self._num_sent < len(self.buckets) - 1 and self.buckets[self._num_sent].awaited == 0:
            self._send_next()

    def _send_next(self) -> None:
        self.buckets[self._num_sent].send(self._communicator, late=self._late)
        self._num_sent += 1

    def _send_and_deliver(self) -> bool:
        """Average what is there; return whether some gradient came after its bucket was sent, on any rank."""
        while self._num_sent < len(self.buckets):
            self._send_next()
        for bucket in self.buckets:
            bucket.deliver()
        self._num_sent = 0
        late, self._late = self._late, False
        # All ranks must reach the same answer. With NCCL, reading it stalls the CPU, so it is skipped where gradients
        # came once: then, with as many backward passes on all ranks, none is late on any. gloo has already stalled the
        # CPU.
        if self.buckets and (self._communicator.backend == "gloo" or self._came_often):
            late = self.buckets[-1].reports_late()
        return late

    @property
    def _came_often(self) -> bool:
        return any(slot.arrived > 1 or slot.expected > 1 for slot in self.slots)

    def _adopt_order(self, observed: list[int]) -> None:
        """From now on, send gradients in the order in which rank 0 last had them; those it did not have come last."""
        order = self._communicator.share_objects(observed, "the order of gradients")[0]
        if not order:
            self._observed = []
            return
        last_seen = {index: moment for moment, index in enumerate(order)}
        unseen = [slot.index for slot in reversed(self.slots) if slot.index not in last_seen]
        indices = sorted(last_seen, key=last_seen.__getitem__) + unseen
        self.buckets = build_buckets((self.slots[index] for index in indices), self._limits, self._scale)
        self._observed = None


def _make_hook(reference: "weakref.ref[GradientAverager]", slot: Slot) -> Callable[[Tensor], None]:
    """A hook that does not keep its averager alive: the parameters, which keep the hook, may outlive it."""

    def on_gradient(_: Tensor) -> None:
        averager = reference()
        if averager is not None:
            with averager._lock:
                averager._receive(slot)

    return on_gradient


def _detach_hooks(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
