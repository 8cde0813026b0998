"""Records a few steps of a training loop from inside its process.

A recording is a sequence of stages, and every step of the loop belongs to one of them: it warms up, is timed without a
profiler, runs once with the profiler to warm that up, is recorded, and is recorded once more with Python stacks for the
source lines. `_stages` is that sequence, as a generator that continues at the beginning of every step. If the script
ends early, the generator is closed, and what is complete is kept.

The process only writes a raw trace and a small document. Another process turns them into a recording and a page
(`jobs.loop`), so that training goes on, and a failure there cannot harm it.
"""

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.profiler import ProfilerActivity
from torch.utils.data import IterableDataset

from stepscope.annotate import Close, Opener, activate, open_range
from stepscope.files import write_atomically, writing
from stepscope.loop.annotation import annotating, find_roots, list_wrappers, name_modules, unwrap
from stepscope.loop.compiled.notes import CompiledNotes, naming_loops
from stepscope.loop.finder import LEAST_STEPS, StepFinder
from stepscope.loop.finish import Finisher
from stepscope.loop.line_marks import LineMarks
from stepscope.loop.loop_clock import LoopClock
from stepscope.loop.memory_history import StepMemory
from stepscope.loop.oom import Place, watching_memory
from stepscope.loop.place import OOM_FOLDER, RunPlace, find_rank
from stepscope.loop.profiler import LoopProfiler, OtherProfilers
from stepscope.loop.source_lines import read_lines
from stepscope.loop.watch import LoopWatch
from stepscope.measure import nvml
from stepscope.measure.environment import describe_unmeasured
from stepscope.patches import is_compiled
from stepscope.recording.rows.compiled_code import save_graphs
from stepscope.recording.rows.loop_run import HANDOVER_NAME, TRACE_NAME, LoaderFacts, LoopFacts, LoopRun, SourceLines
from stepscope.step.expert_routing import counting_tokens, find_experts
from stepscope.units import count_noun, say_list

Tell = Callable[[str], None]
# Where a stage continues: at the beginning of a step, or where no operator is running. A profiler starts and stops only
# there: one that stops inside an operator and starts again before that ends makes PyTorch write to freed memory.
Moment = Literal["step", "between operators"]
Stage = Generator[None, Moment, None]
_LEAST_TIMED, _MOST_TIMED = 3, 8
_OTHER_PROFILER = "another profiler was active in this process; steps were recorded only while it was inactive"


@dataclass(frozen=True, kw_only=True)
class RecordingPlan:
    """How many steps of each kind. With `sources`, one more step is recorded with Python stacks."""

    skip: int = 10
    steps: int = 3
    sources: bool = True

    @property
    def timed(self) -> int:
        """Steps that are timed without a profiler; fewer if the user asks for a short recording."""
        return min(_MOST_TIMED, max(_LEAST_TIMED, self.skip))

    @property
    def least(self) -> int:
        """Steps that a script must run for a page about one of them. The search ends with one more, and the profiler
        takes two to start."""
        return max(self.skip, LEAST_STEPS) + 1 + self.timed + 2 + 1


class _ProfilerTakenError(Exception):
    """The script starts its own profiler, and there can only be one."""


@dataclass(kw_only=True)
class _Kept:
    """What is complete so far."""

    trace: bool = False
    recorded_ns: list[int] = field(default_factory=list)
    sources: SourceLines = field(default_factory=SourceLines)
    expert_tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    roots: list[nn.Module] = field(default_factory=list)
    clock_mhz: int | None = None
    notes: dict[str, None] = field(default_factory=dict)


class LoopRecorder:
    """Records the loop that runs in this process. Its steps are found by what the loop does, unless `found_by` says
    what else calls `step`."""

    def __init__(
        self,
        place: RunPlace,
        plan: RecordingPlan,
        *,
        script: str,
        tell: Tell,
        found_by: str = "",
        is_command: bool = False,
    ) -> None:
        self.place = place
        self.plan = plan
        self.is_done = False
        self._script = script
        self._is_command = is_command  # `stepscope run`, and not a call in the script
        self._marked_by = found_by  # empty if the steps are to be found
        self._tell = tell if rank_of()[0] == 0 else lambda _: None
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._process = os.getpid()
        self._finder = StepFinder()
        self._watch = LoopWatch(self)
        self._clock = LoopClock()
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}
        self._loaders: dict[int, LoaderFacts] = {}
        self._marked_steps = 0
        self._skipped = 0
        self._uses_scaler = False
        self._kept = _Kept()
        self._stages: Stage = self._record()
        self._was_between = False  # since the step began
        self._is_advancing = self._has_failed = False
        self._is_profiling = False
        self._others = OtherProfilers(self._give_way)
        self._compiled = CompiledNotes()
        self._undo = ExitStack()
        self.finisher: Finisher | None = None
        self.oom = ExitStack()  # closed when the loop ends, and not when the recording does
        self.on_done: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._watch.install()
        self._others.install(self._undo)
        self._compiled.install(self._undo)
        self.oom.enter_context(watching_memory(self.place.folder, lambda: Place(step=self.steps_seen)))
        next(self._stages)

    # --- Events of the loop -------------------------------------------------------------------------------------------

    def step(self, marked_by: str) -> None:
        """A step ends here, and the next one begins. From the first call on, steps are no longer looked for."""
        self._marked_by = self._marked_by or marked_by
        self._marked_steps += 1
        self._begin_step()

    def optimizer_stepped(self, optimizer: Optimizer, took_ns: int) -> None:
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        self._clock.add("optimizer", took_ns)
        if self._finder.optimizer_stepped(id(optimizer)):
            self._found_step()

    def step_skipped(self, optimizer: Optimizer) -> None:
        self._skipped += 1
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        if self._finder.optimizer_stepped(id(optimizer)):
            self._found_step()

    def scaler_used(self) -> None:
        self._uses_scaler = True

    def gradients_cleared(self) -> None:
        if self._finder.gradients_cleared():
            self._found_step()

    def backward_ran(self, took_ns: int) -> None:
        self._clock.add("backward", took_ns)
        if self._finder.backward_ran():
            self._found_step()

    def batch_requested(self, iterator: Any) -> None:
        key = id(iterator._dataset)
        if key not in self._loaders:
            self._loaders[key] = _describe_loader(iterator)
        if self._finder.batch_requested(key):
            self._found_step()

    def between_operators(self) -> None:
        self._was_between = True
        self._advance("between operators")
        if self._has_ended():
            self.on_done()

    def batch_received(self, took_ns: int) -> None:
        self._clock.add("input", took_ns)

    def _found_step(self) -> None:
        if not self._marked_by:
            self._begin_step()

    def _begin_step(self) -> None:
        if self._is_advancing or self.is_done or os.getpid() != self._process:
            return
        self._clock.stop()
        self._advance("step")
        self._was_between = False
        self._clock.start()
        if self._has_ended():
            self.on_done()

    def _advance(self, moment: Moment) -> None:
        if self._is_advancing or self.is_done or os.getpid() != self._process:
            return
        self._is_advancing = True
        try:
            self._stages.send(moment)
        except StopIteration:
            self.finish()
        except Exception as error:  # noqa: BLE001  # a guest in the user's program, which must go on
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None  # it came while a profiler stopped, and belongs to the script
            self._tell(f"error: nothing was recorded: {error or type(error).__name__}")
            self._has_failed = True
            self._kept.recorded_ns.clear()
            self.finish()
        finally:
            self._is_advancing = False

    def _has_ended(self) -> bool:
        return self.is_done

    @property
    def steps_seen(self) -> int:
        return self._marked_steps if self._marked_by else self._finder.steps_seen

    @property
    def _has_warmed_up(self) -> bool:
        is_clear = bool(self._marked_by) or not self._finder.is_waiting
        return is_clear and self.steps_seen >= max(self.plan.skip, LEAST_STEPS)

    # --- Stages -------------------------------------------------------------------------------------------------------

    def _record(self) -> Stage:
        """The first call comes before the loop."""
        yield
        while not self._has_warmed_up:
            yield
        self._finder.settle()
        yield from self._next_step()  # the rest of the step in which the search ended
        self._tell(f"found steps: {self._say_found()}; recording {count_noun(self.plan.steps, 'step')}")
        with self._clock.timing(self._find_device()):
            for _ in range(self.plan.timed):
                yield from self._next_step()
        yield from self._undisturbed(self._record_steps)
        if self.plan.sources:
            yield from self._next_step()  # whatever was running when the profiler stopped has ended after a step
            yield from self._undisturbed(self._record_sources)
        if self._find_device().type == "cuda" and rank_of()[0] == 0:
            yield from self._record_memory()

    def _next_step(self) -> Stage:
        """Continue at the beginning of the next step."""
        while (yield) != "step":
            pass

    def _next_gap(self) -> Stage:
        """Continue where no operator is running. A loop may never come to such a place, with everything inside the
        optimizer's step: then at the beginning of a step."""
        while (yield) == "step" and self._was_between:
            pass

    def _undisturbed(self, stage: Callable[[], Stage]) -> Stage:
        """Run a stage while no other profiler is active in this process, again if one starts meanwhile."""
        while True:
            while self._others.are_active:
                self._kept.notes[_OTHER_PROFILER] = None
                yield from self._next_step()
            self._is_profiling = True
            try:
                yield from stage()
            except _ProfilerTakenError:
                self._kept.notes[_OTHER_PROFILER] = None
            else:
                return
            finally:
                self._is_profiling = False
            yield from self._next_step()

    def _record_steps(self) -> Stage:
        kept = self._kept
        device = self._find_device()
        kept.roots = find_roots(self._live_optimizers())
        kept.recorded_ns.clear()
        on_cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        profiler = LoopProfiler(activities, self._others)
        try:
            yield from self._next_gap()
            with profiler:
                yield from self._next_step()  # the first step with a profiler is slow
                yield from self._next_gap()
                _wait_for(device)
                profiler.keep_events()
                with annotating(kept.roots), naming_loops():
                    yield from self._next_step()
                    yield from self._mark_steps()
                kept.clock_mhz = _read_clock(device)
                yield from self._next_gap()
                _wait_for(device)
        except (_ProfilerTakenError, KeyboardInterrupt):
            kept.recorded_ns.clear()
            raise
        finally:  # the script may have ended after some of the steps
            if kept.recorded_ns:
                self._keep_trace(profiler)

    def _mark_steps(self) -> Stage:
        for number in range(self.plan.steps):
            close = open_range(f"step:{number}")
            began_ns = time.perf_counter_ns()
            try:
                yield from self._next_step()
            finally:
                close()
            self._kept.recorded_ns.append(time.perf_counter_ns() - began_ns)

    def _record_sources(self) -> Stage:
        profiler = LoopProfiler([ProfilerActivity.CPU], self._others, with_stack=True)
        yield from self._next_gap()
        with profiler:
            profiler.keep_events()
            with LineMarks(), counting_tokens(self._find_experts()) as tokens:
                yield from self._next_step()
                yield from self._next_gap()
        self._kept.sources = read_lines(profiler.results)
        self._kept.expert_tokens = tokens.count()

    def _find_experts(self) -> dict[int, str]:
        return find_experts(self._named_modules().values())

    def _record_memory(self) -> Stage:
        """The memory history of one step, which only CUDA has."""
        yield from self._next_gap()
        memory = StepMemory(self._find_device(), folder=self.place.memory_folder)
        memory.start()
        try:
            yield from self._next_step()
            with activate(self._guard(memory.open)):
                close = open_range("step:0")
                try:
                    yield from self._next_step()
                finally:
                    close()
        finally:
            with writing(self.place.memory_folder, if_full="memory was not recorded", hint="--out DIR"):
                memory.stop()

    def _guard(self, opener: Opener) -> Opener:
        """Ranges open in the user's own calls, which must not fail because of them."""

        def open_guarded(name: str) -> Close:
            try:
                return opener(name)
            except Exception as error:  # noqa: BLE001  # a guest in the user's program, which must go on
                self._kept.notes[f"memory was not attributed completely: {error or type(error).__name__}"] = None
                return lambda: None

        return open_guarded

    def _keep_trace(self, profiler: LoopProfiler) -> None:
        folder = self.place.raw_folder(rank_of()[0])
        with writing(folder, if_full="nothing was recorded", hint="--out DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.write(folder / TRACE_NAME)
            save_graphs(folder, self._compiled.graphs(self._named_modules()))
        self._kept.trace = True

    def _named_modules(self) -> dict[int, tuple[str, nn.Module]]:
        names = name_modules(self._kept.roots)
        return {id(module): (names[id(module)], module) for root in self._kept.roots for module in root.modules()}

    def _give_way(self) -> None:
        """The script starts a profiler. If ours is running or about to, it stops."""
        if self._is_profiling and not self._is_advancing:
            self._stages.throw(_ProfilerTakenError())

    # --- The end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the recording, complete or not, and hand over what there is. Restores everything that was changed."""
        if self.is_done or os.getpid() != self._process:
            return
        self.is_done = True
        try:
            self._stages.close()
        except Exception as error:  # noqa: BLE001  # a guest: the script's own end matters more
            self._tell(f"error: {error or type(error).__name__}")
            self._has_failed = True
        self._watch.uninstall()
        self._undo.close()
        if not self._kept.trace or not self._kept.recorded_ns:
            if not self._has_failed and not list(self.place.folder.glob(f"{OOM_FOLDER}*")):
                self._tell(self._say_nothing_recorded())
            return
        rank, _ = rank_of()
        folder = self.place.raw_folder(rank)
        try:
            with writing(folder, if_full="nothing was recorded", hint="--out DIR"):
                write_atomically(folder / HANDOVER_NAME, msgspec.json.encode(self._hand_over()))
        except Exception as error:  # noqa: BLE001  # as above; the device may be unusable after the script's own error
            self._tell(f"error: nothing was recorded: {error or type(error).__name__}")
            return
        self.finisher = Finisher(self.place, rank)
        self.finisher.start()
        self._tell(f"recorded {count_noun(len(self._kept.recorded_ns), 'step')}; writing the page in the background")

    def end(self) -> None:
        """The loop has ended: finish the recording, and wait for the pages. Ctrl-C skips them."""
        self.finish()
        if os.getpid() != self._process:
            return
        if self.finisher is not None and self.finisher.is_running:
            self._tell("waiting for the page; press Ctrl-C to skip it")
            self.finisher.wait()
        self.oom.close()

    def _hand_over(self) -> LoopRun:
        kept, (rank, world_size) = self._kept, rank_of()
        device, roots = self._find_device(), kept.roots
        parameters = {id(one): one.numel() for root in roots for one in root.parameters()}
        return LoopRun(
            facts=self._facts(),
            environment=describe_unmeasured(device),
            started=self._started,
            rank=rank,
            world_size=world_size,
            clock=self._clock.kind,
            phases_ns=self._clock.phases_ns(),
            recorded_steps=len(kept.recorded_ns),
            recorded_step_ns=tuple(kept.recorded_ns),
            parameters=sum(parameters.values()) or None,
            optimizer=_name_optimizer(self._live_optimizers()),
            model=type(unwrap(roots[0])).__name__ if roots else "",
            compiled=any(is_compiled(module) for root in roots for module in root.modules()),
            doubts=self._clock.doubts(),
            sources=kept.sources,
            expert_tokens=kept.expert_tokens,
        )

    def _facts(self) -> LoopFacts:
        steps = max(1, self.steps_seen)
        loaders = tuple(
            msgspec.structs.replace(facts, batches_per_step=round(self._finder.batches_of(key) / steps, 2))
            for key, facts in self._loaders.items()
        )
        optimizers = self._live_optimizers()
        return LoopFacts(
            script=self._script,
            found_by=self._marked_by or self._finder.found_by,
            backwards_per_step=round(self._finder.backwards / steps, 2),
            optimizers=tuple(dict.fromkeys(type(one).__name__ for one in optimizers)),
            loaders=loaders,
            wrappers=list_wrappers(self._kept.roots, optimizers),
            uses_scaler=self._uses_scaler,
            skipped_steps=self._skipped,
            steps_seen=steps,
            clock_mhz=self._kept.clock_mhz,
            notes=(*self._kept.notes, *filter(None, [self._compiled.problem])),
        )

    def _say_found(self) -> str:
        names = Counter(type(one).__name__ for one in self._live_optimizers())
        by = self._marked_by or self._finder.found_by
        backwards = round(self._finder.backwards / max(1, self.steps_seen))
        whose = f" of {say_list(names)}" if names and by == "optimizer steps" else ""
        passes = f", {backwards} backward passes per step" if backwards > 1 else ""
        return f"{by}{whose}{passes}"

    def _say_nothing_recorded(self) -> str:
        seen, needed = self.steps_seen, self.plan.least
        finder = self._finder
        if self._marked_by or seen:
            if self._kept.notes:
                return (
                    "nothing was recorded: another profiler was active until the end. For a page about its trace, pass "
                    "`on_trace_ready=stepscope.trace_handler(DIR)` to torch.profiler.profile"
                )
            if seen >= needed:
                return "nothing was recorded: the script ended before the first recorded step was complete"
            short = RecordingPlan(skip=LEAST_STEPS)
            fewer = f" ({short.least} with {self._write_skip(short.skip)})" if short.least < needed else ""
            return f"nothing was recorded: the script ran {count_noun(seen, 'step')}; {needed} are needed{fewer}"
        saw = [
            count_noun(count, noun, plural)
            for count, noun, plural in (
                (finder.optimizer_steps, "optimizer step", "optimizer steps"),
                (finder.backwards, "backward pass", "backward passes"),
                (sum(map(finder.batches_of, self._loaders)), "batch of a DataLoader", "batches of a DataLoader"),
            )
            if count
        ]
        found = " and ".join(saw) if saw else "no optimizer, backward pass or DataLoader"
        return (
            f"no training steps found: saw {found}. "
            "Mark them in your code: `with stepscope.record(DIR) as recorder:`, and `recorder.step()` after each step"
        )

    def _write_skip(self, count: int) -> str:
        return f"--skip {count}" if self._is_command else f"skip={count}"

    def _live_optimizers(self) -> list[Optimizer]:
        return [one for reference in self._optimizers.values() if (one := reference()) is not None]

    def _find_device(self) -> torch.device:
        """The device of the first parameter that is not on the CPU, or the CPU."""
        for optimizer in self._live_optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.device.type == "cuda":
                        found: torch.device = parameter.device
                        return found
        if not self._optimizers and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def rank_of() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return find_rank()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _read_clock(device: torch.device) -> int | None:
    clocks = nvml.clocks(device) if device.type == "cuda" else None
    return clocks.sm_mhz if clocks else None


def _name_optimizer(optimizers: list[Optimizer]) -> str | None:
    if not optimizers:
        return None
    first = optimizers[0]
    group = first.param_groups[0] if first.param_groups else {}
    kind = next((name for name in ("fused", "foreach") if group.get(name)), "")
    return f"{type(first).__name__}{f' ({kind})' if kind else ''}"


def _describe_loader(iterator: Any) -> LoaderFacts:
    sampler = getattr(iterator, "_index_sampler", None)
    size = getattr(sampler, "batch_size", None)
    workers = int(getattr(iterator, "_num_workers", 0))
    return LoaderFacts(
        dataset=type(iterator._dataset).__name__,
        is_iterable=isinstance(iterator._dataset, IterableDataset),
        batch_size=size if isinstance(size, int) else None,
        num_workers=workers,
        pin_memory=bool(getattr(iterator, "_pin_memory", False)),
        persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
        prefetch_factor=getattr(iterator, "_prefetch_factor", None) if workers else None,
    )
