"""Named ranges around the parts of a step, added from outside while a recorder runs.

| range | around |
| --- | --- |
| `step:0` | one step, counted from 0 |
| `phase:forward`, `phase:loss`, `phase:backward`, `phase:optimizer` | a phase; the loss is inside forward |
| `phase:warm-up` | warm-up steps, if the recorder sees them |
| `module:blocks.3.attention.q_proj` | a call of a submodule; `module:(TransformerLM)` is the model itself |
| `part:scores`, `part:softmax`, `part:values` | the three parts of the reference attention |
| `function:name` | a function named by the user |

Modules are annotated by wrapping `forward`; hooks would cost more. A checkpointed block appears again in backward,
where it is recomputed.

Nothing inside a compiled model is annotated: a wrapped `forward` would trigger recompilation, and the range would not
be part of the compiled graph. The step, its phases and the model as a whole remain; if the whole step is traced or
captured, only the step and its phases.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from stepscope.annotate import Backend, Opener, activate, open_range, wrap
from stepscope.errors import StepscopeError
from stepscope.patches import annotate_module, is_compiled, is_inside_compiled, replace_attribute, replace_function
from stepscope.spec import WHOLE_STEP, Factory, Workload, flag_of
from stepscope.step.builder import Step
from stepscope.step.own import CONTRACT, load_factory

PARTS = {
    "stepscope.nn.functional:attention_scores": "part:scores",
    "stepscope.nn.functional:softmax": "part:softmax",
    "stepscope.nn.functional:attention_values": "part:values",
}
FORM = "expected package.module:function or package.module:Class.method, written in Python"


@dataclass(slots=True)
class Annotation:
    """`next_step` is the number of the next step. `uncalled` are the user's functions that have not run yet, for
    example because callers hold references that could not be replaced."""

    next_step: int = 0
    uncalled: set[str] = field(default_factory=set)


@contextmanager
def annotated(
    step: Step, *, functions: Sequence[str] = (), backend: Backend | Opener = "profiler", modules: bool = True
) -> Iterator[Annotation]:
    """Annotate `step` within this context and restore it afterwards. Without `modules`, only steps and phases have
    ranges, which costs next to nothing."""
    annotation = Annotation(uncalled=set(functions))
    with ExitStack() as undo:
        undo.enter_context(activate(backend))
        _annotate_phases(step, annotation, undo)
        replace_attribute(step, "measure_loss", wrap(step.measure_loss, "phase:loss"), undo)
        if modules and not step.workload.is_program:
            _annotate_root(step, undo)
        if modules and not step.hides_modules:
            _annotate_inside(step.module, undo)
        for target in functions:
            name = f"function:{target.partition(':')[2]}"
            _annotate_function(target, name, undo, on_call=partial(annotation.uncalled.discard, target))
        yield annotation


def check_functions(functions: Sequence[str], workload: Workload) -> None:
    """Raise StepscopeError, before anything is built, for functions that cannot be annotated."""
    if functions and workload.hides_modules:
        flag = next(flag_of(name) for name in ("compile", *WHOLE_STEP) if getattr(workload, name))
        raise StepscopeError(
            f"`--annotate {functions[0]}` cannot be used with `{flag}`",
            detail="compiled code has no ranges, and replacing a function would trigger recompilation",
            hint=f"{flag} no, or remove --annotate",
        )
    for target in functions:
        _find_function(target)


def _annotate_phases(step: Step, annotation: Annotation, undo: ExitStack) -> None:
    """Annotate the phases. The range of the step opens in the first phase and closes in the last one."""
    opened = ExitStack()
    undo.push(opened)

    def begin(phase: Callable[[], None]) -> None:
        opened.close()  # the last step may have ended early
        opened.callback(open_range(f"step:{annotation.next_step}"))
        annotation.next_step += 1
        phase()

    def end(phase: Callable[[], None]) -> None:
        phase()
        opened.close()

    runs = [wrap(phase, f"phase:{name}") for name, phase in step.phases]
    runs[0] = partial(begin, runs[0])
    runs[-1] = partial(end, runs[-1])
    replace_attribute(
        step, "phases", tuple((name, run) for (name, _), run in zip(step.phases, runs, strict=True)), undo
    )


def _annotate_root(step: Step, undo: ExitStack) -> None:
    """Annotate the model as a whole where the step calls it, which is outside the compiled part."""
    run_module, module = step.run_module, step.module
    original = module._orig_mod if isinstance(module, OptimizedModule) else module

    def call(*args: object, **kwargs: object) -> object:
        return run_module(*args, **kwargs)

    replace_attribute(step, "run_module", wrap(call, f"module:({type(original).__name__})"), undo)


def _annotate_inside(root: nn.Module, undo: ExitStack) -> None:
    for name, module in root.named_modules():
        if name and not is_inside_compiled(root, name):
            annotate_module(module, f"module:{name}", undo)
    if any(is_compiled(module) for module in root.modules()):
        return  # compiled by the user's factory: the functions it calls must not change
    for target, name in PARTS.items():
        _annotate_function(target, name, undo)
    # A transformers model computes its own loss, with a function from a property.
    if isinstance(getattr(type(root), "loss_function", None), property):
        replace_attribute(root, "_loss_function", wrap(root.loss_function, "phase:loss"), undo)  # type: ignore[arg-type]


def _annotate_function(target: str, name: str, undo: ExitStack, *, on_call: Callable[[], None] | None = None) -> None:
    holder, attribute, function = _find_function(target)
    ranged = wrap(function, name)
    if on_call is not None:
        ranged = _telling(ranged, on_call)
    replace_function(holder, attribute, ranged, undo)


def _telling(function: Callable[..., Any], on_call: Callable[[], None]) -> Callable[..., Any]:
    @wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        on_call()
        return function(*args, **kwargs)

    return told


def _find_function(target: str) -> tuple[Any, str, FunctionType]:
    """The module or class with the function, the attribute name, and the function."""
    module_name, colon, path = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module_name.split("."), *path.split("."))):
        raise _refuse(target, FORM)
    try:
        load_factory(Factory(target=target))
    except StepscopeError as error:
        hint = error.hint.replace("--model", "--annotate") if error.detail.startswith("did you mean") else ""
        detail = FORM if error.detail == CONTRACT else f"{error.message}\n{error.detail}".strip()
        raise _refuse(target, detail, hint) from None
    *outer, attribute = path.split(".")
    holder: Any = sys.modules[module_name]
    for part in outer:
        holder = getattr(holder, part)
    found = vars(holder).get(attribute) if isinstance(holder, ModuleType | type) else None
    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not isinstance(function, FunctionType):
        raise _refuse(target, FORM)
    return holder, attribute, function


def _refuse(target: str, detail: str, hint: str = "") -> StepscopeError:
    return StepscopeError(
        f"cannot annotate `{target}`", detail=detail, hint=hint or "--annotate package.module:function"
    )
