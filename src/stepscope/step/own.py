"""The user's own model, from a factory function with a minimal contract.

    def build(batch, context):                        # any of: batch, context, device, attention, seed, and --set
    arguments model = MyTransformer(...) tokens = torch.randint(10_000, (batch, context)) return model, tokens, lambda
    logits: my_loss(logits, tokens)

It returns the module, its input, a function from the module's output to a scalar loss, and optionally the optimizer.
The input is a tensor, a tuple of arguments, or a dict of keyword arguments. The loss is None if the output is the loss
or has it as `.loss`. The factory runs under `torch.device(...)`, so everything that it creates is on the right device,
and it receives only the arguments that it names.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from stepscope.errors import StepscopeError, nearest
from stepscope.spec import DEFAULT_CONTEXT, Factory, Workload
from stepscope.units import with_article

CONTRACT = (
    "expected (module, input, loss): an nn.Module, a tensor or a tuple or dict of tensors, and a function or None; "
    "optionally followed by a torch.optim.Optimizer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a step. There is one input per pass; `call` passes it to the module, compiled or not, and `loss`
    takes the module's output and the input. Both may be traced, so they change nothing. A step has `batch` samples if
    `has_samples`, and batch × context tokens if `has_tokens`: a factory may ignore either. Without an `optimizer`, the
    model gets the one that the workload names."""

    module: nn.Module
    inputs: tuple[Any, ...]
    call: Callable[[Callable[..., object], Any], object]
    loss: Callable[[object, Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    has_samples: bool = True
    has_tokens: bool = True


def build_own(workload: Workload, factory: Factory, device: torch.device) -> Parts:
    function = load_factory(factory)
    arguments = _choose_arguments(workload, factory, function, device)
    result = function(**arguments)
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        raise _wrong_result(factory, f"a {type(result).__name__}" + _length(result))
    module, batch, loss, optimizer = (*result, None)[:4]
    if not isinstance(module, nn.Module):
        raise _wrong_result(factory, f"{with_article(type(module).__name__)} as the module")
    if loss is not None and not callable(loss):
        raise _wrong_result(factory, f"{with_article(type(loss).__name__)} as the loss")
    if not isinstance(batch, Tensor | Mapping | tuple | list):
        raise _wrong_result(factory, f"{with_article(type(batch).__name__)} as the input")
    _check_optimizer(workload, factory, module, optimizer)
    return Parts(
        module=module,
        inputs=(_move(batch, device),) * workload.passes,  # the factory builds one micro-batch
        call=_feed,
        loss=lambda output, _: _scalar_loss(factory, loss, output),
        optimizer=optimizer,
        has_samples="batch" in arguments,
        has_tokens={"batch", "context"} <= set(arguments),
    )


def _check_optimizer(workload: Workload, factory: Factory, module: nn.Module, optimizer: object) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong_result(factory, f"{with_article(type(optimizer).__name__)} as the optimizer")
    name = type(optimizer).__name__
    if workload.optimizer is not None:
        raise StepscopeError(
            f"`--optimizer {workload.optimizer}` cannot be used with `{factory.target}`, which returns its own {name}",
            hint="remove --optimizer, or return (module, input, loss)",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(id(parameter) for parameter in module.parameters()):
        raise StepscopeError(
            f"the {name} returned by the factory `{factory.target}` has none of the returned module's parameters",
            detail="it was created for another module or for copies, so the weights would never change",
            hint="create it from the returned module: torch.optim.AdamW(module.parameters())",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise StepscopeError(
            f"the {name} returned by the factory `{factory.target}` requires a closure",
            detail="stepscope runs forward and backward once, and then the optimizer",
            hint="return an optimizer whose step() takes no argument, such as torch.optim.AdamW",
        )


def load_factory(factory: Factory) -> Callable[..., object]:
    """Load the factory, from a module imported like `python -m` or a file run like `python file.py`."""
    place, _, function_name = factory.target.rpartition(":")
    value: object = _import_by_name(place) if factory.file is None else _run_file(Path(factory.file).expanduser())
    for name in function_name.split("."):
        if not hasattr(value, name):
            close = nearest(name, vars(value) if hasattr(value, "__dict__") else ())
            is_folder = isinstance(value, ModuleType) and _file_of(value) is None
            raise StepscopeError(
                f"`{place}` has no `{function_name}`",
                detail="it is a directory" if is_folder else f"did you mean `{close}`?" if close else "",
                hint="--model " + shlex.quote(f"{place}/FILE.py:{name}" if is_folder else f"{place}:{close or 'NAME'}"),
            )
        value = getattr(value, name)
    if not callable(value):
        raise StepscopeError(f"`{factory.target}` is not a function", detail=CONTRACT, hint="stepscope bench --help")
    return value


def _import_by_name(name: str) -> ModuleType:
    _put_first_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _missing_import(error, name, Path.cwd()) from None


def _run_file(file: Path) -> ModuleType:
    if file.is_dir():
        raise StepscopeError(
            f"`{file}` is a directory",
            detail="expected a Python file",
            hint="--model " + shlex.quote(f"{file}/FILE.py:build"),
        )
    if not file.is_file():
        close = nearest(file.name, [one.name for one in file.parent.glob("*.py")])
        raise StepscopeError(
            f"file not found: `{file}`",
            detail=f"did you mean `{file.with_name(close)}`?" if close else f"looked in {file.parent.absolute()}",
            hint="--model " + shlex.quote(f"{file.with_name(close) if close else 'path/to/file.py'}:build"),
        )
    file = file.resolve()
    _forget_other_folders(file.parent)
    # Use the file's own name if it is free, for tables that show where a class comes from; not `torch` for a torch.py.
    is_free = file.stem not in sys.modules or _file_of(sys.modules[file.stem]) == file
    name = file.stem if is_free else f"{file.stem} in {file}"
    if name in sys.modules:
        return sys.modules[name]
    _put_first_on_path(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look up modules by name
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise _missing_import(error, str(file), file.parent) from None
    return module


_entered: set[Path] = set()


def _forget_other_folders(folder: Path) -> None:
    """Forget what an earlier model imported from its own directory: both directories may have a `layers.py`."""
    others = _entered - {folder}
    _entered.add(folder)
    if not others:  # almost always; to look at the files of thousands of modules takes a quarter of a second
        return
    for name, module in list(sys.modules.items()):
        file = _file_of(module)
        if file is None or folder in file.parents or others.isdisjoint(file.parents):
            continue
        if _is_own(file):  # a project directory may contain its .venv
            del sys.modules[name]


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _put_first_on_path(folder: Path) -> None:
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))


def _missing_import(error: ModuleNotFoundError, importer: str, folder: Path) -> StepscopeError:
    missing = error.name or importer
    inside = "" if importer.startswith(missing) else f", which `{importer}` imports"
    return StepscopeError(
        f"cannot import `{missing}`{inside}",
        detail=f"looked in {folder} and the installed packages",
        hint=f"run from the directory with {missing.partition('.')[0]}.py, or install it",
    )


def source_digest() -> str:
    """A digest of all imported files that are the user's, so that editing any of them makes a new case. Installed
    packages and the standard library are identified by their versions."""
    digest = hashlib.sha256()
    for file in sorted(_own_files()):
        digest.update(os.fsencode(file) + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _own_files() -> set[Path]:
    files = {file for module in list(sys.modules.values()) if (file := _file_of(module)) is not None}
    # some torch modules name files that do not exist
    return {file for file in files if file.suffix == ".py" and file.is_file() and _is_own(file)}


def _is_own(file: Path) -> bool:
    """Whether a file is the user's, rather than part of stepscope, Python or an installed package."""
    return {"site-packages", "dist-packages", *_others()}.isdisjoint((*file.parts, *file.parents))


@cache
def _others() -> tuple[Path, ...]:
    # Not all of `sys.base_prefix`, which is often /usr: /usr/src/app belongs to the user.
    places = (Path(__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")))
    return tuple(place.resolve() for place in places)


def check_arguments(workload: Workload, factory: Factory, function: Callable[..., object]) -> bool:
    """Raise StepscopeError, before anything runs, for settings that the factory ignores. Returns whether it takes a
    context."""
    return "context" in _choose_arguments(workload, factory, function, torch.device("cpu"))


def _choose_arguments(
    workload: Workload, factory: Factory, function: Callable[..., object], device: torch.device
) -> dict[str, object]:
    offered: dict[str, object] = {
        "batch": workload.micro_batch,
        "context": workload.context or DEFAULT_CONTEXT,
        "device": device,
        "attention": workload.attention,
        "seed": workload.seed,
    }
    given = dict(factory.arguments)
    for name in given:
        if name in offered:
            raise StepscopeError(
                f"`--set {name}` cannot be used with the factory `{factory.target}`",
                detail=f"use the flag --{name}, which also appears in tables",
                hint=f"--{name} {given[name]}",
            )
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in given if name not in parameters and not takes_any]
    plain = Workload(model=factory)
    unknown += [
        name
        for name in offered
        if name not in ("device", *parameters) and not takes_any and getattr(workload, name) != getattr(plain, name)
    ]
    if unknown:
        raise StepscopeError(
            f"the factory `{factory.target}` has no parameter `{unknown[0]}`",
            detail=f"its parameters: {', '.join(parameters) or 'none'}",
            hint=f"add `{unknown[0]}` to its parameters, or remove it from the command",
        )
    if workload.passes > 1 and "batch" not in parameters and not takes_any:
        raise StepscopeError(
            f"`--grad-accumulation {workload.passes}` requires a `batch` parameter in the factory `{factory.target}`",
            detail="stepscope passes it the size of a micro-batch",
            hint="add `batch` to its parameters, or remove --grad-accumulation",
        )
    missing = [
        name
        for name, p in parameters.items()
        if name not in offered | given and p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise StepscopeError(
            f"the factory `{factory.target}` requires `{missing[0]}`",
            detail=f"stepscope passes {', '.join(offered)}; use --set for other parameters",
            hint=f"--set {missing[0]}=VALUE",
        )
    return {name: value for name, value in offered.items() if name in parameters or takes_any} | given


def _feed(run: Callable[..., object], batch: Any) -> object:
    if isinstance(batch, Tensor):
        return run(batch)
    return run(**batch) if isinstance(batch, dict) else run(*batch)  # `_move` made it a dict or a tuple


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
            f"the loss of `{factory.target}` must be a scalar tensor, got a {type(value).__name__}{shape}",
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
    return f" of length {len(value)}" if isinstance(value, tuple) else ""
