"""The rule about communication that nothing overlaps with.

What to do about exposed communication depends on who communicates, which the collectives show: gradients that are
reduced in backward, weights that are gathered before a layer, shards around the optimizer, activations within a layer.
Overlap is estimated from what runs where: a collective can be hidden behind kernels that run after its input is ready
and before its result is needed, and that do not overlap with communication yet.
"""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from stepscope.explain.ranks.collectives import (
    CoveredTime,
    Floats,
    Ints,
    best_bandwidth,
    computing,
    exposed_ns,
    find_collectives,
    needed_ns,
)
from stepscope.explain.ranks.micro_batches import MicroBatches
from stepscope.explain.rules.evidence import WORTH_SAYING, Gain, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule
from stepscope.explain.rules.strategies.advice import (
    ADVICE,
    DEEPSPEED,
    FEWER_BYTES,
    FEWER_MESSAGES,
    FSDP1,
    FSDP2,
    LARGER_BUCKETS,
    REDUCE_ONCE,
    SEND_LESS,
    ZERO_OPTIMIZER,
    StrategyAdvice,
    StrategyName,
)
from stepscope.units import count_noun, say_message_bytes, say_percent

LEAST_EXPOSED = 0.02  # of the step
_MOST = 0.5
_LEAST_SAID = 0.01  # of the exposed time
_SMALL_BYTES = 4 << 20  # a bucket of DDP has 25 MiB unless it is set
# A single PCIe 4.0 ×16 slot carries over 20 GB/s; NVLink and Infinity Fabric ten times as much.
_SLOW_LINK, _USUAL_LINK = 10e9, 20e9
_USUAL_LATENCY_NS = 50_000
_MOST_IN_ONE_MACHINE = 8


@dataclass(frozen=True)
class Communication:
    """The collectives of the steps that the rules use."""

    evidence: StepEvidence

    @cached_property
    def collectives(self) -> pl.DataFrame:
        return find_collectives(self.evidence.profile, self.evidence.kernels)

    @cached_property
    def exposed(self) -> Floats:
        return exposed_ns(self.collectives, computing(self.evidence.kernels))

    @cached_property
    def waiting(self) -> Floats:
        """How much of each exposed collective is more than its message needs."""
        longer = self.collectives["time_ns"].to_numpy() - needed_ns(self.collectives)
        result: Floats = np.clip(longer, 0.0, self.exposed)
        return result

    @cached_property
    def exposed_ns(self) -> float:
        """Time per step in which only communication runs."""
        return CoveredTime(self.evidence.kernels).total_ns / self.evidence.num_steps - self.evidence.computing_ns

    @cached_property
    def hidden_ns(self) -> float:
        """Time per step in which communication overlaps with other kernels."""
        return CoveredTime(self.collectives).total_ns / self.evidence.num_steps - self.exposed_ns

    @cached_property
    def waited_ns(self) -> float:
        """The part of `exposed_ns` in which this rank waits for a later one, as far as their traces were given."""
        times = self.evidence.rank_times
        return (
            min(times.exposed_wait_ns(self.evidence.profile.recording.manifest.rank), self.exposed_ns) if times else 0.0
        )

    @property
    def own_ns(self) -> float:
        """The part of `exposed_ns` that communication itself takes."""
        return self.exposed_ns - self.waited_ns

    @property
    def rows(self) -> Ints:
        result: Ints = self.collectives["row"].to_numpy()
        return result

    def gain(self, shorter_ns: Floats) -> Gain:
        """Return what a step gains if collectives are shorter by this much."""
        durations = self.evidence.durations
        durations[self.rows] -= shorter_ns
        return self.evidence.gain_of(durations)

    def _share(self, test: pl.Expr) -> float:
        """The share of exposed time in these collectives."""
        weighed = self.collectives.with_columns(exposed=pl.Series(self.exposed))
        return float(weighed.filter(test)["exposed"].sum()) / max(1.0, float(self.exposed.sum()))

    @cached_property
    def strategy(self) -> StrategyName:
        """Who communicates, by what takes most of the exposed time."""
        kind, phase = pl.col("kind"), pl.col("phase").fill_null("")
        shares = {
            name: self._share(kind.is_in(kinds))
            for name, kinds in (
                ("all-to-all", ["all-to-all"]),
                ("pipeline", ["send and receive"]),
                ("shards", ["all-gather", "reduce-scatter"]),
                ("all-reduce", ["all-reduce"]),
                ("broadcast", ["broadcast"]),
            )
        }
        most = max(shares, key=lambda name: shares[name])
        if not shares[most]:
            return "unknown"
        if most in ("shards", "all-reduce") and self._is_inference:
            return "tensor parallel"  # without gradients and an optimizer
        if most == "broadcast":  # of the weights that a rank has updated
            in_update = self._share((kind == "broadcast") & (phase == "optimizer")) > _MOST * shares[most]
            return "sharded optimizer" if in_update or self._says("ZeroRedundancyOptimizer") else "unknown"
        if most == "shards":
            if not self.collectives.select((kind == "reduce-scatter").any()).item():
                return "unknown"
            return "FSDP" if self._is_fsdp or self._gathers_in_model() else "sharded optimizer"
        if most == "all-reduce":
            in_forward = self._share((kind == "all-reduce") & (phase == "forward"))
            if in_forward > 0.25 * shares[most]:
                return "tensor parallel"
            in_backward = self._share((kind == "all-reduce") & (phase == "backward"))
            return "DDP" if in_backward > _MOST * shares[most] or self._says("DistributedDataParallel") else "unknown"
        return "all-to-all" if most == "all-to-all" else "pipeline"

    @property
    def _is_fsdp(self) -> bool:
        return self._says("FSDP") or self._says("FullyShardedDataParallel")

    @property
    def _is_inference(self) -> bool:
        """Whether phases are known and none of them is backward."""
        phases = self.evidence.kernels.select("phase", "time_ns")
        known_ns = int(phases.filter(pl.col("phase").is_not_null())["time_ns"].sum())
        return known_ns > _MOST * int(phases["time_ns"].sum()) and not (phases["phase"] == "backward").any()

    @property
    def has_small_messages(self) -> bool:
        sizes = self.collectives["message_bytes"].drop_nulls()
        return bool((sizes < _SMALL_BYTES).sum() > max(1, _MOST * sizes.len()))

    @cached_property
    def micro_batches(self) -> MicroBatches:
        return MicroBatches(self.evidence.kernels, self.collectives.filter(pl.col("kind") == "all-reduce"))

    @property
    def sends_half_precision(self) -> bool:
        """Whether most of the exposed time is in collectives of bf16 or fp16, by the names of their kernels."""
        return self._share(pl.col("short").str.contains(r"\b(bf16|fp16)\b")) > _MOST

    def _gathers_in_model(self) -> bool:
        """Whether weights are gathered in forward and backward rather than around the update: by phase, and where
        phases are unknown, by the kernels of layers between one all-gather and the next."""
        phase = pl.col("phase").fill_null("")
        gathers = self.collectives.filter(pl.col("kind") == "all-gather")
        in_model = int(gathers.filter(phase.is_in(["forward", "loss", "backward"]))["time_ns"].sum())
        in_update = int(gathers.filter(phase == "optimizer")["time_ns"].sum())
        if in_model + in_update > _MOST * int(gathers["time_ns"].sum()):
            return in_model > in_update
        return self._places_among_layers(gathers) > _MOST * gathers.height

    @cached_property
    def exchanges_in_layers(self) -> bool:
        """Whether all-to-alls are part of layers, such as those that send tokens to experts and back: there are several
        per forward pass, with layers between. Embeddings are exchanged once per pass."""
        in_forward = pl.col("phase").fill_null("forward") == "forward"
        exchanges = self.collectives.filter((pl.col("kind") == "all-to-all") & in_forward)
        return self._places_among_layers(exchanges) >= 2 * self.evidence.num_steps

    def _places_among_layers(self, collectives: pl.DataFrame) -> int:
        """How many of these collectives are separated by kernels of layers."""
        layers = self.evidence.kernels.filter(pl.col("class").is_in(["GEMM", "attention", "convolution"]))
        return len(np.unique(np.searchsorted(layers["row"].to_numpy(), collectives["row"].to_numpy())))

    @cached_property
    def advice(self) -> StrategyAdvice:
        """What to do, for the implementation that the run uses, as far as it is known."""
        if self.strategy in ("FSDP", "sharded optimizer") and self._says("DeepSpeed"):
            return DEEPSPEED
        if self.strategy == "FSDP" and self._says("FullyShardedDataParallel"):
            return FSDP1
        if self.strategy == "FSDP" and (self._says("FSDP::") or self._says("FSDPModule")):
            return FSDP2
        if self.strategy == "sharded optimizer" and self._says("ZeroRedundancyOptimizer"):
            return ZERO_OPTIMIZER
        return ADVICE[self.strategy]

    def _says(self, word: str) -> bool:
        """Whether a range, or a class that makes the model or the optimizer parallel, has this in its name."""
        recording = self.evidence.profile.recording
        loop = recording.manifest.loop
        if loop is not None and any(word in one for one in loop.wrappers):
            return True
        return bool(recording.ranges["name"].str.contains(word, literal=True).any())

    @cached_property
    def hidden_by_overlap(self) -> Floats:
        """How much of each collective could overlap with other kernels."""
        collectives, phase = self.collectives, pl.col("phase").fill_null("")
        if self.strategy == "tensor parallel":
            return np.minimum(self.exposed, self._neighbouring_products())
        reduces = pl.col("kind").is_in(["all-reduce", "reduce-scatter"])
        # A sharded optimizer may send its shards to the others instead.
        gathers = pl.col("kind").is_in(["all-gather", *(["broadcast"] if self.strategy == "sharded optimizer" else [])])
        exchanges = (pl.col("kind") == "all-to-all") & (not self.exchanges_in_layers)
        in_update, in_forward = phase == "optimizer", phase == "forward"
        steps = _StepLimits(self.evidence.kernels)
        hidden = np.zeros(collectives.height)
        for test, limit, is_later in (
            (reduces & ~in_update, steps.last_ns, True),
            (reduces & in_update, steps.backward_ns, False),
            (gathers & in_update, steps.next_backward_ns, True),
            (gathers & ~in_update, steps.first_ns, False),
            (exchanges & in_forward, steps.first_ns, False),
            (exchanges & ~in_forward, steps.last_ns, True),
        ):
            ours = np.flatnonzero(collectives.select(test.fill_null(value=False)).to_series().to_numpy())
            if len(ours):
                hidden[ours] = self._fill(ours, limit(collectives[ours]), is_later=is_later)
        return hidden

    def _neighbouring_products(self) -> Floats:
        """The time of the GEMM right before each collective, or right after it."""
        kernels = self.evidence.kernels.filter(pl.col("class") != "communication")
        time = kernels.select(pl.when(pl.col("class") == "GEMM").then("time_ns").otherwise(0)).to_series().to_numpy()
        padded = np.concatenate(([0], time, [0])).astype(np.float64)
        after = np.searchsorted(kernels["row"].to_numpy(), self.rows)
        result: Floats = np.maximum(padded[after], padded[after + 1])
        return result

    @cached_property
    def _free(self) -> tuple[CoveredTime, CoveredTime]:
        """Kernels outside the optimizer together with communication, and communication: the difference is the time of
        kernels that do not overlap with communication."""
        kernels = self.evidence.kernels
        communication = pl.col("class") == "communication"
        model = kernels.filter(communication | (pl.col("phase").fill_null("") != "optimizer"))
        return CoveredTime(model), CoveredTime(kernels.filter(communication))

    def _fill(self, ours: Ints, limits: Ints, *, is_later: bool) -> Floats:
        """Hide exposed collectives behind kernels that do not overlap with communication yet, between each collective
        and its limit, later or earlier. Each kernel is used once."""
        edge = self.collectives["end_ns" if is_later else "start_ns"].to_numpy()[ours]
        exposed, hidden = self.exposed[ours], np.zeros(len(ours))
        if not is_later:  # the same, mirrored in time
            edge, limits, exposed = edge[::-1], limits[::-1], exposed[::-1]
        following = np.concatenate((np.where(limits[1:] == limits[:-1], edge[1:], limits[:-1]), limits[-1:]))
        near, far = (edge, following) if is_later else (following, edge)
        model, communication = self._free
        free = model.between(near, np.maximum(near, far)) - communication.between(near, np.maximum(near, far))
        oldest = 0
        for place in range(len(ours)):
            room = float(free[place])
            while oldest < place and limits[oldest] != limits[place]:
                oldest += 1
            while room > 0 and oldest <= place:
                taken = min(room, float(exposed[oldest] - hidden[oldest]))
                hidden[oldest] += taken
                room -= taken
                oldest += hidden[oldest] >= exposed[oldest]
        return hidden if is_later else hidden[::-1]


class _StepLimits:
    """When the step of a collective begins, when its backward begins, and when its model ends. A step is that of the
    launch, so that it is the same for all streams."""

    def __init__(self, kernels: pl.DataFrame) -> None:
        model = kernels.filter((pl.col("class") != "communication") & (pl.col("phase").fill_null("") != "optimizer"))
        self._steps = model.group_by("step").agg(
            first=pl.col("start_ns").min(),
            last=pl.col("end_ns").max(),
            backward=pl.col("start_ns").filter(pl.col("phase") == "backward").min(),
        )

    def _look_up(self, collectives: pl.DataFrame, column: str, default: str, *, step: pl.Expr) -> Ints:
        asked = collectives.select(step=step, default=pl.col(default))
        joined = asked.join(self._steps, on="step", how="left", nulls_equal=True, maintain_order="left")
        return joined.select(pl.coalesce(column, "default")).to_series().to_numpy()

    def first_ns(self, collectives: pl.DataFrame) -> Ints:
        return self._look_up(collectives, "first", "start_ns", step=pl.col("step"))

    def last_ns(self, collectives: pl.DataFrame) -> Ints:
        return self._look_up(collectives, "last", "end_ns", step=pl.col("step"))

    def backward_ns(self, collectives: pl.DataFrame) -> Ints:
        return self._look_up(collectives, "backward", "start_ns", step=pl.col("step"))

    def next_backward_ns(self, collectives: pl.DataFrame) -> Ints:
        return self._look_up(collectives, "backward", "end_ns", step=pl.col("step") + 1)


# --- Exposed communication --------------------------------------------------------------------------------------------


def find_exposed_communication(evidence: StepEvidence) -> Hit | None:
    found = Communication(evidence)
    if found.own_ns < LEAST_EXPOSED * evidence.step_ns:
        return None
    text = _say_exposed(found)
    more_waiting = float(found.waiting.sum()) / evidence.num_steps - found.waited_ns
    is_pipeline = found.strategy == "pipeline"  # whose stages wait for each other, even if none is late
    if not is_pipeline and _is_partial(evidence) and more_waiting > _MOST * found.own_ns:
        return _blame_other_ranks(found, more_waiting, text)
    if not is_pipeline and evidence.rank_times is None and (slow := _slow_link(found)) is not None:
        return _blame_link(found, slow, text)
    return _advise(found, f"{text}; {_say_messages(found)}")


def _say_exposed(found: Communication) -> str:
    """How much communication is exposed, and how much of that is spent waiting for ranks whose traces were given."""
    evidence = found.evidence
    text = f"{ms(found.exposed_ns)} {evidence.clock.say_per_step} does not overlap with other kernels"
    text += f", {ms(found.hidden_ns)} does" if found.hidden_ns else ", and none does"
    times, world = evidence.rank_times, evidence.profile.recording.manifest.world_size
    if times is None:
        return text
    given = f"{len(times.ranks)} of {world}"
    if _waits_matter(found):
        whom = f"a later one of these {given} ranks" if _is_partial(evidence) else "ranks that arrive later"
        text += f"; {ms(found.waited_ns)} of it is spent waiting for {whom}"
    if _is_partial(evidence):
        text += f"; how much of it is spent waiting for ranks other than these {given}, only their traces show"
    return text


def _waits_matter(found: Communication) -> bool:
    return found.waited_ns >= _LEAST_SAID * found.exposed_ns


def _is_partial(evidence: StepEvidence) -> bool:
    """Whether the traces of some ranks are missing."""
    times, world = evidence.rank_times, evidence.profile.recording.manifest.world_size
    return times is None or (world is not None and world > len(times.ranks))


def _say_bytes(size: float) -> str:
    return say_message_bytes(int(float(f"{size:.3g}")))


def _title(found: Communication, more: str = "") -> str:
    evidence = found.evidence
    share = say_percent(found.own_ns / evidence.step_ns)
    waits = ", besides waiting for late ranks" if _waits_matter(found) else ""
    return f"Exposed communication: {ms(found.own_ns)} {evidence.clock.say_per_step} ({share}){waits}{more}"


def _say_messages(found: Communication) -> str:
    """How many messages of which size, and how fast they are."""
    collectives, evidence = found.collectives, found.evidence
    kinds = collectives.group_by("kind").agg(pl.len(), pl.col("time_ns").sum()).sort("time_ns", "kind", descending=True)
    named = [kind for kind in kinds["kind"].to_list() if kind is not None][:2]
    count = collectives.height / evidence.num_steps
    said = f"{count_noun(round(count, 1 if count < 10 else None), 'collective')} {evidence.clock.say_per_step}"
    said += f", mostly {' and '.join(named)}" if named else ""
    sizes = collectives["message_bytes"].drop_nulls()
    if sizes.len():
        middle = sizes.median()
        assert isinstance(middle, float)
        said += f", with a median message of {_say_bytes(middle)}"
    best = best_bandwidth(collectives)
    if best is not None:
        said += f"; large messages reach {best / 1e9:.3g} GB/s of bus bandwidth"
        said += ", waits included" if _waits_matter(found) else ""
    return said


def _advise(found: Communication, text: str) -> Hit | None:
    """What the strategy allows; None if the step would be as long without communication."""
    evidence, share = found.evidence, found.own_ns / max(1.0, found.exposed_ns)
    least = WORTH_SAYING * evidence.step_ns
    if found.gain(share * found.exposed).step_ns < least:
        return None
    text += f"; {found.advice.seen}"
    if found.strategy == "DDP" and found.micro_batches.reduces_in_each:
        return _reduce_once(found, text)
    hidden = share * found.hidden_by_overlap
    if float(hidden.sum()) / evidence.num_steps >= least:
        return _overlap(found, hidden, text)
    return _send_less(found, share, text)


def _reduce_once(found: Communication, text: str) -> Hit:
    """What to do if the gradients of each micro-batch are reduced."""
    passes = found.micro_batches
    less = max(0.0, 1 - passes.left_ns / found.evidence.num_steps / found.own_ns)
    text += f"; each of {passes.count} micro-batches per update reduces gradients, where the last one would do"
    return _hit(found, found.gain(less * found.own_ns / found.exposed_ns * found.exposed), text, REDUCE_ONCE)


def _overlap(found: Communication, hidden: Floats, text: str) -> Hit:
    """What to do if kernels are left to hide communication behind."""
    advice = LARGER_BUCKETS if found.strategy == "DDP" and found.has_small_messages else found.advice
    can_hide, gain = min(found.own_ns, float(hidden.sum()) / found.evidence.num_steps), found.gain(hidden)
    text += f"; {ms(can_hide)} of it could overlap with kernels that do not overlap with communication yet"
    text += f", and the step gains {ms(gain.step_ns)}" if gain.step_ns < _MOST * can_hide else ""
    text += "; for the rest, only fewer bytes or a faster link would help" if can_hide < _MOST * found.own_ns else ""
    return _hit(found, gain, text, advice)


def _send_less(found: Communication, share: float, text: str) -> Hit:
    """What to do if nothing is left to overlap with. Advice to overlap would be about what the run already does."""
    if found.strategy == "pipeline":  # whose stages wait for each other
        return _hit(found, None, text, ADVICE["pipeline"])
    if found.strategy == "all-to-all" and found.exchanges_in_layers:
        text += (
            "; the kernels around it belong to the same layer, which needs its result, so only independent work could "
            "overlap: shared experts, or another micro-batch"
        )
        return _hit(found, None, text, ADVICE["all-to-all"])
    helps = (
        "fewer bytes, a faster link or less waiting" if _is_partial(found.evidence) else "fewer bytes or a faster link"
    )
    text += f"; no kernels are left to overlap with, so only {helps} would help"
    if found.strategy == "tensor parallel":
        return _hit(found, None, text, ADVICE["tensor parallel"])
    if found.strategy == "DDP" and found.has_small_messages:
        return _hit(found, None, text, LARGER_BUCKETS)
    if found.strategy == "DDP" and not found.sends_half_precision:
        return _hit(found, found.gain(0.5 * share * found.exposed), text, FEWER_BYTES)
    if found.strategy == "DDP" and found.micro_batches.count < 2:
        return _hit(found, None, text, FEWER_MESSAGES)
    return _hit(found, None, text, SEND_LESS if found.own_ns > _MOST * found.evidence.step_ns else None)


def _hit(
    found: Communication, gain: Gain | None, text: str, advice: StrategyAdvice | None, more_in_title: str = ""
) -> Hit:
    """Without advice, the finding is a remark."""
    is_worth_saying = gain is not None and gain.step_ns >= WORTH_SAYING * found.evidence.step_ns
    return Hit(
        title=_title(found, more_in_title),
        evidence=text,
        saving_ns=min(gain.step_ns, found.own_ns) if gain is not None and is_worth_saying else None,
        gain=gain if is_worth_saying else None,
        about_ns=found.own_ns,
        action="" if advice is None else advice.action,
        paste="" if advice is None else advice.paste,
    )


def _blame_other_ranks(found: Communication, waiting: float, text: str) -> Hit:
    """`waiting` is the time per step that no given rank explains."""
    evidence = found.evidence
    longest = int(np.argmax(found.waiting))
    row = found.collectives.row(longest, named=True)
    size = f" of {_say_bytes(row['message_bytes'])}" if row["message_bytes"] is not None else ""
    text += (
        f"; {ms(waiting)} is longer than the messages need: a {row['kind'] or 'collective'}{size} takes "
        f"{ms(row['time_ns'])}, and {ms(row['time_ns'] - found.waiting[longest])} would do. This rank waits for a "
        "later one, and only the traces of the other ranks show which"
    )
    gain = found.gain(found.waiting * (waiting * evidence.num_steps / float(found.waiting.sum())))
    advice = StrategyAdvice(
        seen="",
        action="Find the rank that the others wait for, with the traces of all ranks",
        paste=_command_for_ranks(evidence),
    )
    return _hit(found, gain, text, advice, ", mostly waiting for other ranks")


def _command_for_ranks(evidence: StepEvidence) -> str:
    """The command for all ranks: with a pattern if the file's name has the rank, otherwise with names to fill in."""
    manifest = evidence.profile.recording.manifest
    pattern, count = re.subn(rf"(?i)(rank[-_]?){manifest.rank}(?!\d)", r"\1*", manifest.file)
    if manifest.rank is None or not count:
        return "stepscope explain RANK_0.json.gz RANK_1.json.gz  # the traces of all ranks"
    quoted = "*".join(shlex.quote(part) if part else "" for part in pattern.split("*"))
    return f"stepscope explain {quoted}"


def _slow_link(found: Communication) -> float | None:
    """The best bandwidth, if it is below that of any link inside a machine."""
    best, sizes = best_bandwidth(found.collectives), found.collectives["group_size"].drop_nulls()
    in_one_machine = sizes.len() > 0 and bool((sizes <= _MOST_IN_ONE_MACHINE).all())
    return best if best is not None and best < _SLOW_LINK and in_one_machine else None


def _blame_link(found: Communication, best: float, text: str) -> Hit:
    evidence = found.evidence
    time = found.collectives["time_ns"].to_numpy()
    wire = found.collectives["bus_bytes"].to_numpy() / _USUAL_LINK * 1e9
    shorter = np.maximum(0.0, time - (_USUAL_LATENCY_NS + wire))
    known = ~np.isnan(wire)
    usual = shorter[known].sum() / max(1.0, time[known].sum())  # for messages of unknown size
    shorter = np.where(known, shorter, usual * time)
    text += (
        f"; {_say_messages(found)}, where a PCIe 4.0 ×16 slot carries over {_USUAL_LINK / 1e9:.0f} GB/s; "
        f"{found.advice.seen}. Either the collectives take a slow path, or every one waits for the same late "
        "rank: compare the traces of all ranks"
    )
    advice = StrategyAdvice(
        seen="",
        action="Check which path the collectives take, and whether a rank is late",
        paste=f"NCCL_DEBUG=INFO torchrun train.py  # names the path: P2P, SHM or NET\n{_command_for_ranks(evidence)}",
    )
    return _hit(found, found.gain(shorter), text, advice, f", at {best / 1e9:.2g} GB/s")


RULES = (
    Rule(
        code="SS011",
        title="Exposed communication",
        action="Overlap communication with other kernels, in the way that the strategy allows",
        check=find_exposed_communication,
        meaning="""Collectives run while the device has nothing else to do. What helps depends on the strategy, which
            the collectives show: DDP reduces gradients in backward, FSDP gathers weights before each layer, a sharded
            optimizer (ZeRO) scatters gradients and gathers weights around the update, tensor parallelism exchanges
            activations within layers, and experts and embeddings exchange tokens all-to-all. A rank that waits for a
            slower one counts as communication as well, and the finding says so if collectives take much longer than
            their messages need.""",
        seen="Time in which only communication runs on the device, at least 2% of the step.",
        saving="""Collectives are shortened by what could overlap, and the step is replayed. Gradients can overlap with
            the rest of backward, gathered weights with the kernels before them, and tensor-parallel collectives with a
            neighbouring GEMM, as far as these do not overlap with communication yet; the last bucket of gradients has
            nothing left to overlap with. All-to-alls inside layers have no saving, because their layer needs them.
            If each micro-batch reduces gradients, the saving is what is exposed beyond the reduction in the last one.
            Where ranks wait, it is the time beyond what the same message needs elsewhere in the trace.""",
        builtin="not needed: it runs in one process",
        own=(
            "# DDP: bucket_cap_mb, static_graph=True; bf16_compress_hook; no_sync() in all but the last micro-batch",
            "# FSDP: block.set_modules_to_forward_prefetch([next_block]); larger units",
            "# ZeRO: overlap_comm (DeepSpeed); --overlap-grad-reduce --overlap-param-gather (Megatron-LM)",
            "# tensor parallel: torch._inductor.config._micro_pipeline_tp = True, or fewer ranks",
            "# all-to-all: async_op=True, with other work before work.wait()",
        ),
        paste=ADVICE["unknown"].paste,
    ),
)
