"""Counting under Nsight Compute, with a fake `ncu`: its arguments, what is saved, resumed and rejected."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.trace.counters import CountedCase
from stepscope.jobs.experiments import counter_sweep as counters
from stepscope.jobs.experiments.counter_sweep import Counters, name_cases
from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.recorders.nsight_compute import choose_metrics
from stepscope.measure.targets import TargetFailed
from stepscope.measure.targets.ncu import NcuCounted
from stepscope.recording import store
from stepscope.recording.readers import ncu
from stepscope.recording.readers.counter_metrics import FEW, FULL
from stepscope.spec import Case, Grid, grid_from_flags
from tests.unit.ncu_files import COUNTED, StandIn
from tests.unit.rows import ENVIRONMENT

ANSWER = NcuCounted(
    environment=ENVIRONMENT,
    parameters=1000,
    optimizer="adamw",
    forward_flops={"GEMM": 10**9, "attention": 10**6},
)
REFUSED = TargetFailed(message="out of memory", detail="tried to allocate 1 TiB")


def encode(answer: NcuCounted | TargetFailed) -> str:
    return msgspec.json.encode(answer).decode()


class Bench:
    """A machine with a GPU and an `ncu`, as far as the job can see."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out = folder / "out"
        self.stages: list[str] = []
        self.done: list[str] = []
        self.environment = ENVIRONMENT
        self.source: str | None = None
        (folder / "bin").mkdir()
        (folder / "tmp").mkdir()
        monkeypatch.setenv("PATH", str(folder / "bin") + os.pathsep + "/usr/bin:/bin")
        monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
        monkeypatch.setattr(counters, "plan_cases", self._plan)
        self.ncu = StandIn(folder / "bin")
        self.ncu.set(answer=encode(ANSWER))

    def _plan(self, cases: Sequence[Case], *_: object) -> list[Planned]:
        return [Planned(case=case, environment=self.environment, source=self.source) for case in cases]

    def count(self, flags: dict[str, str], *, force: bool = False, **more: object) -> list[CountedCase]:
        given = {"command": "stepscope profile"} | more
        job = Counters(folder=self.out, force=force, **given)  # type: ignore[arg-type]
        return job.run(grid_from_flags({"device": "cuda", **flags}), self._hear, self.done.append)

    def _hear(self, stage: str) -> None:
        self.stages.append(stage)
        self.ncu.hear(stage)

    def left(self) -> set[str]:
        """The content of the directory, including hidden files."""
        return {path.name for path in self.out.iterdir()} if self.out.exists() else set()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


ONE = {"size": "nano", "context": "64"}
GRID = {"size": "nano", "context": "64,128"}


def test_one_case_is_a_recording_in_the_named_directory(bench: Bench) -> None:
    (counted,) = bench.count(ONE)
    kept = store.load(bench.out)
    assert kept.kernels.height == 49
    assert kept.manifest.case == counted.case
    assert kept.manifest.case.workload.mode == "inference"
    assert (kept.manifest.parameters, kept.manifest.forward_flops) == (1000, ANSWER.forward_flops)
    assert (kept.manifest.source, kept.manifest.versions["torch"]) == ("nsight compute", ENVIRONMENT.torch)
    assert ncu.read(bench.out / "raw.csv.gz").kernels.equals(kept.kernels)
    assert bench.done == [f"[1/1] out: 49 kernels in {bench.done[0].split()[-2]} s"]
    assert list((bench.out.parent / "tmp").iterdir()) == []


def test_ncu_collects_few_metrics_between_start_and_stop(bench: Bench) -> None:
    bench.count(ONE, passes=2)
    ((given, program),) = bench.ncu.calls()
    csv = given.pop("--log-file")
    assert given == {
        "--clock-control": "none",
        "--cache-control": "none",
        "--profile-from-start": "off",
        "--csv": "",
        "--page": "raw",
        "--metrics": ",".join(FEW),
    }
    assert program[0] == sys.executable
    assert Path(csv).parent == Path(program[-1]).parent
    manifest = store.load(bench.out).manifest
    assert manifest.case is not None
    assert manifest.case.timing.steps == 2


def test_metrics_are_our_lists_or_ncu_names() -> None:
    assert choose_metrics("few") == FEW
    assert choose_metrics("full") == FULL
    assert choose_metrics("few,sm__cycles_elapsed.max,few") == (*FEW, "sm__cycles_elapsed.max")
    with pytest.raises(StepscopeError, match="unknown Nsight Compute metric: `everything`"):
        choose_metrics("everything")


def test_every_case_of_a_grid_has_its_own_process_and_recording(bench: Bench) -> None:
    cases = bench.count(GRID | {"d_model": "64,128"})
    assert bench.left() == {f"context-{L}_d_model-{d}" for L in (64, 128) for d in (64, 128)}
    assert [case.name for case in cases] == [
        "context-64_d_model-64",
        "context-64_d_model-128",
        "context-128_d_model-64",
        "context-128_d_model-128",
    ]
    assert len(bench.ncu.calls()) == 4
    for case in cases:
        assert store.load(bench.out / case.name).manifest.case == case.case


def test_grid_resumes_where_it_stopped(bench: Bench) -> None:
    bench.count(GRID)
    again = bench.count(GRID | {"context": "64,128,256"})
    assert len(bench.ncu.calls()) == 3
    assert all(case.recording is not None for case in again)
    assert bench.done[2:4] == [
        f"[{n}/3] context-{L}: already counted; use --force to count it again" for n, L in ((1, 64), (2, 128))
    ]
    bench.count(GRID, force=True)
    assert len(bench.ncu.calls()) == 5


@pytest.mark.parametrize("change", ["settings", "versions", "source", "metrics", "passes"])
def test_different_recording_is_neither_reused_nor_replaced(bench: Bench, change: str) -> None:
    bench.count(GRID)
    flags: dict[str, str] = GRID
    more: dict[str, Any] = {}
    match change:
        case "settings":
            flags = GRID | {"batch": "2"}
        case "versions":
            bench.environment = msgspec.structs.replace(ENVIRONMENT, torch="2.14.0")
        case "source":
            bench.source = "another digest"
        case "metrics":
            more = {"metrics": "full"}
        case "passes":
            more = {"passes": 2}
    with pytest.raises(StepscopeError, match="context-64` already holds a different recording") as raised:
        bench.count(flags, **more)
    assert raised.value.hint.startswith("--force")
    assert len(bench.ncu.calls()) == 2
    bench.count(flags, force=True, **more)
    assert len(bench.ncu.calls()) == 4


def test_one_case_replaces_only_what_the_same_command_counted(bench: Bench) -> None:
    bench.count(ONE)
    with pytest.raises(StepscopeError, match="out` already exists"):
        bench.count(ONE, command="stepscope profile --stacks")
    assert len(bench.ncu.calls()) == 1
    with pytest.raises(StepscopeError, match="cannot hold the 2 recordings"):
        bench.count(GRID)
    bench.count(ONE, command="stepscope profile --stacks", force=True)
    assert len(bench.ncu.calls()) == 2
    bench.count(ONE, command="stepscope profile --stacks")
    assert len(bench.ncu.calls()) == 3


def test_foreign_directory_raises_before_anything_runs(bench: Bench) -> None:
    (bench.out / "context-128").mkdir(parents=True)
    (bench.out / "context-128" / "notes.txt").touch()
    for force in (False, True):
        with pytest.raises(StepscopeError, match=r"context-128` exists"):
            bench.count(GRID, force=force)
    assert bench.ncu.calls() == []


def test_failed_case_costs_the_others_nothing_and_leaves_nothing(bench: Bench) -> None:
    bench.ncu.set(at_context={"64": {"answer": encode(REFUSED), "code": 1, "no_kernels": True}})
    failed, fine = bench.count(GRID)
    assert failed.recording is None
    assert failed.reason == "out of memory tried to allocate 1 TiB"
    assert fine.recording is not None
    assert bench.left() == {"context-128"}
    assert bench.done[0] == "[1/2] context-64: out of memory tried to allocate 1 TiB"


def test_first_reason_is_the_error_when_every_case_fails(bench: Bench) -> None:
    bench.ncu.set(answer=encode(REFUSED), code=1, no_kernels=True)
    with pytest.raises(StepscopeError, match="out of memory"):
        bench.count(GRID)
    assert bench.left() == set()


def test_full_disk_ends_the_sweep_and_keeps_finished_cases(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_one(recording: store.Recording, folder: Path, **more: object) -> None:
        if folder.name == "context-128":
            raise StepscopeError(f"cannot write to `{folder}`: No space left on device")
        saved(recording, folder, **more)  # type: ignore[arg-type]

    saved = store.save
    monkeypatch.setattr(store, "save", save_one)
    with pytest.raises(StepscopeError, match="No space left on device"):
        bench.count(GRID | {"context": "64,128,256"})
    assert bench.left() == {"context-64"}
    assert len(bench.ncu.calls()) == 2


PERMISSION = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


@pytest.mark.parametrize("where", ["logs", "says"])
def test_missing_permission_raises_at_the_first_case(bench: Bench, where: str) -> None:
    bench.ncu.set(**{where: PERMISSION + " on the target device 0.\n"}, no_kernels=True, code=1)
    with pytest.raises(StepscopeError, match="not permitted on this machine: `ERR_NVGPUCTRPERM`") as raised:
        bench.count(GRID)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in raised.value.detail
    assert raised.value.hint == "stepscope doctor"
    assert len(bench.ncu.calls()) == 1
    assert not bench.out.exists()


@pytest.mark.parametrize(
    ("settings", "message", "detail"),
    [
        (
            {"answer": None, "code": 3, "writes_nothing": True},
            "ncu exited with status 3, before the case ran",
            "nothing",
        ),
        ({"answer": None, "says": "oh"}, "ncu exited with status 0, before the case ran", "oh"),
        ({"writes_nothing": True}, "ncu wrote no output", "printed nothing"),
        (
            {"code": 9, "no_kernels": True, "logs": "==ERROR== Failed to find metric x__y.sum\n"},
            "ncu exited with status 9",
            "==ERROR== Failed to find metric x__y.sum",
        ),
        ({"no_kernels": True}, "not an Nsight Compute CSV", "expected a header"),
    ],
)
def test_failure_of_ncu_has_its_own_message(
    bench: Bench, settings: dict[str, object], message: str, detail: str
) -> None:
    bench.ncu.set(**settings)
    with pytest.raises(StepscopeError) as raised:
        bench.count(ONE)
    assert raised.value.message.startswith(message)
    assert detail in raised.value.detail
    assert not bench.out.exists()


def test_missing_ncu_raises_before_anything_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StepscopeError, match="`ncu` is not on the PATH"):
        bench.count(ONE)
    assert not bench.out.exists()


def test_without_a_gpu_ncu_is_not_started(bench: Bench) -> None:
    bench.environment = msgspec.structs.replace(ENVIRONMENT, device="cpu")
    with pytest.raises(StepscopeError, match="hardware counters require a GPU; device `cuda` is the CPU"):
        bench.count(ONE)
    assert bench.ncu.calls() == []


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ({"size": "medium"}, "too many layers for hardware counters: `24`", "--num-layers 2"),
        ({"num_layers": "2,13"}, "too many layers for hardware counters: `13`", "--num-layers 2"),
        ({"mode": "train"}, "`--mode train` is not supported with `--counters`", "stepscope profile --mode train"),
        ({"mode": "forward-backward"}, "`--mode forward-backward` is not supported", "stepscope profile --mode"),
        ({"steps": "4"}, "`--steps` cannot be used with `--counters`", "--record-steps 1"),
        ({"device": "cpu"}, "device `cpu` is the CPU", "remove --counters"),
    ],
)
def test_unsupported_cases_raise_with_the_reason(flags: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(StepscopeError) as raised:
        name_cases(grid_from_flags(flags), passes=1)
    assert message in raised.value.message
    assert hint in raised.value.hint


def test_a_dozen_layers_and_forward_mode_are_supported() -> None:
    (named,) = name_cases(grid_from_flags({"size": "small", "mode": "forward"}), passes=1)
    assert named.case.workload.mode == "forward"
    assert named.name == ""


def test_default_is_a_small_case_with_fused_attention() -> None:
    ((_, case),) = name_cases(Grid(), passes=1)
    assert case.workload.attention == "sdpa"
    assert case.workload.mode == "inference"


def test_cases_of_other_models_are_named_after_their_arguments() -> None:
    grid = grid_from_flags({"hf": "gpt2,a/b config.json", "context": "64,64"}, ["n_layer=1,2"])
    names = [one.name for one in name_cases(grid, passes=1)]
    assert names == [
        "hf-gpt2_n_layer-1",
        "hf-gpt2_n_layer-2",
        "hf-a-b-config.json_n_layer-1",
        "hf-a-b-config.json_n_layer-2",
    ]


def test_duplicate_names_get_a_number() -> None:
    names = [one.name for one in name_cases(grid_from_flags({"hf": "a/b,a-b"}), passes=1)]
    assert names == ["hf-a-b", "hf-a-b_2"]


def test_case_and_progress_are_reported(bench: Bench) -> None:
    bench.ncu.set(stages=["building", "counting, 40% of the pass"])
    bench.count(ONE)
    told = [stage.rpartition(",")[0] for stage in bench.stages if stage.endswith(" s")]
    assert "[1/1] out: building" in told
    assert "[1/1] out: counting, 40% of the pass" in told


def test_ctrl_c_ends_ncu_and_its_program_and_keeps_finished_cases(bench: Bench) -> None:
    bench.ncu.set(at_context={"128": {"hangs": True}})
    started = bench.out.parent / "bin" / "started.txt"

    def interrupt() -> None:
        while not started.exists() or not started.read_text():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        bench.count(GRID)
    assert bench.left() == {"context-64"}
    assert list((bench.out.parent / "tmp").iterdir()) == []
    status = Path(f"/proc/{started.read_text()}/stat")
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_fixture_contains_no_machine_name() -> None:
    told = ncu.read(COUNTED).counters.write_json()
    assert "Host" not in told
    assert "uuid" not in told.casefold()
