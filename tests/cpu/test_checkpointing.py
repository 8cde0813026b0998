"""Recomputing blocks in groups and nested: the same gradients, less memory, and an error if a group would compute
something else than the model.
"""

import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from stepscope import cost
from stepscope.annotate import Close
from stepscope.errors import StepscopeError
from stepscope.measure.memory.marks import Places
from stepscope.measure.memory.operators import read_tree
from stepscope.measure.memory.recorder import profiling, results_of
from stepscope.spec import Factory, Scalar, Workload, build_case
from stepscope.step import Step, build
from stepscope.step.annotation import annotated
from stepscope.step.checkpointing import checkpoint_blocks
from stepscope.step.own import Parts

CPU = torch.device("cpu")
RUN: dict[str, Scalar] = {"batch": 2, "context": 16, "device": "cpu", "mode": "forward-backward"}
TINY: dict[str, Scalar] = {"d_model": 32, "d_ff": 64, "num_layers": 5, "num_heads": 4, "vocab": 50} | RUN
GPT2 = {"n_layer": 4, "n_embd": 32, "n_head": 4, "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 60}
SETTINGS = ("block", "2", "3", "9", "nested:2", "nested:3")


def make(**settings: Any) -> Step:
    return build(build_case(TINY | settings).workload, CPU)


def make_hf(**settings: Any) -> Step:
    return build(build_case(RUN | settings).workload, CPU)


def gradients(step: Step) -> list[Tensor | None]:
    torch.manual_seed(1)  # for dropout
    step.run()
    return [parameter.grad for parameter in step.module.parameters()]


def require_same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_bitwise_equal(precision: str) -> None:
    plain = gradients(make(precision=precision))
    for setting in SETTINGS:
        require_same(gradients(make(precision=precision, checkpoint=setting)), plain)


@pytest.mark.parametrize(("config", "fields"), [("gpt2", GPT2), ("llama", LLAMA)])
def test_transformers_models_have_the_same_gradients(config: str, fields: dict[str, int]) -> None:
    """With gpt2's dropout: recomputation draws the same random numbers."""
    plain = gradients(make_hf(hf=config, set=fields))
    for setting in ("2", "3", "nested:2"):
        require_same(gradients(make_hf(hf=config, set=fields, checkpoint=setting)), plain)


@pytest.mark.parametrize("setting", ["2", "nested:2"])
def test_groups_compile_into_one_graph(setting: str) -> None:
    """Neither they nor their checks break it, and the second step does not recompile."""
    expected = gradients(make(num_layers=3))
    step = make(num_layers=3, checkpoint=setting)
    counter = CompileCounter()
    step.run_module = torch.compile(step.module, backend=counter, dynamic=False, fullgraph=True)
    for _ in range(2):
        require_same(gradients(step), expected)
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_step_with_groups_trains() -> None:
    step = make(compile=True, checkpoint="2", num_layers=2, mode="train")
    losses = []
    for _ in range(3):
        step.run()
        assert step.loss is not None
        losses.append(step.loss.item())
    assert losses[2] < losses[0]


# --- Memory ---------------------------------------------------------------------------------------------------------


def measure_peak(step: Step) -> int:
    """The peak memory of the step's tensors, including parameters and buffers. Temporary memory of an operator is not
    counted.
    """
    now = sum(one.untyped_storage().nbytes() for one in (*step.module.parameters(), *step.module.buffers()))
    with profiling() as profiler:
        step.run()
    watched = read_tree(results_of(profiler), CPU, Places(), {})
    inside = {(fact.operator, fact.address) for fact in watched.facts if fact.category == "workspaces"}
    living: dict[int, int] = {}
    peak = now
    for one in watched.happenings:
        if one.size > 0 and (one.operator, one.address) not in inside:
            living[one.address] = one.size
            now += one.size
        elif one.size < 0:
            now -= living.pop(one.address, 0)
        peak = max(peak, now)
    return peak


# Weights dominate; tokens dominate; the vocabulary dominates both.
HEAVY: dict[str, Scalar] = {"d_model": 64, "d_ff": 256, "num_layers": 6, "batch": 4, "context": 64}
LONG: dict[str, Scalar] = {"d_model": 32, "d_ff": 32, "num_layers": 9, "num_heads": 2, "vocab": 20, "batch": 64}
LONG |= {"context": 8}
WORDY: dict[str, Scalar] = {"num_layers": 3, "vocab": 4000, "batch": 4, "context": 64}


@pytest.mark.parametrize(
    ("shape", "above"),
    [(HEAVY, 1.14), (LONG, 1.17), (WORDY, 1.01), (WORDY | {"precision": "bf16"}, 1.01)],
    ids=["heavy", "long", "wordy", "wordy-bf16"],
)
def test_predicted_peak_holds(shape: dict[str, Scalar], above: float) -> None:
    """A lower bound, because of what an operation needs while it runs; the loss's peak has little of that."""
    for setting in ("none", "block", "2", "3", "nested:2", "nested:3"):
        step = make(**shape, checkpoint=setting)
        predicted = cost.step_peak(step.workload).bytes
        assert predicted <= measure_peak(step) <= above * predicted


def test_setting_named_best_is_within_two_per_cent_of_the_best() -> None:
    settings = ("none", "block", "2", "3", "4", "nested:2", "nested:3", "nested:4")
    peaks = {setting: measure_peak(make(**LONG, checkpoint=setting)) for setting in settings}
    assert peaks[cost.best_checkpoint(make(**LONG).workload).checkpoint] <= 1.02 * min(peaks.values())
    assert peaks["nested:2"] < peaks["block"] < peaks["2"] < peaks["none"] / 3


# --- Ranges ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces the profiler: paths of ranges as they open."""
    stack: list[str] = []
    paths: list[str] = []

    def begin(name: str) -> Close:
        stack.append(name)
        paths.append("/".join(stack))
        return lambda: (stack.pop(), None)[1]

    monkeypatch.setattr(sys.modules["stepscope.annotate"], "_profiler_opener", lambda: begin)
    yield paths
    assert stack == []


def run_annotated(step: Step) -> None:
    with annotated(step):
        step.run()


def test_block_in_a_group_has_its_own_range(opened: list[str]) -> None:
    run_annotated(make(checkpoint="2", num_layers=4))
    for phase in ("forward", "backward"):
        for block in range(4):
            work = [path for path in opened if f"phase:{phase}" in path and path.endswith(f"blocks.{block}.ffn")]
            assert len(work) == 1
            assert work[0].endswith(f"/module:blocks.{block}/module:blocks.{block}.ffn")


@pytest.mark.parametrize(("setting", "times"), [("block", 4), ("2", 4), ("4", 4), ("nested:2", 6), ("nested:4", 7)])
def test_groups_recompute_once_and_nested_ones_twice(opened: list[str], setting: str, times: int) -> None:
    """The last block of a nested group once: the group's own recomputation ends when that block's input is ready."""
    run_annotated(make(checkpoint=setting, num_layers=4))
    assert sum("phase:backward" in path and path.endswith("part:scores") for path in opened) == times


# --- What a group does not support --------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: object = 1.0, **_: object) -> Tensor:
        return torch.tanh(self.inner(x)) * (scale if isinstance(scale, float | Tensor) else 1.0)


class Model(nn.Module):
    """Calls its blocks as `loop` defines."""

    def __init__(self, loop: Callable[[list[nn.Module], Tensor], Tensor], block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self._loop = loop

    def forward(self, x: Tensor) -> Tensor:
        return self._loop(list(self.blocks), x)


def in_turn(*scales: object, **named: object) -> Callable[[list[nn.Module], Tensor], Tensor]:
    def loop(blocks: list[nn.Module], x: Tensor) -> Tensor:
        for place, block in enumerate(blocks):
            x = block(x, scales[place % len(scales)], **named)
        return x

    return loop


def residual_outside(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = x + block(x)
    return x


def by_name(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x=x)
    return x


def leaves_the_last_out(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks[:-1]:
        x = block(x)
    return x


def backwards(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in reversed(blocks):
        x = block(x)
    return x


class Pair(Block):
    def forward(self, x: Tensor, scale: object = 1.0, **_: object) -> Any:
        return super().forward(x, scale), None


def step_of(module: nn.Module, every: int, *, nested: bool = False) -> Step:
    checkpoint_blocks(module, every=every, nested=nested)
    x = torch.linspace(-1, 1, 8).view(2, 4)

    def loss(output: object, _batch: object) -> Tensor:
        assert isinstance(output, Tensor)
        return output.sum()

    parts = Parts(module=module, inputs=(x,), call=lambda run, batch: run(batch), loss=loss)
    return Step(Workload(model=Factory(target="own:model"), mode="forward-backward", device="cpu"), parts, CPU)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Model(residual_outside), "result of the previous block directly to `blocks.1`"),
        (Model(by_name), "`blocks.0` does not get its input as the first positional argument"),
        (Model(in_turn(1.0, 2.0)), "`blocks.1` gets different arguments than `blocks.0`"),
        (Model(in_turn(torch.ones(4), torch.zeros(4))), "different arguments"),
        (Model(in_turn(object(), object())), "different arguments"),
        (Model(leaves_the_last_out), "did not call `blocks.3` after `blocks.2`"),
        (Model(backwards), "the model called `blocks.3`; expected `blocks.2`"),
        (
            Model(lambda blocks, x: in_turn(1.0)(blocks, x)[0] * 0 + x, Pair),
            "returns a tuple instead of a single tensor",
        ),
    ],
)
def test_groups_that_would_compute_something_else_raise(module: nn.Module, said: str) -> None:
    with pytest.raises(StepscopeError) as raised:
        step_of(module, 2).run()
    assert said in str(raised.value)
    assert raised.value.hint == "--checkpoint 1"


def test_hooks_raise_because_they_would_run_twice() -> None:
    module = Model(in_turn(1.0))
    module.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(StepscopeError, match=r"`blocks\.1` has forward hooks"):
        checkpoint_blocks(module, every=2)
    assert checkpoint_blocks(module) == 4


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Sequential(*(Block() for _ in range(5))),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Block() for _ in range(3)))),
        lambda: Model(in_turn(0.5)),
        lambda: Model(lambda blocks, x: in_turn(*torch.ones(4, 4))(blocks, x)),  # equal, each cut anew
        lambda: Model(in_turn(None, extra={"table": [torch.ones(2), "word"]})),
    ],
)
def test_blocks_that_run_in_order_are_grouped(module: Callable[[], nn.Module], nested: bool) -> None:
    torch.manual_seed(0)
    plain = module()
    grouped = module()
    grouped.load_state_dict(plain.state_dict())
    x = torch.linspace(-1, 1, 8).view(2, 4)
    plain(x).sum().backward()
    require_same(gradients(step_of(grouped, 2, nested=nested)), [parameter.grad for parameter in plain.parameters()])


def test_failed_step_leaves_no_group_unfinished() -> None:
    broken = [True]

    def fail_once(blocks: list[nn.Module], x: Tensor) -> Tensor:
        x = blocks[0](x)
        if broken.pop() if broken else False:
            raise OSError("broken")
        for block in blocks[1:]:
            x = block(x)
        return x

    step = step_of(Model(fail_once), 2)
    with pytest.raises(OSError, match="broken"):
        step.run()
    step.run()


def test_group_holds_nothing_after_a_pass() -> None:
    module = Model(in_turn(1.0))
    checkpoint_blocks(module, every=2)
    result = module(torch.ones(1, 4))
    seen = weakref.ref(result)
    del result
    assert seen() is None


def test_groups_end_with_their_list() -> None:
    module = nn.ModuleDict({name: nn.Sequential(*(Block() for _ in range(3))) for name in ("encoder", "decoder")})
    assert checkpoint_blocks(module, every=2) == 4
