"""`explain_oom` with a stand-in for CUDA: what it records, what it leaves to the script, and what it removes again."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepscope
from stepscope.errors import StepscopeError
from stepscope.explain.memory import MemoryProfile, make_memory_profile
from stepscope.explain.memory.out_of_memory import MemoryFailure, find_out_of_memory
from stepscope.explain.rules.out_of_memory import find_fixes
from stepscope.explain.story.run import tell
from stepscope.explain.story.sources import Materials
from stepscope.jobs.oom import explain_snapshot
from stepscope.loop import oom
from stepscope.loop.oom import OomWatch, Place
from stepscope.loop.tensor_owners import clean_name, find_owners
from stepscope.recording import store
from stepscope.recording.memory import reader
from tests.cpu.fake_cuda import GIB, FakeCuda, cuda

__all__ = ["cuda"]

VOCABULARY, WIDTH, LAYERS = 5000, 64, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + changed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.fail_in: int | None = None
        self.on_failure: Callable[[], object] = bool

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.fail_in:
                self.on_failure()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.fixture(autouse=True)
def _no_children(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written in this process, by the tests that look at them."""
    monkeypatch.setattr(OomWatch, "_explain", lambda *_: None)


@pytest.fixture
def watch(cuda: FakeCuda, tmp_path: Path) -> Iterator[OomWatch]:
    with stepscope.explain_oom(tmp_path / "run") as installed:
        yield installed


def run_out(cuda: FakeCuda, watch: OomWatch, *, asked: int = 2 * GIB) -> Path:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate a lot"):
        cuda.run_out(asked)
    assert watch.failures == []
    return watch.snapshots[-1]


def read(path: Path) -> MemoryProfile:
    return make_memory_profile(reader.read(path))


def explain(path: Path) -> MemoryFailure:
    found = find_out_of_memory(read(path))
    assert found is not None
    return found


# --- The observer -----------------------------------------------------------------------------------------------------


def test_the_snapshot_says_what_was_asked_for_and_where(cuda: FakeCuda, watch: OomWatch) -> None:
    watch.locate = lambda: Place(step=7, phase="forward", module="blocks.2")
    line = sys._getframe().f_lineno + 1
    facts = explain(run_out(cuda, watch)).facts
    assert (facts.asked_bytes, facts.free_bytes, facts.total_bytes) == (2 * GIB, GIB, 8 * GIB)
    assert facts.limit_bytes is None
    assert (facts.step, facts.phase, facts.module) == (7, "forward", "blocks.2")
    # The innermost line of the user is the fake's own.
    assert facts.line.startswith("tests/cpu/fake_cuda.py:")
    assert f"test_oom.py:{line} test_the_snapshot" in facts.stack
    assert "stepscope/loop" not in facts.stack
    assert facts.device_name == "Fake GPU"


def test_a_limit_of_the_process_differs_from_the_device(cuda: FakeCuda, watch: OomWatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        cuda.run_out(2 * GIB, limit=3 * GIB)
    assert explain(watch.snapshots[0]).facts.limit_bytes == 3 * GIB


def test_a_failure_of_ours_does_not_replace_the_error(
    cuda: FakeCuda, watch: OomWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(oom, "tell", told.append)

    def fail() -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", fail)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.run_out(GIB)
    assert watch.failures == ["OSError: no space left"]
    assert len(told) == 1
    assert "no space left" in told[0]


def test_errors_that_are_caught_again_and_again_leave_a_few_snapshots(cuda: FakeCuda, watch: OomWatch) -> None:
    for _ in range(8):
        run_out(cuda, watch)
    assert [path.name for path in watch.snapshots] == ["oom.pickle", "oom-2.pickle", "oom-3.pickle"]


def test_ranks_write_to_files_of_their_own(cuda: FakeCuda, watch: OomWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = run_out(cuda, watch)
    assert path.name == "oom-rank-3.pickle"
    assert explain(path).facts.world_size == 4


def test_uninstalling_leaves_nothing_behind(cuda: FakeCuda, watch: OomWatch) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    hooks = len(_global_optimizer_post_hooks)
    assert (watch.is_active, cuda.is_recording) == (True, True)
    watch.uninstall()
    assert (watch.is_active, cuda.is_recording) == (False, False)
    assert len(_global_optimizer_post_hooks) == hooks - 1
    with pytest.raises(torch.OutOfMemoryError):
        cuda.run_out(GIB)
    assert watch.snapshots == []


def test_a_second_call_returns_the_same_watch_and_one_observer_is_enough(
    cuda: FakeCuda, watch: OomWatch, tmp_path: Path
) -> None:
    assert stepscope.explain_oom() is watch
    assert watch.folder == tmp_path / "run"
    assert stepscope.explain_oom(tmp_path / "there") is watch
    assert watch.folder == tmp_path / "there"
    watch.uninstall()
    with stepscope.explain_oom() as other:
        assert other is not watch
        assert len(cuda.observers) == 1


def test_without_cuda_nothing_happens_and_the_watch_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with stepscope.explain_oom() as watch:
        assert watch.reason == "CUDA is not available"
        assert not watch.is_active
    assert capsys.readouterr() == ("", "")


def test_stacks_are_recorded_in_few_steps(cuda: FakeCuda, watch: OomWatch) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    recorded = []
    for _ in range(120):
        recorded.append(cuda.is_recording)
        optimizer.step()
    assert [step for step, is_on in enumerate(recorded) if is_on] == [0, 1, 2, 50, 100]
    assert cuda.history[0] == {"context": "state", "stacks": "python", "max_entries": 50_000}


def test_the_history_of_the_script_is_left_alone(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.is_recording = True
    with stepscope.explain_oom(tmp_path):
        torch.optim.SGD(nn.Linear(2, 2).parameters()).step()
    assert cuda.history == []


def test_an_allocator_without_observers_is_a_reason(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with stepscope.explain_oom() as watch:
        assert "cudaMallocAsync" in watch.reason
    assert cuda.observers == []


# --- Who owns the memory ----------------------------------------------------------------------------------------------


def test_categories_add_up_to_the_allocated_memory(cuda: FakeCuda, watch: OomWatch) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (4, 32))
    model(tokens).backward()
    optimizer.step()
    loss = model(tokens)
    found = explain(run_out(cuda, watch))
    assert sum(found.categories.values()) == found.held_bytes
    parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    assert found.categories["parameters"] == parameters
    assert found.categories["gradients"] == parameters
    assert found.categories["optimizer state"] == pytest.approx(2 * parameters, rel=0.01)
    logits = 4 * 32 * VOCABULARY * 4
    assert found.categories["activations"] > logits
    assert loss.grad_fn is not None


def test_activations_belong_to_the_modules_that_saved_them(cuda: FakeCuda) -> None:
    model = Model()
    loss = model(torch.randint(0, VOCABULARY, (2, 8)))
    owners = find_owners(CPU, [], mark=0)
    modules = {fact.name: fact.module for fact in owners.facts if fact.category == "activations"}
    assert {fact.module for fact in owners.facts if fact.name == "GeluBackward0.self"} == {
        f"blocks.{layer}" for layer in range(LAYERS)
    }
    assert modules["LogSoftmaxBackward0.result"] == "(loss)"
    assert modules["MmBackward0.self"] == "head"
    assert loss.grad_fn is not None


def test_gradients_and_states_that_do_not_exist_yet_are_counted() -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = find_owners(CPU, [], mark=0)
    assert before.missing_gradient_bytes >= 40_000
    assert before.missing_state_bytes >= 3 * 40_000
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    sgd.step()
    after = find_owners(CPU, [], mark=0)
    assert before.missing_state_bytes - after.missing_state_bytes == 3 * 40_000
    assert before.missing_gradient_bytes - after.missing_gradient_bytes == 40_000


def test_losses_that_keep_their_graphs_are_found() -> None:
    model = Model()
    tokens = torch.randint(0, VOCABULARY, (2, 8))
    losses = [model(tokens) for _ in range(4)]
    found = find_owners(CPU, [], mark=0)
    assert found.num_old_graphs == 3
    assert found.old_graph_bytes > 3 * 2 * 8 * VOCABULARY * 4
    for loss in losses:
        loss.backward()
    assert find_owners(CPU, [], mark=0).old_graph_bytes == 0


def test_copies_of_autocast_are_not_activations() -> None:
    model = nn.Linear(64, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = torch.nn.functional.gelu(model(torch.ones(2, 64, requires_grad=True)))
    categories = {fact.category: fact.name for fact in find_owners(CPU, [], mark=0).facts if fact.dtype == "bfloat16"}
    assert categories["autocast copies"] == "weight"
    assert inner.grad_fn is not None


def test_variables_of_the_user_have_their_names() -> None:
    batch = torch.ones(7, 13)
    facts = find_owners(CPU, [sys._getframe()], mark=0).facts
    mine = next(fact for fact in facts if fact.address == batch.untyped_storage().data_ptr())
    assert mine.name == "batch in test_variables_of_the_user_have_their_names"
    assert mine.category == "temporaries"


def test_what_a_program_has_frozen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(100, 100, bias=False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # the stand-in hides that there is anything
    gc.freeze()
    owners = find_owners(CPU, [], mark=0)
    gc.freeze()  # what later tests need not scan
    assert model.weight.untyped_storage().data_ptr() in {fact.address for fact in owners.facts}


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("blocks.0.up.weight", "blocks.0.up.weight"),
        ("module.blocks.0.up.weight", "blocks.0.up.weight"),
        ("_orig_mod.module.blocks.0.weight", "blocks.0.weight"),
        ("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.up.weight", "blocks.0.up.weight"),
        ("module", "module"),
    ],
)
def test_wrappers_are_not_part_of_a_name(name: str, clean: str) -> None:
    assert clean_name(name) == clean


# --- The page ---------------------------------------------------------------------------------------------------------


def test_a_forward_pass_that_was_cut_short_is_extrapolated(cuda: FakeCuda, watch: OomWatch) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.fail_in, model.on_failure = 1, lambda: cuda.run_out(GIB)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randint(0, VOCABULARY, (4, 32)))
    found = explain(watch.snapshots[0])
    assert found.phase == "forward"
    assert found.num_layers == LAYERS
    assert found.layers_reached == 1.5
    assert found.is_growing
    assert found.facts.missing_state_bytes == 2 * found.categories["parameters"]
    assert optimizer.state == {}


def test_the_page_and_the_recording_are_written_next_to_the_snapshot(
    cuda: FakeCuda, watch: OomWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/lab/train.py"])
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, VOCABULARY, (64, 32))
    loss = model(tokens)
    cuda.total, cuda.free = cuda.allocated() + GIB // 1024, GIB // 1024
    path = run_out(cuda, watch, asked=GIB // 64)
    page = explain_snapshot(path)
    assert page == watch.folder / "oom.html"
    text = page.read_text()
    assert "train.py: out of memory" in text
    assert "asked for" in text
    assert "micro-batches" in text
    assert not path.exists()
    recording = store.load(watch.folder / "oom")
    assert recording.manifest.memory is not None
    assert recording.manifest.memory.oom is not None
    assert recording.saved.height
    again = stepscope.report(watch.folder / "oom").report
    assert again.sentence == tell(Materials(name="oom.pickle", memory=make_memory_profile(recording))).sentence
    assert again.sentence.startswith("CUDA ran out of memory at tests/cpu/fake_cuda.py:")
    assert loss.grad_fn is not None
    assert not optimizer.state


SCRIPT = """
import os, pytest, torch, stepscope
from tests.cpu.fake_cuda import install
cuda = install(pytest.MonkeyPatch())
stepscope.explain_oom("run")
weights = torch.ones(1000)
{ending}
"""
ENDINGS = {
    "uncaught": ("cuda.run_out(1 << 30)", 1),
    "own exit code": ("try:\n    cuda.run_out(1 << 30)\nexcept torch.OutOfMemoryError:\n    raise SystemExit(7)", 7),
    "killed": ("try:\n    cuda.run_out(1 << 30)\nexcept torch.OutOfMemoryError:\n    os._exit(9)", 9),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_keeps_its_exit_code_and_the_page_outlives_it(ending: str, tmp_path: Path) -> None:
    code, expected = ENDINGS[ending]
    (tmp_path / "train.py").write_text(SCRIPT.format(ending=code))
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "train.py"]
    environment = {**os.environ, "PYTHONPATH": path}
    # Without a pipe for its errors, nothing here waits for the child.
    with (tmp_path / "errors").open("wb") as errors:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stderr=errors, check=False, timeout=300)
    assert done.returncode == expected
    page = tmp_path / "run/oom.html"
    waited_until = time.monotonic() + 120
    while "what would fit" not in (tmp_path / "errors").read_text() and time.monotonic() < waited_until:
        time.sleep(0.1)
    said = (tmp_path / "errors").read_text()
    assert "what would fit: run/oom.html" in said
    assert ("OutOfMemoryError: CUDA out of memory. Tried to allocate a lot." in said) == (ending == "uncaught")
    assert "train.py: out of memory" in page.read_text()
    assert (tmp_path / "run/oom/manifest.json").is_file()


def test_fixes_that_are_enough_come_first(cuda: FakeCuda, watch: OomWatch) -> None:
    model = Model()
    tokens = torch.randint(0, VOCABULARY, (64, 32))
    loss = model(tokens)
    cuda.total, cuda.free = cuda.allocated(), 0
    findings = find_fixes(explain(run_out(cuda, watch, asked=1 << 20)))
    enough = [one.is_enough for one in findings]
    assert enough == sorted(enough, key=lambda one: not one)
    assert findings[0].code == "SS105"  # the logits are most of it
    assert {"SS106", "SS107"} <= {one.code for one in findings}
    assert loss.grad_fn is not None


def test_a_file_that_is_not_a_snapshot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    path.write_bytes(b"nonsense")
    with pytest.raises(StepscopeError):
        explain_snapshot(path)
