"""Every part of a step gets its range, the step computes the same as before, and afterwards nothing is left behind."""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import stepscope
from stepscope.errors import StepscopeError
from stepscope.nn import functional
from stepscope.spec import Factory, Mode, Scalar, Workload, build_case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated, check_functions
from stepscope.step.own import Parts

CPU = torch.device("cpu")
TINY: dict[str, Scalar] = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab": 20}
TINY |= {"batch": 1, "context": 8, "device": "cpu"}
GPT2: dict[str, Scalar] = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 20, "n_positions": 8}


class Log(list[str]):
    """Names of ranges as they open, each with its enclosing ranges: `step:0/phase:forward/module:...`."""

    def __init__(self) -> None:
        self.open: list[str] = []

    def begin(self, name: str) -> Callable[[], None]:
        self.open.append(name)
        self.append("/".join(self.open))

        def end() -> None:
            assert self.open.pop() == name

        return end

    def inside(self, prefix: str) -> list[str]:
        return [path.removeprefix(prefix + "/") for path in self if path.startswith(prefix + "/")]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Replaces the profiler."""
    log = Log()
    monkeypatch.setattr(sys.modules["stepscope.annotate"], "_profiler_opener", lambda: log.begin)
    return log


def make(**settings: Scalar) -> Step:
    return build(build_case(TINY | settings).workload, CPU)


def run(step: Step, steps: int = 1, functions: Sequence[str] = ()) -> set[str]:
    with annotated(step, functions=functions) as annotation:
        for _ in range(steps):
            step.run()
    return annotation.uncalled


def step_of(module: nn.Module, *batch: Tensor, mode: Mode = "forward-backward", compile: bool = False) -> Step:  # noqa: A002
    def loss(output: object, _batch: object) -> Tensor:
        assert isinstance(output, Tensor)
        return output.sum()

    parts = Parts(module=module, inputs=(batch,), call=lambda call, batch: call(*batch), loss=loss)
    workload = Workload(model=Factory(target="own:model"), mode=mode, compile=compile, device="cpu")
    return Step(workload, parts, CPU)


def test_steps_phases_modules_and_parts_are_nested(log: Log) -> None:
    run(make(), steps=2)
    forward = "step:0/phase:forward/module:(TransformerLM)"
    block = [path for path in log.inside(f"{forward}/module:blocks.1") if "ffn" not in path]
    attention = "module:blocks.1.attention"
    assert block == [
        "module:blocks.1.attention_norm",
        attention,
        *(f"{attention}/{attention}.{name}_proj" for name in "qkv"),
        *(f"{attention}/part:{name}" for name in ("scores", "softmax", "values")),
        f"{attention}/{attention}.output_proj",
    ]
    assert f"{forward}/module:lm_head" in log
    phases = [path for path in log if path.startswith("step:1/") and path.rpartition("/")[2].startswith("phase:")]
    names = ("phase:forward", "phase:forward/phase:loss", "phase:backward", "phase:optimizer")
    assert phases == [f"step:1/{name}" for name in names]
    assert log.open == []


def test_step_ends_with_its_last_phase(log: Log) -> None:
    step = make()
    with annotated(step):
        for _, phase in step.phases:
            phase()
        assert log.open == []


@pytest.mark.parametrize(("mode", "phases"), [("inference", 1), ("forward", 2), ("forward-backward", 3), ("train", 4)])
def test_every_mode_has_its_phases(log: Log, mode: str, phases: int) -> None:
    run(make(mode=mode))
    assert sum(path.rpartition("/")[2].startswith("phase:") for path in log) == phases


def snapshot(step: Step) -> list[object]:
    """Everything that annotation changes."""
    modules = [dict(vars(module)) for module in step.module.modules()]
    attributes = {name: value for name, value in vars(step).items() if name != "_loss"}
    return [attributes, modules, dict(vars(functional)), dict(vars(type(step.module)))]


@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_annotation_is_removed_afterwards(log: Log, checkpoint: str) -> None:
    step = make(checkpoint=checkpoint)
    before = snapshot(step)
    run(step, functions=["stepscope.nn.functional:softmax"])
    assert snapshot(step) == before


def test_annotation_is_removed_when_a_step_fails(log: Log) -> None:
    class Broken(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002, ARG002
            raise OSError("broken")

    step = step_of(nn.Sequential(Broken(1, 1)), torch.ones(1, 1))
    before = snapshot(step)
    with pytest.raises(OSError, match="broken"):
        run(step)
    assert log == [
        "step:0",
        "step:0/phase:forward",
        "step:0/phase:forward/module:(Sequential)",
        "step:0/phase:forward/module:(Sequential)/module:0",
    ]
    assert log.open == []
    assert snapshot(step) == before


def test_annotation_changes_no_result(log: Log) -> None:
    plain, watched = make(checkpoint="block"), make(checkpoint="block")
    plain.run()
    plain.run()
    run(watched, steps=2)
    for a, b in zip(plain.module.parameters(), watched.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_recomputation_of_checkpointing_is_in_backward(log: Log) -> None:
    run(make(checkpoint="block"))
    backward = "step:0/phase:backward"
    assert f"{backward}/module:blocks.0.attention/part:scores" in log
    run(make())
    assert sum("phase:backward/" in path for path in log) == len(log.inside(backward))


def test_shared_modules_and_module_lists_work(log: Log) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.again = self.first
            self.layers = nn.ModuleList([self.first, nn.Linear(2, 2)])
            self.table = nn.ModuleDict({"a": nn.Identity()})

        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.first, self.again, *self.layers):
                x = layer(x)
            return x

    run(step_of(Shared(), torch.ones(1, 2)))
    names = [path.rpartition("/")[2] for path in log if "module:" in path.rpartition("/")[2]]
    assert names == ["module:(Shared)", "module:first", "module:first", "module:first", "module:layers.1"]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_script_module_is_ignored(log: Log) -> None:
    scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    run(step_of(nn.Sequential(scripted, nn.ReLU()), torch.ones(1, 2)))
    assert [path.rpartition("/")[2] for path in log][3:] == ["module:1", "phase:loss", "phase:backward"]


def test_transformers_model_has_modules_and_its_own_loss(log: Log) -> None:
    step = build(build_case({"hf": "gpt2", "set": GPT2, "batch": 1, "context": 8, "device": "cpu"}).workload, CPU)
    run(step)
    model = "step:0/phase:forward/module:(GPT2LMHeadModel)"
    assert f"{model}/module:transformer/module:transformer.h.1/module:transformer.h.1.attn" in log
    assert f"{model}/phase:loss" in log
    assert "_loss_function" not in vars(step.module)


def test_user_ranges_nest_with_ours(log: Log) -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            with stepscope.annotate("mine"):
                return super().forward(input)

    run(step_of(Own(1, 1), torch.ones(1, 1)))
    assert "step:0/phase:forward/module:(Own)/mine" in log


class TestCompiled:
    """Only the outside of a compiled model is annotated, and the compiler is not affected."""

    @contextmanager
    def compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
        torch._dynamo.reset()
        counter = CompileCounter()
        compile_ = torch.compile
        monkeypatch.setattr(
            torch, "compile", lambda module, **options: compile_(module, **options | {"backend": counter})
        )
        yield counter
        assert counter.frame_count == 1

    def test_only_step_phases_and_model_remain(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.compiled_once(monkeypatch):
            step = make(compile=True)
            step.run()
            run(step)
            step.run()
        names = ["step:0", "phase:forward", "module:(TransformerLM)", "phase:loss", "phase:backward", "phase:optimizer"]
        assert [path.rpartition("/")[2] for path in log] == names

    def test_user_range_inside_is_ignored_and_breaks_no_graph(self, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
        @stepscope.annotate("decorated")
        def inner(x: Tensor) -> Tensor:
            return x.sin()

        class Own(nn.Linear):
            def forward(self, input: Tensor) -> Tensor:  # noqa: A002
                stepscope.annotate.push("pushed")
                x = super().forward(input)
                stepscope.annotate.pop()
                with stepscope.annotate("mine"):
                    return inner(x)

        with self.compiled_once(monkeypatch):
            step = step_of(Own(1, 1), torch.ones(1, 1), compile=True)
            step.run()
            run(step)
        assert not [path for path in log if path.rpartition("/")[2] in ("mine", "decorated", "pushed")]

    def test_parts_compiled_by_the_user_are_ranges_without_children(self, log: Log) -> None:
        torch._dynamo.reset()
        counter = CompileCounter()
        in_place = nn.Sequential(nn.Linear(2, 2))
        in_place.compile(backend=counter)
        around = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend=counter)
        assert isinstance(around, nn.Module)
        step = step_of(nn.Sequential(in_place, around, nn.ReLU()), torch.ones(1, 2), mode="inference")
        step.run()
        compiled = counter.frame_count
        run(step)
        step.run()
        assert counter.frame_count == compiled
        modules = [path.rpartition("/")[2] for path in log if "module:" in path.rpartition("/")[2]]
        assert modules == ["module:(Sequential)", "module:0", "module:1", "module:2"]


class TestFunctions:
    """`--annotate package.module:function`."""

    @pytest.fixture
    def own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
        name = f"own_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(
            "import math\nfrom torch import nn\nnumber = 3\n\ndef scale(x): return 2 * x\n\n"
            "class Own(nn.Linear):\n"
            "    def forward(self, x): return self.shift(self.turn(scale(x)))\n"
            "    @staticmethod\n    def shift(x): return x + 1\n"
            "    @classmethod\n    def turn(cls, x): return -x\n"
            "def never(): pass\n"
        )
        (tmp_path / f"{name}_user.py").write_text(f"from {name} import scale\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        return __import__(name)

    def test_functions_and_methods_have_ranges(self, log: Log, own: types.ModuleType) -> None:
        before = dict(vars(own)), dict(vars(own.Own))
        targets = [f"{own.__name__}:{name}" for name in ("scale", "Own.shift", "Own.turn", "never")]
        uncalled = run(step_of(own.Own(1, 1), torch.ones(1, 1, requires_grad=True)), functions=targets)
        assert [path.rpartition("/")[2] for path in log][3:6] == [
            "function:scale",
            "function:Own.turn",
            "function:Own.shift",
        ]
        assert uncalled == {f"{own.__name__}:never"}
        assert (dict(vars(own)), dict(vars(own.Own))) == before

    def test_module_that_imported_the_function_by_name_has_the_range(self, log: Log, own: types.ModuleType) -> None:
        user = __import__(f"{own.__name__}_user")
        step = step_of(own.Own(1, 1), torch.ones(1, 1, requires_grad=True))
        with annotated(step, functions=[f"{own.__name__}:scale"]):
            user.scale(1)
        assert log == ["function:scale"]
        user.scale(1)
        assert log == ["function:scale"]

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("{own}:scal", "did you mean `scale`"),
            ("{own}:number", "expected package.module:function"),
            ("{own}:math.sqrt", "expected package.module:function"),
            ("{own}", "expected package.module:function"),
            ("no_such_module:f", "cannot import `no_such_module`"),
            ("{own}:Own.shift.nothing", "has no"),
        ],
    )
    def test_invalid_target_says_why(self, own: types.ModuleType, target: str, said: str) -> None:
        with pytest.raises(StepscopeError) as raised:
            check_functions([target.format(own=own.__name__)], build_case({}).workload)
        assert said in str(raised.value)
        assert "--annotate" in raised.value.hint

    def test_compiled_code_supports_no_functions(self) -> None:
        with pytest.raises(StepscopeError, match="with `--compile`"):
            check_functions(["stepscope.nn.functional:rope"], build_case({"compile": True}).workload)
