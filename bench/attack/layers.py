"""Forgeries of whole layers: copied, merged, spliced from another run, or left out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from attack.documents import Document, Launch, read_document
from attack.forgery import ALL, COUNTERS, FORWARD, TRAINING, Family, redraw, renumber
from attack.subject import TRUTHS, Forged, Subject, find_files
from recovery import FIXTURES, truth_of

COPIED = Family("copied layers")
SPLICED = Family("spliced runs")
Again = Callable[[Sequence[Launch], str], list[Launch]]


def _copy_each(subject: Subject, again: Again) -> tuple[list[Launch], int]:
    """Return the kernels with every layer of every pass twice in a row, and the number of layers."""
    kernels: list[Launch] = []
    end = 0
    for region in subject.regions:
        kernels += subject.launches[end : region.start]
        for layer in range(region.layers):
            block = subject.launches[region.slice(layer)]
            kernels += [*block, *again(block, f"{region.start} {layer}")]
        end = region.end
    return [*kernels, *subject.launches[end:]], subject.truth["num_layers"] + subject.forward.layers


def _copy_block(subject: Subject, again: Again) -> tuple[list[Launch], int]:
    """Return the kernels with all layers of a pass, followed by all layers of the pass again."""
    kernels: list[Launch] = []
    end = 0
    for region in subject.regions:
        block = subject.launches[region.start : region.end]
        kernels += [*subject.launches[end : region.end], *again(block, str(region.start))]
        end = region.end
    return [*kernels, *subject.launches[end:]], subject.truth["num_layers"] + subject.forward.layers


def _same(block: Sequence[Launch], _: str) -> list[Launch]:
    return list(block)


def _jitter(block: Sequence[Launch], seed: str) -> list[Launch]:
    times = redraw(block, seed)
    return [replace(one, duration_ns=time.duration_ns) for one, time in zip(block, times, strict=True)]


@COPIED.add("Every layer's rows are pasted again right after themselves (L1 L1 L2 L2).")
def copied_each_same_numbers(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, _same)
    return subject.forge(kernels, num_layers=layers)


@COPIED.add("All layers are pasted again after the last one (L1 L2 L1 L2).")
def copied_block_same_numbers(subject: Subject) -> Forged:
    kernels, layers = _copy_block(subject, _same)
    return subject.forge(kernels, num_layers=layers)


@COPIED.add("L1 L1 L2 L2 with consecutive numbers and times.")
def copied_each_renumbered(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, _same)
    return subject.forge(renumber(kernels), num_layers=layers)


@COPIED.add("L1 L2 L1 L2 with consecutive numbers and times.")
def copied_block_renumbered(subject: Subject) -> Forged:
    kernels, layers = _copy_block(subject, _same)
    return subject.forge(renumber(kernels), num_layers=layers)


@COPIED.add("One layer is pasted again, with consecutive numbers and times.")
def copied_one_renumbered(subject: Subject) -> Forged:
    kernels: list[Launch] = []
    end = 0
    for region in subject.regions:
        stop = region.slice(region.layers - 1).stop
        kernels += [*subject.launches[end:stop], *subject.launches[region.slice(region.layers - 1)]]
        end = stop
    return subject.forge(renumber([*kernels, *subject.launches[end:]]), num_layers=subject.truth["num_layers"] + 1)


@COPIED.add("L1 L1 L2 L2 with consecutive numbers and times, and nothing but the number of layers is claimed.")
def copied_each_bare_claim(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, _same)
    forged = subject.forge(renumber(kernels))
    return replace(forged, claim={"num_layers": layers})


@COPIED.add(
    "L1 L1 L2 L2 in a trace whose clock has steps of 1 µs.",
    kinds=("forward trace",),
    undetectable="with such a clock, the kernels of two layers often take the same time; a note says so",
)
def copied_each_coarse_clock(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, _same)
    coarse = [replace(one, duration_ns=1000 * max(1, round(one.duration_ns / 1000))) for one in kernels]
    return subject.forge(renumber(coarse), num_layers=layers)


@COPIED.add("L1 L1 L2 L2 with other durations, but the same memory traffic.", kinds=COUNTERS)
def copied_each_other_durations(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, _jitter)
    return subject.forge(renumber(kernels), num_layers=layers)


@COPIED.add(
    "L1 L1 L2 L2 in which every number that varies on a GPU was drawn again.",
    kinds=FORWARD,
    undetectable="every number is one that a GPU could have reported for a model with that many layers",
)
def copied_each_redrawn(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, redraw)
    return subject.forge(renumber(kernels), num_layers=layers)


@COPIED.add("The same in a training step, with the optimizer's work of the smaller model.", kinds=TRAINING)
def copied_step_redrawn(subject: Subject) -> Forged:
    kernels, layers = _copy_each(subject, redraw)
    return subject.forge(renumber(kernels), num_layers=layers)


@COPIED.add("The layers of two training steps become one step with twice the layers.", kinds=TRAINING)
def two_steps_merged(subject: Subject) -> Forged | None:
    if len(subject.regions) != 4:
        return None
    forward, backward, forward_2, backward_2 = subject.regions
    rows = subject.launches
    step = forward_2.start - forward.start
    kernels = [
        *rows[: forward.end],
        *rows[forward_2.start : forward_2.end],
        *rows[forward.end : backward.end],
        *rows[backward_2.start : backward_2.end],
        *rows[backward.end : step],
    ]
    return subject.forge(renumber(kernels), num_layers=subject.truth["num_layers"] + forward.layers)


@COPIED.add("The file's kernels appear twice, and the claim is twice the batch.", kinds=FORWARD)
def pass_twice_as_batch(subject: Subject) -> Forged:
    again = redraw(subject.launches, subject.name)
    return subject.forge(renumber([*subject.launches, *again]), batch=2 * subject.truth["batch"])


@COPIED.add(
    "Half of the layers run twice, on the same weights.",
    kinds=FORWARD,
    undetectable="a forward pass reads weights, and no counter shows which ones",
)
def fewer_layers_twice(subject: Subject) -> Forged:
    kernels, layers = _copy_block(subject, redraw)
    return subject.forge(renumber(kernels), num_layers=layers)


# --- Splices


def read_kind(name: str) -> str:
    """Return what follows the name of the run: `csv.gz`, `forward.json.gz` or `train.json.gz`."""
    return name.partition(".")[2]


def other_run(subject: Subject) -> Document:
    """Return the next recorded run's file of the same kind."""
    files = [path for path in find_files() if read_kind(path.name) == read_kind(subject.name)]
    return read_document(files[(files.index(subject.document.path) + 1) % len(files)])


def _other_layers(subject: Subject) -> tuple[list[Launch], int, Document]:
    other = other_run(subject)
    truth = truth_of(other.path, TRUTHS)
    found = Subject(other, truth, {}).forward
    return list(other.launches[found.start : found.end]), found.layers, other


@SPLICED.add("The layers of another run follow the run's own.", kinds=ALL)
def layers_of_another_run(subject: Subject) -> Forged:
    layers, count, _ = _other_layers(subject)
    end = subject.forward.end
    kernels = [*subject.launches[:end], *adopt(layers, subject), *subject.launches[end:]]
    return subject.forge(_in_sequence(kernels), num_layers=subject.truth["num_layers"] + count)


@SPLICED.add("The LM head is that of another run, whose vocab_size is claimed.")
def head_of_another_run(subject: Subject) -> Forged | None:
    other = other_run(subject)
    truth = truth_of(other.path, TRUTHS)
    if is_close(truth["vocab_size"], subject.truth["vocab_size"]):
        return None
    head = other.launches[Subject(other, truth, {}).head]
    kernels = list(subject.launches)
    kernels[subject.head] = next(adopt([head], subject))
    return subject.forge(_in_sequence(kernels), vocab_size=truth["vocab_size"])


@SPLICED.add("Another run follows in the same file, with its own process and numbers; only the first is claimed.")
def two_runs_in_one_file(subject: Subject) -> Forged:
    other = other_run(subject)
    last = subject.launches[-1]
    shift = last.start_ns + last.duration_ns + 1e6 - other.launches[0].start_ns if last.start_ns else 0.0
    later = [replace(one, start_ns=one.start_ns + shift) for one in other.launches]
    return subject.forge([*subject.launches, *later])


@SPLICED.add("A training step of another run follows, in the same process.", kinds=TRAINING)
def step_of_another_run(subject: Subject) -> Forged:
    other = other_run(subject).launches
    return subject.forge(_in_sequence([*subject.launches, *adopt(other[: len(other) // 2], subject)]))


@SPLICED.add(
    "The layers of the same model's training step follow the run's own.",
    kinds=("forward trace",),
    undetectable="these are genuine layers of the claimed shape; nothing shows whether they have weights of their own",
)
def layers_of_own_training(subject: Subject) -> Forged | None:
    path = FIXTURES / f"{subject.run}.train.json.gz"
    if not path.is_file():
        return None
    other = read_document(path)
    found = Subject(other, subject.truth, {}).forward
    end = subject.forward.end
    layers = adopt(other.launches[found.start : found.end], subject)
    kernels = [*subject.launches[:end], *layers, *subject.launches[end:]]
    return subject.forge(_in_sequence(kernels), num_layers=subject.truth["num_layers"] + found.layers)


@SPLICED.add("Another run's first half precedes the run's second half.")
def halves_of_two_runs(subject: Subject) -> Forged:
    other = other_run(subject)
    first = other.launches[: len(other.launches) // 2]
    second = subject.launches[len(subject.launches) // 2 :]
    return subject.forge(_in_sequence([*adopt(first, subject), *second]))


def is_close(size: int, other: int) -> bool:
    """Whether one size passes for the other: `verify` calls a size tested if only values within 5% of it pass."""
    return abs(size - other) <= 0.05 * max(size, other)


def adopt(launches: Sequence[Launch], subject: Subject) -> Iterator[Launch]:
    """Give kernels of another file the process, device and stream of this one."""
    own = subject.launches[0]
    for one in launches:
        yield replace(one, process=own.process, device=own.device, stream=own.stream)


def _in_sequence(launches: Sequence[Launch]) -> list[Launch]:
    """Number kernels of several files one after the other, with short gaps in time."""
    first = launches[0]
    time, done = first.start_ns, []
    for index, one in enumerate(launches):
        done.append(replace(one, number=first.number + index, start_ns=time if first.start_ns else 0.0))
        time += one.duration_ns + 1500
    return done
