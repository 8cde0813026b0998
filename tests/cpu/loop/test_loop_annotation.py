"""Names for the parts of a loop: models found among all objects, and ranges that change nothing."""

import builtins
import copy
import io
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from stepscope.loop.annotation import annotating, find_roots, list_wrappers, name_modules, unwrap
from stepscope.loop.profiler import LoopProfiler, OtherProfilers
from stepscope.recording.readers import kineto
from tests.cpu.loop.loops import make_model, unchanged


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Critic(Net):
    pass


class DataParallelStandIn(nn.Module):
    """Is named as the wrapper below: a real one needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


DataParallelStandIn.__name__ = "DistributedDataParallel"


def names_of(*roots: nn.Module) -> list[str]:
    names = name_modules(roots)
    return [names[id(module)] for root in roots for module in root.modules()]


def recorded_names(folder: Path, roots: list[nn.Module], work: Any) -> Counter[str]:
    """The ranges that `work` leaves in a trace."""
    profiler = LoopProfiler([torch.profiler.ProfilerActivity.CPU], OtherProfilers(lambda: None))
    with profiler:
        profiler.keep_events()
        with annotating(roots):
            work()
    profiler.write(folder / "trace.json")
    ranges = kineto.read(folder / "trace.json").ranges
    return Counter(ranges["name"].to_list())


def test_the_model_is_found_by_the_parameters_of_the_optimizer() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    roots = find_roots([optimizer])
    assert roots[0] is model
    assert any(root is loss for root in roots)
    assert not any(root is other for root in roots)
    assert not any(root is block for root in roots for block in model.blocks)


def test_a_module_that_is_not_complete_is_left_alone() -> None:
    """Its `__init__` has not run: asking it for anything raises."""
    model, incomplete = Net(), Net.__new__(Net)
    assert model in find_roots([torch.optim.SGD(model.parameters(), lr=0.1)])
    assert "_modules" not in vars(incomplete)


def test_the_largest_model_comes_first_and_the_outermost_counts() -> None:
    small, large = nn.Linear(2, 2), DataParallelStandIn(Net())
    optimizer = torch.optim.SGD([*small.parameters(), *large.parameters()], lr=0.1)
    roots = [root for root in find_roots([optimizer]) if any(True for _ in root.parameters())]
    assert [id(root) for root in roots] == [id(large), id(small)]


def test_modules_have_the_names_of_the_user_without_wrappers() -> None:
    model = Net()
    assert names_of(model) == ["(Net)", "blocks", "blocks.0", "blocks.1"]
    assert names_of(DataParallelStandIn(model)) == ["", "(Net)", "blocks", "blocks.0", "blocks.1"]
    assert isinstance(DistributedDataParallel, type)  # the class that the stand-in is named after


def test_a_compiled_model_has_the_name_of_the_model() -> None:
    compiled: Any = torch.compile(Net(), backend="eager")
    names = name_modules([compiled])
    assert names[id(compiled)] == "(Net)"
    assert set(names.values()) == {"(Net)", "blocks", "blocks.0", "blocks.1"}
    assert type(unwrap(compiled)) is Net
    assert type(unwrap(DataParallelStandIn(compiled))) is Net


def test_a_compiled_layer_has_the_name_of_the_layer() -> None:
    model: Any = Net()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    assert names_of(model) == ["(Net)", "blocks", "blocks.0", "blocks.1", "blocks.1"]
    assert names_of(model, Critic())[3:5] == ["Net.blocks.1", "Net.blocks.1"]


def test_names_that_only_begin_like_a_wrapper_are_kept() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module_list = nn.ModuleList([nn.Linear(1, 1)])

    assert names_of(Holder()) == ["(Holder)", "module_list", "module_list.0"]


def test_several_models_prefix_the_names_of_their_parts() -> None:
    names = names_of(Net(), Critic(), nn.MSELoss())
    assert names[:3] == ["(Net)", "Net.blocks", "Net.blocks.0"]
    assert names[4:6] == ["(Critic)", "Critic.blocks"]
    assert names[-1] == "(MSELoss)"
    assert names_of(Net(), nn.MSELoss())[1] == "blocks"  # a loss is not a second model


def test_wrappers_and_sharded_optimizers_are_listed() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    model = DataParallelStandIn(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    assert list_wrappers([model], [optimizer]) == ("DistributedDataParallel", "ZeroRedundancyOptimizer")
    assert list_wrappers([Net()], [torch.optim.SGD(model.parameters())]) == ()


def test_parts_of_a_loop_become_ranges(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    logger = logging.getLogger("loop")
    logger.addHandler(logging.NullHandler())

    def work() -> None:
        model(torch.randn(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        print("loss", end="")  # noqa: T201
        logger.warning("loss")
        model.eval()
        model(torch.randn(2, 4))

    names = recorded_names(tmp_path, [model], work)
    expected = {"module:(Net)": 2, "module:blocks.0": 2, "module:blocks.1": 2, "phase:validation": 1}
    expected |= {"phase:clipping": 1, "phase:scheduler": 1, "phase:checkpoint": 1, "phase:logging": 2}
    assert {name: names[name] for name in expected} == expected


def test_annotation_leaves_nothing_behind(tmp_path: Path) -> None:
    model, _ = make_model()
    holders: tuple[Any, ...] = (
        nn.Module,
        builtins,
        torch,
        torch.serialization,
        logging.Logger,
        torch.cuda,
        torch.cuda.Event,
    )
    holders = (*holders, lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau, nn.utils, nn.utils.clip_grad)
    with unchanged(*holders, *model.modules()):
        recorded_names(tmp_path, [model], lambda: model(torch.randn(2, 4)))
        with pytest.raises(ZeroDivisionError):
            recorded_names(tmp_path, [model], lambda: 1 / 0)


def test_a_model_that_is_copied_or_saved_in_a_recorded_step_is_not_changed(tmp_path: Path) -> None:
    model, _ = make_model()
    copies: list[nn.Module] = []
    saved = io.BytesIO()

    def work() -> None:
        with unchanged(*model.modules()):
            model(torch.randn(2, 4))
        copies.append(copy.deepcopy(model))
        copies[0](torch.randn(2, 4))
        torch.save(model, saved)

    names = recorded_names(tmp_path, [model], work)
    assert names["module:(Sequential)"] == 1  # the copy is not the model, and has no name
    assert b"stepscope" not in saved.getvalue()
    with torch.no_grad():
        for parameter in copies[0].parameters():
            parameter.zero_()
    assert copies[0](torch.randn(2, 4)).abs().sum() == 0  # it calls its own layers
    assert model(torch.randn(2, 4)).abs().sum() > 0
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert [type(module) for module in loaded.modules()] == [type(module) for module in model.modules()]


class Calling(Net):
    """Layers of `transformers` call the class above, which compiled code checks."""

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Calling()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def test_code_that_calls_the_class_above_is_neither_compiled_again_nor_traced_with_ours(tmp_path: Path) -> None:
    counter = CompileCounter()
    compiled: Any = torch.compile(Outer(), backend=counter, fullgraph=True, dynamic=False)
    known, new = torch.randn(2, 4), torch.randn(3, 4)
    try:
        compiled(known)
        names = recorded_names(tmp_path, [compiled], lambda: compiled(known))
        assert counter.frame_count == 1
        assert names["module:(Outer)"] >= 1
        recorded_names(tmp_path, [compiled], lambda: compiled(new))
        assert counter.frame_count == 2
        compiled(new)
        assert counter.frame_count == 2
    finally:
        torch._dynamo.reset()


class Broken(Net):
    def forward(self, x: torch.Tensor) -> Any:
        x = x * 1
        torch._dynamo.graph_break()
        return super().forward(x)


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Broken(), Broken()])

    def forward(self, x: torch.Tensor) -> Any:
        return sum(part(x) for part in self.parts)


def test_modules_that_are_called_at_a_graph_break_have_their_names(tmp_path: Path) -> None:
    counter = CompileCounter()
    compiled: Any = torch.compile(Several(), backend=counter)
    x = torch.randn(2, 4)
    try:
        compiled(x)
        before = counter.frame_count
        names = recorded_names(tmp_path, [compiled], lambda: compiled(x))
        assert counter.frame_count == before
        assert {name for name in names if name.startswith("module:")} == {
            "module:(Several)",
            "module:parts.0",
            "module:parts.1",
        }
    finally:
        torch._dynamo.reset()


def test_compiled_models_are_not_compiled_again(tmp_path: Path) -> None:
    compiled: Any = torch.compile(Net(), backend="eager")
    x = torch.randn(2, 4)
    compiled(x)
    before = torch._dynamo.utils.counters["frames"]["total"]
    names = recorded_names(tmp_path, [compiled], lambda: compiled(x))
    try:
        assert torch._dynamo.utils.counters["frames"]["total"] == before
        assert names["module:(Net)"] >= 1
        assert names["module:blocks.0"] == 0
    finally:
        torch._dynamo.reset()
