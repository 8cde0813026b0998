"""The training loop: what its thread does in a step next to the kernels of each part, and its waits for the GPU."""

from stepscope.explain.story.script import say_passes
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.loop.loop_tables import syncs_table, tabulate_loop
from stepscope.explain.trace.loop.loop_time import INPUT_PARTS, SYNCHRONISATION, LoopTime
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Bars, Exhibit, Section
from stepscope.units import say_percent, say_time

_MS = 1e6
_NAMED = 3  # parts in the lead
_SYNC_ROWS = 20


def show_loop(materials: Materials) -> Section:
    profile, loop = materials.profile, materials.loop
    assert profile is not None, "only a profile has a loop"
    assert loop is not None, "only a run with a loop has this section"
    exhibits = [
        Exhibit(key="loop-time", part=_draw(profile, loop)),
        Exhibit(key="loop-table", part=tabulate_loop(profile, loop)),
    ]
    syncs = syncs_table(profile, top=_SYNC_ROWS, loop=loop)
    if syncs.rows:
        exhibits.append(Exhibit(key="loop-syncs", part=syncs))
    return Section(key="loop", title="Training loop", lead=_say_loop(profile, loop), exhibits=tuple(exhibits))


def _say_loop(profile: Profile, loop: LoopTime) -> str:
    """The longest parts of the step, and what of it is input and waiting."""
    longest = sorted(loop.parts, key=lambda part: -part.cpu_ns)[:_NAMED]
    named = ", ".join(f"{part.label} {say_percent(part.cpu_ns / loop.step_ns)}" for part in longest)
    facts = profile.recording.manifest.loop
    passes = facts.backwards_per_step if facts else 1.0
    batches = f" with {say_passes(facts)}" if facts is not None and passes > 1 else ""
    said = [f"The CPU spends a step of {say_time(loop.step_ns)}{batches} mostly on {named}."]
    labels = [part.key for part in longest]
    loading_ns, waiting_ns = loop.time_of(*INPUT_PARTS), loop.time_of(SYNCHRONISATION)
    rest = []
    if loading_ns and not any(key in INPUT_PARTS for key in labels):
        rest.append(f"loading input takes {say_time(loading_ns)}")
    if waiting_ns and SYNCHRONISATION not in labels:
        rest.append(f"waiting for the GPU takes {say_time(waiting_ns)}")
    if rest:
        together = " and ".join(rest)
        said.append(f"{together[0].upper()}{together[1:]}.")
    return " ".join(said)


def _draw(profile: Profile, loop: LoopTime) -> Bars:
    """One bar of CPU time and, next to a GPU, one of kernel time, by the same parts."""
    labels = ("CPU",) if profile.on_cpu else ("CPU", "GPU")
    columns = [(part.cpu_ns / _MS, part.device_ns / _MS)[: len(labels)] for part in loop.parts]
    return Bars(
        title="The step by part of the loop",
        kind="ms",
        labels=labels,
        series=tuple(part.label for part in loop.parts),
        values=tuple(columns),
        is_stacked=True,
        notes=("the CPU's parts add up to the step; the GPU's are the kernels that each part launched",)
        if len(labels) > 1
        else (),
    )
