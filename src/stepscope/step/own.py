"""A model of the user's own, by the smallest contract that serves a plain `nn.Module`.

    def build(batch, context):                        # any of: batch, context, device, attention, seed; and --set's
        model = MyTransformer(...)
        tokens = torch.randint(10_000, (batch, context))
        return model, tokens, lambda logits: my_loss(logits, tokens)

It returns the module, its input, and a function from the module's output to a scalar loss. The input is a tensor, a
tuple of arguments, or a dict of keyword arguments. The loss is None when the output already is the loss or carries it
as `.loss`. The factory runs under `torch.device(...)`, so whatever it makes is made on the right device without its
knowing, and it only receives the arguments that it names.
"""

import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stepscope.errors import StepscopeError, nearest
from stepscope.spec import Factory, Workload

CONTRACT = "expected (module, input, loss): an nn.Module, a tensor or a tuple or dict of them, and a function or None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step needs of a model. `call` feeds the input to whatever runs the module, compiled or not; `has_tokens`
    when a step works on batch times context tokens, as it does unless a factory takes no notice of one of them."""

    module: nn.Module
    call: Callable[[Callable[..., object]], object]
    loss: Callable[[object], Tensor]
    has_tokens: bool = True


def build_own(workload: Workload, factory: Factory, device: torch.device) -> Parts:
    function = load_factory(factory)
    arguments = _choose_arguments(workload, factory, function, device)
    result = function(**arguments)
    if not isinstance(result, tuple) or len(result) != 3:
        raise _wrong_result(factory, f"a {type(result).__name__}" + _length(result))
    module, batch, loss = result
    if not isinstance(module, nn.Module):
        raise _wrong_result(factory, f"a {type(module).__name__} as module")
    if loss is not None and not callable(loss):
        raise _wrong_result(factory, f"a {type(loss).__name__} as loss")
    return Parts(
        module=module,
        call=_feeder(factory, _move(batch, device)),
        loss=lambda output: _scalar_loss(factory, loss, output),
        has_tokens={"batch", "context"} <= set(arguments),
    )


def load_factory(factory: Factory) -> Callable[..., object]:
    """Imports the module, from the current folder first as `python -m` would."""
    module_name, _, function_name = factory.target.partition(":")
    if sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))
    try:
        value: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        inside = "" if module_name.startswith(missing) else f", which `{module_name}` imports"
        raise StepscopeError(
            f"cannot import `{missing}`{inside}",
            detail=f"looked in {Path.cwd()} and the installed packages",
            hint=f"run from the folder that holds {missing.partition('.')[0]}.py, or install it",
        ) from None
    for name in function_name.split("."):
        if not hasattr(value, name):
            close = nearest(name, vars(value) if hasattr(value, "__dict__") else ())
            raise StepscopeError(
                f"`{module_name}` has no `{function_name}`",
                detail=f"did you mean `{close}`?" if close else "",
                hint=f"--model {module_name}:{close or 'build'}",
            )
        value = getattr(value, name)
    if not callable(value):
        raise StepscopeError(f"`{factory.target}` is not a function", detail=CONTRACT, hint="stepscope bench --help")
    return value


def source_digest() -> str:
    """Of every imported file that is the user's: an edited model is a new case, whichever of its files was edited.
    Installed packages and Python's own are known by their versions."""
    digest = hashlib.sha256()
    for file in sorted(_own_files()):
        digest.update(os.fsencode(file) + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _own_files() -> set[Path]:
    others = [Path(__file__).parents[1], Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))]
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = {Path(name).resolve() for name in names if name}
    return {
        file
        for file in files
        if file.suffix == ".py"
        and file.is_file()  # torch has modules that name files which are not there
        and not {"site-packages", "dist-packages"} & set(file.parts)
        and not any(other in file.parents for other in others)
    }


def check_arguments(workload: Workload, factory: Factory, function: Callable[..., object]) -> None:
    """Refuses, before anything runs, settings that the factory would never see."""
    _choose_arguments(workload, factory, function, torch.device("cpu"))


def _choose_arguments(
    workload: Workload, factory: Factory, function: Callable[..., object], device: torch.device
) -> dict[str, object]:
    offered: dict[str, object] = {
        "batch": workload.batch,
        "context": workload.context,
        "device": device,
        "attention": workload.attention,
        "seed": workload.seed,
    }
    given = dict(factory.arguments)
    for name in given:
        if name in offered:
            raise StepscopeError(
                f"`--set {name}` for the factory `{factory.target}`",
                detail="that one has a flag of its own, which the tables go by",
                hint=f"--{name} {given[name]}",
            )
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters and not takes_any]
    plain = Workload(model=factory)
    unknown += [
        name
        for name in ("batch", "context", "attention", "seed")
        if name not in parameters and not takes_any and getattr(workload, name) != getattr(plain, name)
    ]
    if unknown:
        raise StepscopeError(
            f"the factory `{factory.target}` takes no `{unknown[0]}`",
            detail=f"it takes {', '.join(parameters) or 'nothing'}",
            hint=f"add `{unknown[0]}` to its parameters, or leave it out of the command",
        )
    missing = [
        name
        for name, p in parameters.items()
        if name not in offered | given and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise StepscopeError(
            f"the factory `{factory.target}` needs `{missing[0]}`",
            detail=f"stepscope offers {', '.join(offered)}; the rest comes by --set",
            hint=f"--set {missing[0]}=VALUE",
        )
    return {name: value for name, value in offered.items() if name in parameters or takes_any} | given


def _feeder(factory: Factory, batch: object) -> Callable[[Callable[..., object]], object]:
    match batch:
        case Tensor():
            return lambda run: run(batch)
        case Mapping():
            return lambda run: run(**batch)
        case tuple() | list():
            return lambda run: run(*batch)
        case _:
            raise _wrong_result(factory, f"a {type(batch).__name__} as input")


def _move(batch: object, device: torch.device) -> object:
    match batch:
        case Tensor():
            return batch.to(device)
        case Mapping():
            return {name: _move(value, device) for name, value in batch.items()}
        case tuple() | list():
            return tuple(_move(value, device) for value in batch)
        case _:
            return batch


def _scalar_loss(factory: Factory, loss: Callable[[object], object] | None, output: object) -> Tensor:
    value = output if loss is None else loss(output)
    value = value if isinstance(value, Tensor) else getattr(value, "loss", value)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise StepscopeError(
            f"the loss of `{factory.target}` is a {type(value).__name__}{shape}, not a scalar tensor",
            detail=CONTRACT,
            hint="return (module, input, lambda output: loss_of(output))",
        )
    return value


def _wrong_result(factory: Factory, found: str) -> StepscopeError:
    return StepscopeError(
        f"the factory `{factory.target}` returned {found}",
        detail=CONTRACT,
        hint="return (module, input, lambda output: loss_of(output))",
    )


def _length(value: object) -> str:
    return f" of {len(value)}" if isinstance(value, tuple) else ""
