"""The rule about ranks that wait for each other, from the traces of several ranks."""

import shlex

from stepscope.explain.ranks.lateness import RankLateness, RankTimes, Straggler
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
    latest = sorted(times.lateness, key=lambda one: (-one.late_ns, one.rank))[:_MOST_NAMED]
    ranks = ", ".join(f"rank {one.rank} for {ms(one.per_step(one.late_ns))}" for one in latest if one.late_ns)
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
    more_ns = caused_ns * straggler.reasons["compute"] / straggler.lateness.late_ns
    computes = (evidence.kernels["class"] != "communication").to_numpy()
    change.time_ns[computes] *= 1 - min(1.0, more_ns / max(1.0, evidence.computing_ns))
    starved = evidence.replay.starved
    change.host_share[starved] = 1 - min(1.0, (caused_ns - more_ns) / max(1.0, evidence.idle_ns(starved)))
    return evidence.gain(change)


_COLLECT = (
    "gc.disable()  # Python collects garbage at a different moment on each rank, and the others wait\n"
    "if step % 100 == 0:\n"
    "    gc.collect()  # on all ranks at once"
)


def _blame_rank(evidence: StepEvidence, times: RankTimes, straggler: Straggler, caused: float) -> Hit:
    late, rank = straggler.lateness, f"rank {straggler.lateness.rank}"
    own = times.ranks[times.lateness.index(late)].profile
    file = own.recording.manifest.file
    look = f" (`{shlex.join(['stepscope', 'explain', file])}`)" if file else ""
    why, action, paste = {
        "compute": (
            "it computes longer than the others",
            f"Give {rank} as much work as the others: the same number of tokens on every rank",
            "sampler = torch.utils.data.BatchSampler(by_length, batch_size, drop_last=True)  # equal tokens per rank",
        ),
        "input": (
            "its CPU waits for input" if evidence.profile.on_cpu else "its GPU is idle while its CPU waits for input",
            f"Make the input of {rank} faster",
            "loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=8, prefetch_factor=4)",
        ),
        "CPU": (
            "it runs no operators" if evidence.profile.on_cpu else "its GPU is idle, because its CPU launches late",
            f"Find out what delays the CPU of {rank}{look}; pin each rank to its own cores, and collect garbage on all "
            "ranks at once",
            _COLLECT,
        ),
    }[straggler.reason]
    share = straggler.reasons[straggler.reason] / max(1.0, late.late_ns)
    text = f"{_say_late(evidence, late)}; {say_percent(share)} of that time {why}"
    least = min(times.lateness, key=lambda one: (one.waited_ns, one.rank))
    if least is late:
        waits = f"It waits least for others: {ms(late.per_step(late.waited_ns))} {evidence.clock.say_per_step}"
        text += f". {waits if late.waited_ns > _LEAST_SAID * late.late_ns else 'It hardly ever waits for others'}"
    return Hit(
        title=f"The other ranks wait for {rank}: {ms(caused)} {evidence.clock.say_per_step}",
        evidence=text,
        saving_ns=caused,
        gain=(_gain_of_late_rank if own is evidence.profile else _gain_of_punctuality)(evidence, caused),
        about_ns=caused,
        action=action,
        paste=paste,
    )


def _say_late(evidence: StepEvidence, late: RankLateness) -> str:
    """How late a rank is, and how much of that the others notice."""
    per_step = evidence.clock.say_per_step
    text = (
        f"rank {late.rank} comes last to {late.last} of {late.collectives} collectives, up to {ms(late.most_ns)} after "
        f"the others, and {ms(late.per_step(late.late_ns))} {per_step}"
    )
    if late.steps < _FEWER * evidence.clock.num_steps:
        text += f" (in {count_noun(round(late.steps, 1), 'matched step')})"
    behind_compute = late.late_ns - late.caused_ns
    if behind_compute > _LEAST_SAID * late.late_ns:
        text += f", of which the others still compute for {ms(late.per_step(behind_compute))}"
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
            reason is read from the late rank's device since the previous collective: more compute than on other ranks,
            or idle time, in which the CPU waits for input or launches late.""",
        saving="""The time from the arrival of the last but one rank to that of the last, in which the other ranks run
            nothing else, as a mean over these ranks. A lower bound if traces of some ranks are missing.""",
        builtin="not needed: it runs in one process",
        own=(
            "# late CPU: pin each rank to its own cores; gc.disable(), and gc.collect() at the same step on all ranks",
            "# more compute: the same number of tokens on every rank",
            "# slow input: DataLoader(data, num_workers=8, prefetch_factor=4, pin_memory=True)",
        ),
        paste=_COLLECT,
        on_cpu=True,
    ),
)
