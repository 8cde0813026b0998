"""Give kernels of CUDA graphs the modules of the code that a compiler generated.

Compiled code calls its kernels in a fixed order, which a recording of stepscope has as the table `compiled_calls`. A
Triton kernel has the name of its call, so the Triton kernels of a graph tell which code was captured:

- If the graph is launched inside a call of compiled code, as with `mode="reduce-overhead"`, the trace says which code
  that is. All Triton kernels of the call must be those of the code.
- Otherwise, the script captured the graph, and may have captured other work around the code. All Triton kernels of the
  launch must be those of some compiled functions, one after the other.

Between two Triton kernels are those of library calls, at least one of each. A GEMM only comes from an operator that may
launch one, which often tells where the kernels of a call end. Nothing is guessed: what differs between the ways that
fit stays unknown, except for the module that contains all candidates, if that is within a layer. Code of one layer may
run for all of them, so it has modules only where the layer that called it is known.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import polars as pl

from stepscope.explain.kernel_names import decode
from stepscope.explain.trace.attribution.graphs import LAUNCH, is_graph, order_launches
from stepscope.explain.trace.attribution.names import classify_operator
from stepscope.recording import tables
from stepscope.recording.compiled_code import find_runs, find_shared, move_modules
from stepscope.recording.nesting import innermost, look_up
from stepscope.recording.rows.compiled_code import CompiledCall
from stepscope.recording.store import Recording

WAY = "compiled"
_TRITON = "triton_"  # the beginning of the names of generated kernels
_LEAST_KERNELS = 4  # generated ones, if only their names tell which code they are: fewer may be equal by chance
_MOST_PAIRS = 100_000  # of kernels and calls between two Triton kernels
_REDUCES = re.compile(r"(?i)splitk_?reduce|reduce_?splitk")
_FINISH = "finish"  # the class of kernels that add up the parts of the GEMM before them
# The classes of operators that may launch a kernel of this class; every operator may launch other kernels.
_MAKERS = {
    "GEMM": ("GEMM", "attention", "convolution", "other"),
    "attention": ("attention", "other"),
    "convolution": ("convolution", "other"),
}


class _Owner(NamedTuple):
    """A call in generated code. `op_class` is that of its operator."""

    module: str | None
    is_backward: bool
    op_class: str


_Calls = tuple[_Owner | None, ...]  # None is any work that is not a call, or none at all
_Known = tuple[str, bool | None]  # module, and whether it is in backward
_Names = tuple[str, ...]
_State = tuple[int, bool]  # the call of the last kernel, and whether it may have launched no other


class _Code(NamedTuple):
    """The calls of a compiled function: of Triton kernels, and of others before, between and after these. `may_move`
    says that all are within one module, and that the caller may be another."""

    key: str | None
    may_move: bool
    names: _Names
    owners: tuple[_Owner, ...]
    between: tuple[_Calls, ...]


class _Choices(NamedTuple):
    """What may have launched each Triton kernel, and the kernels before, between and after these."""

    owners: Sequence[set[_Owner]]
    between: Sequence[set[_Calls]]


class CompiledReplays:
    """The compiled functions of a recording, to compare with the kernels of CUDA graphs."""

    def __init__(self) -> None:
        self._calls = tables.empty("compiled_calls")
        self._runs: list[pl.DataFrame] = []
        self._codes: dict[str | None, list[_Code]] = {}  # by the module that calls them
        self._found: dict[tuple[_Names, str | None, tuple[str | None, ...]], list[_Known | None]] = {}

    def add(self, recording: Recording) -> None:
        if recording.compiled_calls.height:
            self._calls = recording.compiled_calls
            self._runs.append(find_runs(recording))

    def fill(self, kernels: pl.DataFrame) -> pl.DataFrame:
        """Fill in `matched`, module and phase of kernels of graphs that nothing else explains."""
        unknown = is_graph() & pl.col("matched").is_null()
        if not self._calls.height or not kernels.select(unknown.any()).item():
            return kernels
        runs = pl.concat(self._runs)
        rows = kernels.with_row_index("row").with_columns(unknown=unknown, run=innermost(runs, kernels))
        rows = rows.with_columns(key=look_up(runs, "key", rows["run"]))
        in_runs = rows.filter(pl.col("run").is_not_null(), pl.col("kind") != "cpu").partition_by("run")
        launches = rows.filter(pl.col("run").is_null(), is_graph()).partition_by(LAUNCH)
        groups = (order_launches(group) for group in (*in_runs, *launches) if group["unknown"].any())
        return _fill(kernels, [one for group in groups for one in self._name(group)])

    def _name(self, group: pl.DataFrame) -> list[tuple[int, str, bool | None]]:
        """Return row, module and is_backward of the kernels that are known, of one graph or one call of code."""
        run_key = () if group["run"][0] is None else (group["key"][0],)
        caller = group.filter("unknown")["module"][0]
        # If the numbers of nodes have another order than the capture, time may still have it.
        for ordered in (group, group.sort("start_ns", maintain_order=True)):
            asked = (tuple(ordered["name"]), caller, run_key)
            if asked not in self._found:
                self._found[asked] = self._match(*asked)
            places = zip(*ordered.select("row", "unknown"), self._found[asked], strict=True)
            if found := [(row, *known) for row, is_unknown, known in places if is_unknown and known]:
                return found
        return []

    def _match(self, names: _Names, caller: str | None, run_key: tuple[str | None, ...]) -> list[_Known | None]:
        places = [place for place, name in enumerate(names) if name.startswith(_TRITON)]
        generated = tuple(names[place] for place in places)
        codes = self._read_codes(caller)
        if run_key:
            choices = _choose([code for code in codes if code.key == run_key[0] and code.names == generated])
        else:
            choices = _tile(generated, codes) if len(generated) >= _LEAST_KERNELS else None
        found: list[_Known | None] = [None] * len(names)
        if choices is None:
            return found
        for place, owners in zip(places, choices.owners, strict=True):
            found[place] = _agree(owners)
        borders = pairwise([-1, *places, len(names)])
        for (before, after), calls in zip(borders, choices.between, strict=True):
            found[before + 1 : after] = _name_between(names[before + 1 : after], calls)
        return found

    def _read_codes(self, caller: str | None) -> list[_Code]:
        if caller not in self._codes:
            graphs = self._calls.partition_by("graph", maintain_order=True)
            self._codes[caller] = [code for graph in graphs if (code := _read_code(graph, caller)).names]
        return self._codes[caller]


def _fill(kernels: pl.DataFrame, found: Sequence[tuple[int, str, bool | None]]) -> pl.DataFrame:
    schema = {"row": pl.Int64, "known": pl.String, "is_backward": pl.Boolean}
    known = pl.DataFrame(found, schema=schema, orient="row")
    rows = kernels.select(row=pl.int_range(pl.len()))
    taken = rows.join(known, on="row", how="left", maintain_order="left")
    is_known = pl.col("known").is_not_null()
    backward = pl.when("is_backward").then(pl.lit("backward"))
    forward = pl.when(~pl.col("is_backward")).then(pl.lit("forward"))
    filled = kernels.with_columns(taken["known"], taken["is_backward"]).with_columns(
        module=pl.coalesce("known", "module"),
        # A script may capture a whole step: then the graph is not in the phase that launches it.
        phase=pl.coalesce(backward, "phase", forward),
        matched=pl.when(is_known).then(pl.lit(WAY)).otherwise("matched"),
    )
    return filled.select(kernels.columns)


def _read_code(graph: pl.DataFrame, caller: str | None) -> _Code:
    """Return the calls of a compiled function, with their modules in the layer that called it."""
    modules = graph["module"].to_list()
    moved = move_modules(modules, caller)
    names: list[str] = []
    owners: list[_Owner] = []
    between: list[list[_Owner]] = [[]]
    for kernel, is_backward, module in zip(graph["kernel"], graph["is_backward"], moved, strict=True):
        call = CompiledCall(kernel, module)
        if kernel.startswith(_TRITON):
            names.append(kernel)
            owners.append(_Owner(module, is_backward, "other"))
            between.append([])
        else:
            between[-1].append(_Owner(module, is_backward, classify_operator(call.operator)))
    may_move = bool(find_shared(modules, caller))
    return _Code(graph["key"][0], may_move, tuple(names), tuple(owners), tuple(map(tuple, between)))


# --- Which calls ------------------------------------------------------------------------------------------------------


def _choose(codes: Sequence[_Code]) -> _Choices | None:
    """Return the choices if one of these codes was called."""
    if not codes:
        return None
    owners = [set(choices) for choices in zip(*(code.owners for code in codes), strict=True)]
    return _Choices(owners, [set(choices) for choices in zip(*(code.between for code in codes), strict=True)])


def _tile(names: _Names, codes: Sequence[_Code]) -> _Choices | None:
    """Return the choices if some codes were called one after the other, between other work without Triton kernels."""
    size = len(names)
    by_first: dict[str, list[_Code]] = {}
    for code in codes:
        by_first.setdefault(code.names[0], []).append(code)
    fits = [
        (begin, begin + len(code.names), code)
        for begin, name in enumerate(names)
        for code in by_first.get(name, ())
        if names[begin : begin + len(code.names)] == code.names
    ]
    reached, leads_on = {0}, {size}
    for begin, end, _ in fits:
        reached |= {end} if begin in reached else set()
    for begin, end, _ in reversed(fits):
        leads_on |= {begin} if end in leads_on else set()
    if size not in reached:
        return None
    owners: list[set[_Owner]] = [set() for _ in names]
    between: list[set[_Calls]] = [set() for _ in range(size + 1)]
    ending: list[set[_Calls]] = [set() for _ in range(size + 1)]
    beginning: list[set[_Calls]] = [set() for _ in range(size + 1)]
    fits = [one for one in fits if one[0] in reached and one[1] in leads_on]
    times = Counter(id(code) for *_, code in fits)
    for begin, end, fitting in fits:
        code = _forget_modules(fitting) if fitting.may_move and times[id(fitting)] > 1 else fitting
        beginning[begin].add(code.between[0])
        ending[end].add(code.between[-1])
        for place, owner in enumerate(code.owners, begin):
            owners[place].add(owner)
        for place, calls in enumerate(code.between[1:-1], begin + 1):
            between[place].add(calls)
    for choices, before, after in zip(between, ending, beginning, strict=True):
        if before or after:
            choices |= {(*one, None, *other) for one in before or {()} for other in after or {()}}
    return _Choices(owners, between)


def _forget_modules(code: _Code) -> _Code:
    """Return code that runs several times, perhaps for different modules."""
    owners = tuple(one._replace(module=None) for one in code.owners)
    between = tuple(tuple(one and one._replace(module=None) for one in calls) for calls in code.between)
    return code._replace(owners=owners, between=between)


# --- Which kernels of a call ------------------------------------------------------------------------------------------


def _name_between(names: _Names, choices: set[_Calls]) -> list[_Known | None]:
    """Return what is known of kernels that all of these sequences of calls may have launched."""
    if len(names) * sum(map(len, choices)) > _MOST_PAIRS:
        return [None] * len(names)
    classes = [_FINISH if _REDUCES.search(name) else decode(name).kernel_class for name in names]
    ways = [_distribute(classes, calls) for calls in choices]
    return [_agree(set().union(*owners)) for owners in zip(*ways, strict=True)]


def _distribute(classes: Sequence[str], calls: _Calls) -> list[set[_Owner | None]]:
    """Return the calls that may have launched each kernel, if every call launched at least one and they ran in order;
    all of them if that cannot be."""
    every: set[_Owner | None] = set(calls) or {None}
    states: list[set[_State]] = [{(-1, True)}]
    for kernel_class in classes:
        states.append({after for state in states[-1] for after in _follow(state, kernel_class, calls)})
    alive = {state for state in states[-1] if state[1] and not any(calls[state[0] + 1 :])}
    owners = []
    for before, kernel_class in zip(states[-2::-1], reversed(classes), strict=True):
        owners.append({calls[at] for at, _ in alive})
        alive = {state for state in before if not alive.isdisjoint(_follow(state, kernel_class, calls))}
    return owners[::-1] if alive else [every] * len(classes)


def _follow(state: _State, kernel_class: str, calls: _Calls) -> Iterator[_State]:
    """Yield the states after one more kernel."""
    at, is_done = state
    if kernel_class == _FINISH:
        if at >= 0:
            yield state
        return
    if at >= 0 and _may_launch(calls[at], kernel_class):
        yield at, is_done or _satisfies(calls[at], kernel_class)
    for place in range(at + 1, len(calls) if is_done else 0):
        if _may_launch(calls[place], kernel_class):
            yield place, _satisfies(calls[place], kernel_class)
        if calls[place] is not None:  # no call is left out
            return


def _may_launch(call: _Owner | None, kernel_class: str) -> bool:
    makers = _MAKERS.get(kernel_class)
    return call is None or makers is None or call.op_class in makers


def _satisfies(call: _Owner | None, kernel_class: str) -> bool:
    """Whether a call that launched this kernel may have launched no other: a GEMM needs more than a copy."""
    return call is None or call.op_class not in _MAKERS or kernel_class in (*_MAKERS, "other")


def _agree(owners: Collection[_Owner | None]) -> _Known | None:
    """Return what is the same for all owners: a module, or within a layer the one that contains all."""
    known = [owner for owner in owners if owner is not None]
    modules = {owner.module for owner in known if owner.module is not None}
    if len(known) < len(owners) or any(owner.module is None for owner in known):
        return None
    backward = {owner.is_backward for owner in known}
    shared = find_shared(modules)
    if len(modules) > 1 and not any(label.isdecimal() for label in shared):
        return None
    return ".".join(shared), backward.pop() if len(backward) == 1 else None
