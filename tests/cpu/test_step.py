"""A step of any model, in any mode, is the same sequence of phases and does what it claims."""

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepscope import cost
from stepscope.errors import StepscopeError
from stepscope.measure.flops import count_forward_flops
from stepscope.nn import AdamW
from stepscope.spec import SIZES, Factory, ModelShape, Scalar, Workload, build_case
from stepscope.step import Step, build
from stepscope.step.builtin import build_builtin
from stepscope.step.checkpointing import repeated_blocks
from stepscope.step.own import load_factory, source_digest

CPU = torch.device("cpu")
TINY: dict[str, Scalar] = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab": 50}
RUN: dict[str, Scalar] = {"batch": 2, "context": 16, "device": "cpu"}

FACTORY = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inside = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.out = nn.Linear(8, 50)

    def forward(self, ids):
        x = self.inside(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.out(x)

def build(batch, context, depth=2):
    model = Own(depth)
    ids = torch.randint(50, (batch, context))
    return model, ids, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

def as_dict(batch, context):
    model, ids, loss = build(batch, context)
    return model, {"ids": ids}, loss

def as_tuple(batch, context):
    model, ids, loss = build(batch, context)
    return model, (ids,), loss

class WithLoss(Own):
    def forward(self, ids):
        return nn.functional.cross_entropy(super().forward(ids).flatten(0, 1), ids.flatten())

def no_loss(batch, context):
    return WithLoss(2), torch.randint(50, (batch, context)), None

def two_things(batch, context): return nn.Linear(1, 1), torch.zeros(1)
def no_module(batch, context): return "model", torch.zeros(1), None
def bad_input(batch, context): return nn.Linear(1, 1), 3, None
def bad_loss(batch, context): return nn.Linear(1, 1), torch.zeros(1, 1), 7
def vector_loss(batch, context): return nn.Linear(1, 2), torch.zeros(1, 1), lambda output: output
def needs_more(batch, context, width): return None
def deaf(): return nn.Linear(1, 1), torch.zeros(1, 1), lambda output: output.sum()
def stack(batch, context):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return layers, torch.zeros(batch, context, 8), lambda output: output.sum()
def bare(batch, context): return nn.ReLU(), torch.zeros(batch, context), lambda output: output.sum()
def encoder(batch, context):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return layer, torch.zeros(batch, context, 16), lambda output: output.sum()
def flat(batch, context): return nn.Linear(1, 1), torch.zeros(1, 1), lambda output: output.sum()
def trained(batch, context, kind="SGD"):
    model, ids, loss = build(batch, context)
    return model, ids, loss, getattr(torch.optim, kind)(model.parameters(), lr=0.5)
def no_optimizer(batch, context): return *build(batch, context), "SGD"
def other_parameters(batch, context): return *build(batch, context), torch.optim.SGD(nn.Linear(1, 1).parameters())
not_callable = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return name


def make(**settings: Scalar | Mapping[str, Scalar]) -> Step:
    return build(build_case({**RUN, **settings}).workload, CPU)


def loss_of(step: Step) -> float:
    dict(step.phases)["forward"]()
    assert step._loss is not None
    return float(step._loss.detach())


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("inference", ["forward"]),
        ("forward", ["forward"]),
        ("forward-backward", ["forward", "backward"]),
        ("train", ["forward", "backward", "optimizer"]),
    ],
)
def test_modes_are_sequences_of_phases(mode: str, phases: list[str]) -> None:
    step = make(**TINY, mode=mode)
    assert [name for name, _ in step.phases] == phases
    before = [parameter.detach().clone() for parameter in step.module.parameters()]
    step.run()
    step.run()
    has_graph = step._loss is not None and step._loss.grad_fn is not None
    assert has_graph == (mode != "inference")
    has_grads = all(parameter.grad is not None for parameter in step.module.parameters())
    assert has_grads == (mode == "forward-backward")
    moved = any(not torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))
    assert moved == (mode == "train")


def test_gradients_do_not_accumulate_across_steps() -> None:
    step = make(**TINY, mode="forward-backward")
    step.run()
    first = [p.grad.clone() for p in step.module.parameters() if p.grad is not None]
    step.run()
    assert all(
        torch.equal(a, p.grad) for a, p in zip(first, step.module.parameters(), strict=True) if p.grad is not None
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-torch", "adamw-fused", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_lowers_the_loss(optimizer: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.step.builder.LEARNING_RATE", 1.0 if optimizer == "sgd" else 1e-2)
    step = make(**TINY, optimizer=optimizer, precision=precision)
    first = loss_of(step)
    assert first == pytest.approx(math.log(50), rel=0.2)
    for _ in range(8):
        step.run()
    assert loss_of(step) < first - 0.3


def test_fp16_scales_the_loss_and_skips_updates_with_infinite_gradients() -> None:
    step = make(**TINY, precision="fp16")
    assert step.loss_scale > 1
    assert make(**TINY, precision="bf16").loss_scale == 1
    scale, before = step.loss_scale, [p.detach().clone() for p in step.module.parameters()]
    dict(step.phases)["forward"]()
    dict(step.phases)["backward"]()
    next(step.module.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    dict(step.phases)["optimizer"]()
    assert step.loss_scale == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, step.module.parameters(), strict=True))


def test_same_seed_gives_the_same_run_and_another_does_not() -> None:
    assert loss_of(make(**TINY, seed=1)) == loss_of(make(**TINY, seed=1))
    assert loss_of(make(**TINY, seed=1)) != loss_of(make(**TINY, seed=2))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_sdpa_and_naive_are_the_same_model(kv_heads: int) -> None:
    naive, fused = (
        make(**TINY, num_kv_heads=kv_heads, attention=a, mode="forward-backward") for a in ("naive", "sdpa")
    )
    assert loss_of(naive) == pytest.approx(loss_of(fused), rel=1e-6)
    naive.run()
    fused.run()
    for a, b in zip(naive.module.parameters(), fused.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_checkpointing_changes_memory_not_gradients() -> None:
    plain, saved = (make(**TINY, checkpoint=c, mode="forward-backward") for c in ("none", "block"))
    stored: dict[str, int] = {}
    for name, step in (("plain", plain), ("saved", saved)):
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            dict(step.phases)["forward"]()
        stored[name] = sum(sizes)
        dict(step.phases)["backward"]()
    assert stored["saved"] < stored["plain"] / 2
    for a, b in zip(plain.module.parameters(), saved.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


@pytest.mark.parametrize("factory", ["build", "as_dict", "as_tuple", "no_loss"])
@pytest.mark.parametrize("checkpoint", ["none", "block"])
def test_custom_model_trains(own_module: str, factory: str, checkpoint: str) -> None:
    step = make(model=f"{own_module}:{factory}", checkpoint=checkpoint)
    step.run()
    assert math.isfinite(loss_of(step))
    assert step.parameters == 50 * 8 + 2 * (8 * 8 + 8) + 8 * 50 + 50


def test_set_reaches_the_factory(own_module: str) -> None:
    step = make(model=f"{own_module}:build", set={"depth": 3})
    assert len(list(repeated_blocks(step.module))) == 3


@pytest.mark.parametrize(
    ("factory", "settings", "said"),
    [
        ("two_things", {}, "a tuple of length 2"),
        ("no_module", {}, "a str as the module"),
        ("bad_input", {}, "an int as the input"),
        ("bad_loss", {}, "an int as the loss"),
        ("needs_more", {}, "requires `width`"),
        ("build", {"set": {"dept": 3}}, "no parameter `dept`"),
        ("build", {"attention": "sdpa"}, "no parameter `attention`"),
        ("deaf", {}, "no parameter `batch`"),
        ("biuld", {}, "did you mean `build`"),
        ("Own.forward.nothing", {}, "has no"),
        ("flat", {"checkpoint": "block"}, "no repeated blocks"),
        ("not_callable", {}, "not a function"),
        ("no_optimizer", {}, "a str as the optimizer"),
        ("other_parameters", {}, "none of the returned module's parameters"),
        ("trained", {"optimizer": "adamw-fused"}, "returns its own SGD"),
        ("trained", {"set": {"kind": "LBFGS"}}, "requires a closure"),
    ],
)
def test_invalid_factory_says_what_is_wrong(
    own_module: str, factory: str, settings: dict[str, Scalar], said: str
) -> None:
    with pytest.raises(StepscopeError) as raised:
        make(model=f"{own_module}:{factory}", **settings)
    assert said in str(raised.value)


def test_model_that_is_a_list_of_layers_is_checkpointed(own_module: str) -> None:
    step = make(model=f"{own_module}:stack", checkpoint="block")
    assert all(isinstance(layer.forward, partial) for layer in step.module.children())
    step.run()


def test_model_without_parameters_runs_forward(own_module: str) -> None:
    step = make(model=f"{own_module}:bare", mode="inference")
    step.run()
    assert step.parameters == 0


def test_tokens_are_counted_only_if_the_factory_takes_batch_and_context(own_module: str) -> None:
    assert make(model=f"{own_module}:build").has_tokens
    workload = build_case({"model": f"{own_module}:deaf", "device": "cpu"}).workload
    assert not build(workload, CPU).has_tokens


@pytest.mark.parametrize("mode", ["forward", "inference"])
def test_pytorch_layers_are_counted_in_every_mode(own_module: str, mode: str) -> None:
    """Without gradients they use one fused operator, which the counter does not support."""
    tokens, width, hidden = 2 * 16, 16, 32
    projections = 2 * tokens * (4 * width * width + 2 * width * hidden)
    attention = 2 * 2 * 2 * 16 * 16 * width
    step = make(model=f"{own_module}:encoder", mode=mode)
    assert count_forward_flops(step) == projections + attention


def test_digest_covers_every_user_file(tmp_path: Path) -> None:
    """In forked processes: what a process has imported stays imported, and torch is imported once."""
    (tmp_path / "factory.py").write_text("import layers\ndef build(batch, context): ...\n")
    code = """
import os
from pathlib import Path
from stepscope.spec import Factory
from stepscope.step.own import load_factory, source_digest

for content in ("x = 1", "x = 2", "x = 1"):
    Path("layers.py").write_text(content)
    if (child := os.fork()) == 0:
        load_factory(Factory(target="factory:build"))
        print(source_digest(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-P", "-B", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, changed, restored = done.stdout.splitlines()
    assert first == restored != changed


def test_non_scalar_loss_raises(own_module: str) -> None:
    with pytest.raises(StepscopeError, match="must be a scalar tensor"):
        make(model=f"{own_module}:vector_loss").run()


def test_optimizer_of_a_factory_updates_the_weights(own_module: str) -> None:
    step = make(model=f"{own_module}:trained")
    assert step.optimizer_name == "SGD"
    weight = step.module.get_parameter("out.bias")
    before = weight.detach().clone()
    forward, backward, update = (phase for _, phase in step.phases)
    forward()
    backward()
    assert weight.grad is not None
    gradient = weight.grad.clone()
    update()
    torch.testing.assert_close(weight.detach(), before - 0.5 * gradient)


def test_state_of_a_factory_optimizer_is_named_after_the_parameters(own_module: str) -> None:
    step = make(model=f"{own_module}:trained", set={"kind": "Adam"})
    step.run()
    names = {name for name, _ in step.optimizer_state()}
    assert {f"{name}.exp_avg" for name, _ in step.module.named_parameters()} <= names


@pytest.mark.parametrize(
    ("settings", "kind"),
    [(TINY, AdamW), ({"model": "{own}:build"}, torch.optim.AdamW), ({"hf": "gpt2"}, torch.optim.AdamW)],
)
def test_only_the_built_in_model_uses_the_textbook_adamw(
    own_module: str, settings: dict[str, Scalar], kind: type
) -> None:
    tiny: dict[str, Scalar] = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 9}
    given = {name: str(value).format(own=own_module) if name == "model" else value for name, value in settings.items()}
    step = make(**given, **({"set": tiny} if "hf" in settings else {}))
    assert type(step._optimizer) is kind
    assert step.optimizer_name == ("adamw" if kind is AdamW else "adamw-torch")


class TestFiles:
    """`--model path/to/file.py:build`."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        (tmp_path / "models").mkdir()
        (tmp_path / "models/my-model.py").write_text("import layers\ndef build(): return layers.NAME\n")
        (tmp_path / "models/layers.py").write_text("NAME = 'ours'\n")
        (tmp_path / "layers.py").write_text("NAME = 'of the current folder'\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield tmp_path
        self.forget(tmp_path)

    def forget(self, folder: Path) -> None:
        """What a process has imported stays imported; a case has its own process."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(folder)):
                del sys.modules[name]

    def call(self, target: str) -> object:
        return load_factory(Factory(target=target))()

    @pytest.mark.parametrize("place", [".", "./", "{}", "~"])
    def test_path_works_as_for_python(self, folder: Path, place: str) -> None:
        assert self.call(f"{place.format(folder)}/models/my-model.py:build") == "ours"

    def test_file_named_like_a_library_does_not_replace_it(self, folder: Path) -> None:
        (folder / "models/torch.py").write_text("def build(): return 'not torch'\n")
        assert self.call("models/torch.py:build") == "not torch"
        assert sys.modules["torch"] is torch

    def test_neighbors_of_one_file_are_not_those_of_another(self, folder: Path) -> None:
        (folder / "others").mkdir()
        (folder / "others/my-model.py").write_text((folder / "models/my-model.py").read_text())
        (folder / "others/layers.py").write_text("NAME = 'theirs'\n")
        built = [self.call(f"{one}/my-model.py:build") for one in ("models", "others", "models")]
        assert built == ["ours", "theirs", "ours"]

    def test_packages_next_to_an_earlier_model_stay_imported(self, folder: Path) -> None:
        packages = folder / ".venv/lib/python3/site-packages"
        packages.mkdir(parents=True)
        (packages / "installed_package.py").touch()
        (folder / "project.py").write_text("import installed_package\ndef build(): return installed_package\n")
        sys.path.append(str(packages))
        package = self.call("project.py:build")
        (folder.parent / "elsewhere").mkdir()
        (folder.parent / "elsewhere/other.py").write_text("def build(): return None\n")
        self.call(f"{folder.parent}/elsewhere/other.py:build")
        assert sys.modules["installed_package"] is package
        assert "project" not in sys.modules

    def test_digest_covers_the_file_and_its_neighbors(self, folder: Path) -> None:
        digests = []
        for edited in ("", "layers.py", "models/layers.py", "models/my-model.py"):
            if edited:
                (folder / edited).write_text((folder / edited).read_text() + f"# {edited}\n")
            self.forget(folder)
            self.call("models/my-model.py:build")
            digests.append(source_digest())
        unchanged, not_imported, *changed = digests
        assert unchanged == not_imported
        assert len({unchanged, *changed}) == 3

    @pytest.mark.parametrize(
        ("target", "said"),
        [
            ("models/my_model.py:build", "did you mean `models/my-model.py`"),
            ("nowhere/gone.py:build", "not found: `nowhere/gone.py`"),
            ("folder.py:build", "`folder.py` is a directory"),
            ("models:build", "--model models/FILE.py:build"),
            ("models/my-model.py:biuld", "did you mean `build`"),
            ("models/broken.py:build", "cannot import `no_such_package`, which"),
        ],
    )
    def test_missing_file_is_named(self, folder: Path, target: str, said: str) -> None:
        (folder / "folder.py").mkdir()
        (folder / "models/broken.py").write_text("import no_such_package\n")
        with pytest.raises(StepscopeError) as raised:
            self.call(target)
        assert said in str(raised.value)


def test_missing_module_is_named() -> None:
    with pytest.raises(StepscopeError, match="no_such_module"):
        make(model="no_such_module:build")


def count_built(shape: ModelShape) -> int:
    """On `meta` nothing is allocated: 3.4 billion parameters take no memory."""
    with torch.device("meta"):
        parts = build_builtin(Workload(model=shape), shape)
    return sum(parameter.numel() for parameter in parts.module.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_formula_matches_the_built_model_of_every_size(size: str) -> None:
    assert cost.parameters(SIZES[size]).total == count_built(SIZES[size])


@given(
    groups=st.integers(1, 4),
    heads_per_group=st.integers(1, 3),
    half_head=st.integers(1, 8),
    d_ff=st.integers(1, 70),
    num_layers=st.integers(1, 3),
    vocab=st.integers(1, 99),
    tied=st.booleans(),
)
def test_formula_matches_the_built_model_of_any_shape(
    groups: int, heads_per_group: int, half_head: int, d_ff: int, num_layers: int, vocab: int, tied: bool
) -> None:
    heads = groups * heads_per_group
    shape = ModelShape(
        d_model=heads * 2 * half_head,
        d_ff=d_ff,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=groups,
        vocab=vocab,
        tie_embeddings=tied,
    )
    assert cost.parameters(shape).total == count_built(shape)


def test_counting_agrees_with_the_formula_and_halves_causal_attention() -> None:
    fused, naive = make(**TINY, attention="sdpa"), make(**TINY)
    model = fused.workload.model
    assert isinstance(model, ModelShape)
    closed = cost.forward_flops(model, batch=2, context=16)
    assert count_forward_flops(fused) == closed
    # In unfused attention the mask is applied after the GEMMs: the full square is computed and counted.
    assert count_forward_flops(naive) == closed + 2 * 2 * 2 * 16 * 16 * 32


def test_python_workload_needs_no_flags() -> None:
    shape = ModelShape(d_model=16, d_ff=32, num_layers=1, num_heads=2, num_kv_heads=2, vocab=20)
    build(Workload(model=shape, context=8, device="cpu"), CPU).run()
