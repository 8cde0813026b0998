"""The rule about ranks that wait for each other, from the traces of several ranks."""

import shlex
from dataclasses import dataclass

from stepscope.explain.ranks.activity import RankActivity
from stepscope.explain.ranks.lateness import RankLateness, RankTimes, Straggler
from stepscope.explain.ranks.rank_tables import REASONS, name_others, say_others
from stepscope.explain.ranks.reasons import WorkDifference
from stepscope.explain.rules.evidence import Gain, StepEvidence, ms
from stepscope.explain.rules.rule import Hit, Rule
from stepscope.explain.rules.strategies.communication import LEAST_EXPOSED, Communication
from stepscope.units import count_noun, say_percent

_MOST = 0.5
_MOST_NAMED = 3  # ranks in a sentence
_FEWER = 0.99  # steps than another rank recorded
_LEAST_SAID = 0.01  # of the time that a rank is late


def find_late_rank(evidence: StepEvidence) -> Hit | None:
    times = evidence.rank_times
    if times is None or times.straggler is None:
        return None
    straggler = times.straggler
    total = sum(one.per_step(one.caused_ns) for one in times.lateness)
    alone = straggler.lateness.per_step(straggler.lateness.caused_ns)
    if straggler.share > _MOST and alone >= LEAST_EXPOSED * evidence.step_ns:
        return _blame_rank(evidence, times, straggler, alone)
    if total < LEAST_EXPOSED * evidence.step_ns:
        return None
    latest = (straggler, *times.others_late)[:_MOST_NAMED]
    ranks = ", ".join(_say_one(one) for one in latest)
    return Hit(
        title=f"Ranks wait for each other {ms(total)} {evidence.clock.say_per_step}",
        evidence=f"no rank is late most of the time: {evidence.clock.say_per_step}, the others wait for {ranks}",
        saving_ns=total,
        gain=_gain_of_punctuality(evidence, total),
        about_ns=total,
        action="Make the ranks equally fast: the same number of tokens, and garbage collection at the same step",
        paste=_COLLECT,
    )


def _gain_of_punctuality(evidence: StepEvidence, caused_ns: float) -> Gain:
    """What this rank gains if its exposed collectives are shorter by the time per step that late ranks cause."""
    found = Communication(evidence)
    return found.gain(found.exposed * min(1.0, caused_ns * evidence.num_steps / max(1.0, float(found.exposed.sum()))))


def _gain_of_late_rank(evidence: StepEvidence, caused_ns: float) -> Gain:
    """What the late rank itself gains if it is on time. That is not in its collectives: it computes less, or its CPU
    launches earlier, as much as these made it late. Other findings may be about the same time."""
    times = evidence.rank_times
    assert times is not None
    assert times.straggler is not None
    straggler, change = times.straggler, evidence.replay.unchanged()
    longer = straggler.reasons["work"] + straggler.reasons["clock"]
    more_ns = caused_ns * longer / straggler.lateness.late_ns
    computes = (evidence.kernels["class"] != "communication").to_numpy()
    change.time_ns[computes] *= 1 - min(1.0, more_ns / max(1.0, evidence.computing_ns))
    starved = evidence.replay.starved
    change.host_share[starved] = 1 - min(1.0, (caused_ns - more_ns) / max(1.0, evidence.idle_ns(starved)))
    return evidence.gain(change)


_IN_BACKGROUND = (
    "writer = concurrent.futures.ThreadPoolExecutor(1)  # logging and saving while the device computes\n"
    "writer.submit(log, {name: value.detach().clone() for name, value in metrics.items()})"
)
_LESS_OFTEN = "if step % 100 == 0:\n    print(loss.item())  # waits for the device"
_COLLECT = (
    "gc.disable()  # Python collects garbage at a different moment on each rank, and the others wait\n"
    "if step % 100 == 0:\n"
    "    gc.collect()  # on all ranks at once"
)


def _blame_rank(evidence: StepEvidence, times: RankTimes, straggler: Straggler, caused: float) -> Hit:
    late, others = straggler.lateness, name_others(times, straggler.lateness)
    advice = _advise(times.ranks[times.lateness.index(late)], straggler, others)
    share = straggler.reasons[straggler.reason] / max(1.0, late.late_ns)
    text = f"{_say_late(evidence, times, late)}; {say_percent(share)} of that time {advice.why}"
    text += _say_waits(evidence, times, late) + _say_others(evidence, times)
    waiting = say_others(times, late, "wait")
    is_own = late.rank == evidence.profile.recording.manifest.rank
    return Hit(
        title=f"{waiting[0].upper()}{waiting[1:]} for rank {late.rank}: {ms(caused)} {evidence.clock.say_per_step}",
        evidence=text,
        saving_ns=caused,
        gain=(_gain_of_late_rank if is_own else _gain_of_punctuality)(evidence, caused),
        about_ns=caused,
        action=advice.action,
        paste=advice.paste,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LateAdvice:
    why: str  # continues "50% of that time"
    action: str
    paste: str


def _advise(own: RankActivity, straggler: Straggler, others: str) -> _LateAdvice:
    rank = f"rank {straggler.lateness.rank}"
    match straggler.reason:
        case "work":
            return _LateAdvice(
                why=f"it computes longer than {others}, in kernels or shapes that only it runs",
                action=f"Give {rank} as much work as {others}: the same number of tokens on every rank",
                paste="sampler = torch.utils.data.BatchSampler(by_length, batch_size, drop_last=True)"
                "  # equal tokens per rank",
            )
        case "clock":
            return _advise_about_clock(rank, straggler.work, others, on_cpu=own.on_cpu)
        case "input":
            return _advise_about_input(rank, own)
        case "host":
            return _advise_about_host(own, straggler)


def _advise_about_clock(rank: str, work: WorkDifference, others: str, *, on_cpu: bool) -> _LateAdvice:
    what, device = ("operators", "CPU") if on_cpu else ("kernels", "GPU")
    why = f"it computes longer than {others}: the same {what} take {say_percent(work.slowdown - 1)} longer"
    if work.has_slower_clock:
        why += f", and its clock is slower, {work.clock_mhz:,} MHz where {work.usual_mhz:,} MHz is usual"
    elif work.is_uniform:
        why += ", most of them alike, as with a slower clock"
    if on_cpu:
        return _LateAdvice(
            why=why,
            action=f"Find out what else runs on the cores of {rank}, and pin each rank to its own cores",
            paste="lscpu --extended=CPU,CORE,MHZ  # on the machine of this rank, while it trains",
        )
    return _LateAdvice(
        why=why,
        action=f"Check why the {device} of {rank} is slower (temperature, power limit), or replace its machine",
        paste="nvidia-smi --query-gpu=index,clocks.sm,clocks_event_reasons.active,temperature.gpu,power.draw "
        "--format=csv",
    )


def _advise_about_input(rank: str, own: RankActivity) -> _LateAdvice:
    why = "its CPU waits for input" if own.on_cpu else "its GPU is idle while its CPU waits for input"
    loaders = own.manifest.loop.loaders if own.manifest.loop else ()
    if loaders and not any(one.num_workers for one in loaders):
        why += ", which its own process loads (`num_workers=0`)"
    return _LateAdvice(
        why=why,
        action=f"Make the input of {rank} faster",
        paste="loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=8, prefetch_factor=4)",
    )


def _advise_about_host(own: RankActivity, straggler: Straggler) -> _LateAdvice:
    rank, cause, file = f"rank {straggler.lateness.rank}", straggler.cause, own.manifest.file
    why = "it runs no operators" if own.on_cpu else "its GPU is idle, because its CPU launches late"
    at = f" at `{cause.line}`" if cause is not None and cause.line else ""
    if cause is not None and cause.during:
        return _LateAdvice(
            why=f"{why}: it is in `{cause.during}`{at}, for up to {ms(cause.longest_ns)}",
            action=f"Shorten `{cause.during}` on {rank}, run it less often, or while the device computes",
            paste=_LESS_OFTEN if cause.during.startswith("sync:") else _IN_BACKGROUND,
        )
    if cause is not None:
        why += f": no operator follows `{cause.after}`{at} for up to {ms(cause.longest_ns)}"
    look = f" (`{shlex.join(['stepscope', 'explain', file])}`)" if file else ""
    return _LateAdvice(
        why=why,
        action=f"Find out what delays the CPU of {rank}{look}; pin each rank to its own cores, and collect garbage on "
        "all ranks at once",
        paste=_COLLECT,
    )


def _say_one(one: Straggler) -> str:
    late = one.lateness
    return f"rank {late.rank} for {ms(late.per_step(late.late_ns))} ({REASONS[one.reason]})"


def _say_waits(evidence: StepEvidence, times: RankTimes, late: RankLateness) -> str:
    """How long the late rank waits itself, if it waits least."""
    if min(times.lateness, key=lambda one: (one.waited_ns, one.rank)) is not late:
        return ""
    if late.waited_ns <= _LEAST_SAID * late.late_ns:
        return ". It hardly ever waits itself"
    waited = f"{ms(late.per_step(late.waited_ns))} {evidence.clock.say_per_step}"
    return f". It waits {waited} itself" + (", less than any other rank" if len(times.ranks) > 2 else "")


def _say_others(evidence: StepEvidence, times: RankTimes) -> str:
    """The next ranks that the others wait for; empty if there are none, or there is only one other."""
    if not times.others_late or len(times.ranks) < 3:
        return ""
    ranks = ", ".join(_say_one(one) for one in times.others_late)
    return f". {evidence.clock.say_per_step.capitalize()}, the others also wait for {ranks}"


def _say_late(evidence: StepEvidence, times: RankTimes, late: RankLateness) -> str:
    """How late a rank is, and how much of that the others notice."""
    per_step = evidence.clock.say_per_step
    text = (
        f"rank {late.rank} comes last to {late.last} of {late.collectives} collectives, up to {ms(late.most_ns)} after "
        f"{name_others(times, late)}, in total {ms(late.per_step(late.late_ns))} {per_step}"
    )
    if late.steps < _FEWER * evidence.clock.num_steps:
        text += f" (in {count_noun(round(late.steps, 1), 'matched step')})"
    behind_compute = late.late_ns - late.caused_ns
    if behind_compute > _LEAST_SAID * late.late_ns:
        computing = say_others(times, late, "still compute")
        text += f", of which {computing} for {ms(late.per_step(behind_compute))}"
    return text


RULES = (
    Rule(
        code="SS030",
        title="Ranks wait for a late rank",
        action="Make the late rank as fast as the others",
        check=find_late_rank,
        meaning="""A collective cannot end before the last rank has joined it, so one slow rank slows down all. The late
            rank is easy to overlook: it has the *shortest* communication, because it never waits.""",
        seen="""Traces of several ranks: `stepscope explain rank0.json.gz rank1.json.gz`, or a directory. Collectives
            are matched by process group, order and size, and clocks are aligned by their ends, which coincide. On a
            CPU they are the ranges of Gloo's threads: the operators only queue them. The
            reason is read from the late rank's device since the previous collective. If it computes longer than other
            ranks, kernels of the same name and shape that take longer mean a slower clock, and other kernels mean more
            work. If it is idle, its CPU waits for input or launches late, and its ranges and operators say where.""",
        saving="""The time from the arrival of the last but one rank to that of the last, in which the other ranks run
            nothing else, as a mean over these ranks. A lower bound if traces of some ranks are missing.""",
        builtin="not needed: it runs in one process",
        own=(
            "# late CPU: pin each rank to its own cores; gc.disable(), and gc.collect() at the same step on all ranks",
            "# more work: the same number of tokens on every rank",
            "# slower clock: nvidia-smi --query-gpu=clocks.sm,clocks_event_reasons.active,temperature.gpu --format=csv",
            "# slow input: DataLoader(data, num_workers=8, prefetch_factor=4, pin_memory=True)",
        ),
        paste=_COLLECT,
        on_cpu=True,
    ),
)
