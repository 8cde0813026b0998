"""Invented parts of comparisons: two steps, two memory timelines, and trends over runs."""

from stepscope.findings.compared import (
    AlignedMemory,
    AlignedSteps,
    MemoryStretch,
    PlaceTime,
    StepChange,
    StepPlace,
    Trend,
    TrendLine,
    TrendPoint,
)

RUNS = ("A", "B")
NUM_LAYERS = 4


def aligned_steps() -> AlignedSteps:
    """B is faster in every layer but the third, has no embedding of its own, and a new loss."""
    places = [StepPlace(phase="forward", part="embedding", sides=(_side(90_000), PlaceTime()), verdict="gone")]
    for layer in range(NUM_LAYERS):
        slow = 3 if layer == 2 else 1
        places += [
            _place("forward", layer, "attention", 900_000, 400_000 * slow),
            _place("forward", layer, "ffn", 1_200_000, 1_100_000),
        ]
    places.append(StepPlace(phase="loss", sides=(PlaceTime(), _side(350_000)), verdict="new"))
    places += [_place("backward", layer, "", 3_000_000, 2_000_000) for layer in reversed(range(NUM_LAYERS))]
    places.append(StepPlace(phase="optimizer", sides=(_side(2_000_000), _side(2_000_300)), verdict="noise"))
    changes = (
        StepChange(text="layer 2 attention", change_ns=300_000, places=(5,)),
        StepChange(text="attention in 3 layers", change_ns=-1_500_000, places=(1, 3, 7)),
        StepChange(text="new: 12 × cast", change_ns=200_000, places=(1, 3, 5, 7)),
    )
    notes = ("modules: not recorded in B",)
    return AlignedSteps(title="Both steps, aligned", runs=RUNS, places=tuple(places), changes=changes, notes=notes)


def _place(phase: str, layer: int, part: str, a_ns: int, b_ns: int) -> StepPlace:
    verdict = "slower" if b_ns > a_ns else "faster"
    return StepPlace(phase=phase, layer=f"layer {layer}", part=part, sides=(_side(a_ns), _side(b_ns)), verdict=verdict)


def _side(total_ns: int) -> PlaceTime:
    return PlaceTime(
        classes=("GEMM", "elementwise"), times_ns=(total_ns // 2, total_ns // 4), idle_ns=total_ns - 3 * (total_ns // 4)
    )


def aligned_memory() -> AlignedMemory:
    """B keeps half the activations, and has a phase more."""
    stretches = (
        MemoryStretch(label="forward", start=0, end=20),
        MemoryStretch(label="", start=20, end=28, runs=(False, True)),
        MemoryStretch(label="backward", start=28, end=60),
    )
    rising = [*range(20), *[20] * 8, *range(32, 0, -1)]
    activations = tuple(2**27 * height for height in rising)
    of_a = tuple(0 if 20 <= column < 28 else height for column, height in enumerate(activations))
    lasting = tuple(0 if 20 <= column < 28 else 2**30 for column in range(60))
    return AlignedMemory(
        title="Memory during the step",
        runs=RUNS,
        categories=("parameters", "activations", "other"),
        stretches=stretches,
        heights=(
            (lasting, of_a, (0,) * 60),
            ((2**30,) * 60, tuple(height // 2 for height in activations), (0,) * 60),
        ),
        notes=("each phase is stretched",),
    )


def trend_of_steps(num_runs: int = 5) -> Trend:
    """The last runs are slower; the second one is within noise, and the third cannot be judged."""
    verdicts = ("baseline", "noise", "cannot tell", "faster")
    points = tuple(
        TrendPoint(
            run=run,
            value=60.0 + (9 if run > 3 else -12 if run == 3 else 0.4 * run),
            low=58.5 + run / 10,
            high=62.5 + run / 10,
            verdict=verdicts[run] if run < len(verdicts) else "slower",
        )
        for run in range(num_runs)
    )
    names = tuple(f"run with the name {run}" for run in range(num_runs))
    line = TrendLine(name="", points=points)
    return Trend(title="Step time", label="step time", kind="ms", runs=names, lines=(line,), baseline=0)


def trend_of_cases() -> Trend:
    """Three cases relative to the second run; the last run has one of them."""
    lines = tuple(
        TrendLine(
            name=f"case {case}",
            points=tuple(
                TrendPoint(run=run, value=1 + 0.1 * case * (run - 1), verdict="baseline" if run == 1 else "slower")
                for run in range(4 if case == 0 else 3)
            ),
        )
        for case in range(3)
    )
    runs = ("main", "one", "two", "three")
    return Trend(
        title="Relative", label="step time", kind="ratio", runs=runs, lines=lines, baseline=1, notes=("2 more",)
    )
