"""Predict the time of a data-parallel step from the time of its parts and the links between ranks: the communication
time, and how much of it is exposed.

A strategy is a short program for one rank: compute for some time, issue a collective, wait for one. Collectives use one
channel, one at a time in the order of issue, as gloo and NCCL do within a group. The time of such a program can be
computed exactly.

Communication also needs a processor, for copying and adding. If ranks compute on all cores (training on CPUs), compute
slows down meanwhile: it loses `processor_share` of the time that communication is running. With NCCL this is close to
zero.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from stepscope.cost.sharding import layer_sizes
from stepscope.recording.rows.links import Links
from stepscope.spec import ModelShape

DdpStrategy = Literal["naive", "flat", "overlap", "bucketed"]
DDP_STRATEGIES: tuple[DdpStrategy, ...] = get_args(DdpStrategy)
BUCKET_BYTES, EDGE_BYTES = 25 << 20, 1 << 20


class Gradient(msgspec.Struct, frozen=True, kw_only=True):
    """The gradient of one parameter: its size, and when it is ready, from the start of backward."""

    num_bytes: int
    ready_ns: float


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A unit that FSDP gathers at once: the bytes of its parameters in the compute dtype, of its gradients as they are
    sent, and its share of forward and backward."""

    parameter_bytes: int
    gradient_bytes: int
    forward_ns: float
    backward_ns: float


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a step on one rank without communication."""

    forward_ns: float
    backward_ns: float
    optimizer_ns: float = 0.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted step. `exposed_ns` is how much longer it is than without communication."""

    communication_ns: float
    exposed_ns: float
    step_ns: float
    collectives: int

    @property
    def exposed_share(self) -> float:
        return self.exposed_ns / self.step_ns if self.step_ns else 0.0


def ready_in_order(
    sizes_bytes: Sequence[int], backward_ns: float, weights: Sequence[float] | None = None
) -> tuple[Gradient, ...]:
    """Return gradients in the order in which they become ready, each after its share of the backward pass. `weights`
    are the operations that produce each; the default is proportional to size, which holds for matrices with the same
    tokens."""
    chosen = list(sizes_bytes) if weights is None else list(weights)
    if len(chosen) != len(sizes_bytes):
        raise ValueError(f"`weights` has {len(chosen)} entries for {len(sizes_bytes)} gradients")
    total, done, gradients = sum(chosen), 0.0, []
    for size, weight in zip(sizes_bytes, chosen, strict=True):
        done += weight
        share = min(1.0, done / total) if total else 1.0
        gradients.append(Gradient(num_bytes=size, ready_ns=backward_ns * share))
    return tuple(gradients)


def model_gradients(shape: ModelShape, backward_ns: float, *, element_bytes: int = 4) -> tuple[Gradient, ...]:
    """Return the gradients of the built-in model, from the head back to the embedding, which needs no GEMM."""
    sizes, weights = [], []
    for number, layer in reversed(list(enumerate(layer_sizes(shape)))):
        for elements in (*reversed(layer.matrices), *layer.vectors):
            sizes.append(elements * element_bytes)
            weights.append(float(elements) if number else 0.0)
    return ready_in_order(sizes, backward_ns, weights)


def fill_buckets(gradients: Sequence[Gradient], bucket_bytes: int = BUCKET_BYTES) -> list[list[Gradient]]:
    """Group neighboring gradients into buckets, as `parallel.DDP` does; one larger than a bucket gets its own.

    The first bucket is small, so that communication starts early. Towards the end each bucket has half of the remaining
    gradients, so that there is little to wait for after backward.
    """
    edge_bytes = min(EDGE_BYTES, bucket_bytes)
    buckets: list[list[Gradient]] = []
    before_bytes, filled_bytes, limit_bytes = 0, 0, 0.0
    left_bytes = sum(one.num_bytes for one in gradients)
    for one in gradients:
        if not buckets or filled_bytes + one.num_bytes > limit_bytes:
            buckets.append([])
            before_bytes, left_bytes = before_bytes + filled_bytes, left_bytes - filled_bytes
            limit_bytes = min(bucket_bytes, max(edge_bytes, min(before_bytes, left_bytes / 2)))
            filled_bytes = 0
        buckets[-1].append(one)
        filled_bytes += one.num_bytes
    return buckets


def predict_ddp(
    strategy: DdpStrategy,
    gradients: Sequence[Gradient],
    compute: Compute,
    links: Links,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    processor_share: float = 0.0,
) -> StepTime:
    """Predict a step of DDP. `gradients` are in the order in which they become ready."""
    if strategy not in DDP_STRATEGIES:
        raise ValueError(f"`strategy` must be one of {', '.join(DDP_STRATEGIES)}, not {strategy!r}")
    rank = _Rank(processor_share)
    rank.work(compute.forward_ns)
    if strategy in ("overlap", "bucketed"):
        buckets = [[one] for one in gradients] if strategy == "overlap" else fill_buckets(gradients, bucket_bytes)
        _reduce_as_ready(rank, buckets, compute, links)
    else:
        rank.work(compute.backward_ns)
        total_bytes = sum(one.num_bytes for one in gradients)
        for num_bytes in [total_bytes] if strategy == "flat" else [one.num_bytes for one in gradients]:
            rank.wait(rank.issue(links.time_ns("all-reduce", num_bytes)))
    rank.work(compute.optimizer_ns)
    return rank.step_time()


def predict_sharded_optimizer(ddp: StepTime, compute: Compute, links: Links, parameter_bytes: int) -> StepTime:
    """Predict a step of DDP in which each rank updates its share of the parameters, followed by an all-gather."""
    sharing_ns = links.time_ns("all-gather", parameter_bytes)
    saved_ns = compute.optimizer_ns * (1 - 1 / links.place.ranks)
    return StepTime(
        communication_ns=ddp.communication_ns + sharing_ns,
        exposed_ns=ddp.exposed_ns + sharing_ns,
        step_ns=ddp.step_ns + sharing_ns - saved_ns,
        collectives=ddp.collectives + 1,
    )


def predict_fsdp(
    layers: Sequence[Layer],
    links: Links,
    *,
    optimizer_ns: float = 0.0,
    replicated_bytes: int = 0,
    processor_share: float = 0.0,
) -> StepTime:
    """Predict a step of FSDP. `layers` are in forward order. Parameters are gathered one layer ahead of use, in forward
    and again in backward; gradients are reduce-scattered as they appear, and those of replicated parameters all-reduced
    at the end. `optimizer_ns` is the update of all parameters on one rank; here each rank updates 1/n of them."""
    rank = _Rank(processor_share)
    gathers = [links.time_ns("all-gather", layer.parameter_bytes) for layer in layers]
    reduces = [links.time_ns("reduce-scatter", layer.gradient_bytes) for layer in layers]
    _run_gathered(rank, gathers, [layer.forward_ns for layer in layers], [0.0] * len(layers))
    _run_gathered(rank, gathers[::-1], [layer.backward_ns for layer in layers][::-1], reduces[::-1])
    rank.issue(links.time_ns("all-reduce", replicated_bytes))
    rank.wait(rank.channel_free_ns)
    rank.work(optimizer_ns / links.place.ranks)
    return rank.step_time()


def _reduce_as_ready(rank: "_Rank", buckets: Sequence[Sequence[Gradient]], compute: Compute, links: Links) -> None:
    """Reduce each bucket once its last gradient is ready, and never before the previous bucket,
    because ranks must agree on an order."""
    done_ns = 0.0
    for bucket in buckets:
        ready_ns = max(done_ns, *(one.ready_ns for one in bucket))
        rank.work(ready_ns - done_ns)
        done_ns = ready_ns
        rank.issue(links.time_ns("all-reduce", sum(one.num_bytes for one in bucket)))
    rank.work(compute.backward_ns - done_ns)
    rank.wait(rank.channel_free_ns)


def _run_gathered(rank: "_Rank", gathers: Sequence[float], works: Sequence[float], reduces: Sequence[float]) -> None:
    """Run the layers in turn. Each start requests the next layer's parameters, and each end sends its gradients."""
    gathered = rank.issue(gathers[0]) if gathers else 0.0
    for number, (work_ns, reduce_ns) in enumerate(zip(works, reduces, strict=True)):
        rank.wait(gathered)
        if number + 1 < len(gathers):
            gathered = rank.issue(gathers[number + 1])
        rank.work(work_ns)
        rank.issue(reduce_ns)


class _Rank:
    """One rank and its channel, in nanoseconds from the start of a step."""

    def __init__(self, processor_share: float) -> None:
        if not 0 <= processor_share <= 1:
            raise ValueError(f"`processor_share` must be between 0 and 1, got {processor_share}")
        self._share = processor_share
        self._now_ns = 0.0
        self._worked_ns = 0.0
        self._spans: list[tuple[float, float]] = []  # when the channel is busy: sorted, without overlap

    @property
    def channel_free_ns(self) -> float:
        """When all issued collectives are done."""
        return self._spans[-1][1] if self._spans else 0.0

    def issue(self, duration_ns: float) -> float:
        """Queue a collective behind those already issued, and return when it will be done."""
        if not duration_ns:
            return self._now_ns
        start_ns = max(self._now_ns, self.channel_free_ns)
        self._spans.append((start_ns, start_ns + duration_ns))
        return start_ns + duration_ns

    def wait(self, until_ns: float) -> None:
        self._now_ns = max(self._now_ns, until_ns)

    def work(self, work_ns: float) -> None:
        """Compute, more slowly while the channel is busy."""
        self._worked_ns += work_ns
        for start_ns, end_ns in self._spans:
            if end_ns <= self._now_ns or work_ns <= 0:
                continue
            alone_ns = min(work_ns, max(0.0, start_ns - self._now_ns))
            self._now_ns += alone_ns
            work_ns -= alone_ns
            room_ns = (end_ns - self._now_ns) * (1 - self._share)
            if work_ns > room_ns:
                work_ns -= room_ns
                self._now_ns = end_ns
            elif work_ns > 0:
                self._now_ns += work_ns / (1 - self._share)
                work_ns = 0.0
        self._now_ns += max(0.0, work_ns)

    def step_time(self) -> StepTime:
        return StepTime(
            communication_ns=sum(end_ns - start_ns for start_ns, end_ns in self._spans),
            exposed_ns=max(0.0, self._now_ns - self._worked_ns),
            step_ns=self._now_ns,
            collectives=len(self._spans),
        )
