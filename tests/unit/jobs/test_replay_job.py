"""`verify --replay`, with recorded runs in place of a GPU: what runs, what is compared, and the verdict."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.errors import Exit, StepscopeError
from stepscope.jobs import replay, verify
from stepscope.jobs.replay import LocalGpu, Replayer
from stepscope.jobs.workers.messages import Failed, OutOfMemory, Probed, ProbedModel
from stepscope.jobs.workers.process import Ended, Workers
from stepscope.measure.targets.ncu import NcuCounted
from stepscope.recording import store
from stepscope.recording.readers.counter_metrics import DURATION
from stepscope.recording.readers.formats import open_recording
from stepscope.recording.rows.bench import Environment
from stepscope.recording.store import Recording
from stepscope.recover.replay.outcome import ReplayVerdict
from stepscope.recover.reports.challenge import derive_challenge
from stepscope.spec import Case, Factory, HuggingFace, Timing, Workload
from tests.unit.ncu_files import StandIn
from tests.unit.recover.evidence_runs import FOLDER
from tests.unit.rows import ENVIRONMENT

HERE = msgspec.structs.replace(ENVIRONMENT, driver_name="NVIDIA H200", torch="2.11.0")
COUNTED, TRACE = "gpt2_bf16_odd.csv.gz", "gpt2_bf16_odd.forward.json.gz"
OTHER = "gpt2_head80.forward.json.gz"
CONFIG = {"model_type": "gpt2", "n_embd": 640, "n_head": 10, "n_inner": None, "vocab_size": 32003}
RUN: dict[str, Any] = {"batch": 3, "context": 200, "dtype": "bf16"}


@dataclass
class Machine:
    """A GPU on which every model launches the kernels of a recorded run."""

    files: Sequence[str] = (TRACE,)
    environment: Environment = HERE
    can_count: bool = True
    ran: list[Workload] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    is_required: bool = False

    def require(self) -> None:
        self.is_required = True

    def inspect(self, workload: Workload) -> Environment:
        if isinstance(workload.model, HuggingFace):
            assert Path(workload.model.config).is_file()
        return self.environment

    def record(self, workload: Workload) -> Recording:
        file = self.files[min(len(self.ran), len(self.files) - 1)]
        self.ran.append(workload)
        return open_recording(FOLDER / file)

    def count(self, workload: Workload, metrics: Sequence[str]) -> Recording:
        self.metrics += metrics
        return self.record(workload)


def write_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    return path


def run(folder: Path, evidence: str | Path, machine: Machine, *, layers: int = 2, **more: Any) -> verify.Verified:
    claim = write_config(folder, n_layer=2 if ".csv" in str(evidence) else 4)
    replayer = Replayer(layers=layers, machine=machine)
    return verify.verify_files([FOLDER / evidence], claim, replayer=replayer, **{**RUN, **more})


def texts(verified: verify.Verified) -> str:
    parts = verify.describe(verified, [Path("x")])
    return "\n".join(one if isinstance(one, str) else repr(one.rows) + repr(one.notes) for one in parts)


def test_counters_are_replayed_under_ncu(tmp_path: Path) -> None:
    machine = Machine(files=[COUNTED])
    verified = run(tmp_path, COUNTED, machine)
    assert verify.exit_code(verified) is Exit.OK
    (replayed,) = verified.replays
    assert replayed.verdict is ReplayVerdict.AGREES
    assert replayed.comparison.equal == 49
    assert DURATION in machine.metrics
    assert not any("dram" in one for one in machine.metrics)
    (only,) = machine.ran
    assert isinstance(only.model, Factory)
    assert dict(only.model.arguments)["dtype"] == "bf16"
    state = json.loads(verify.encode(verified))
    assert state["verdict"] == "consistent"
    assert state["replays"][0]["comparison"]["compared"] == 49
    assert "replay: agrees" in texts(verified)


def test_a_trace_is_replayed_with_fewer_layers(tmp_path: Path) -> None:
    """The replay agrees, and what the trace cannot test stays open."""
    machine = Machine(files=[COUNTED], environment=HERE)
    verified = run(tmp_path, TRACE, machine)
    assert verified.replays[0].verdict is ReplayVerdict.AGREES
    assert (verified.replays[0].layers, verified.replays[0].num_layers) == (2, 4)
    assert verify.exit_code(verified) is Exit.UNDECIDED
    assert "gated" in verified.verification.why


def test_every_program_is_tried_until_one_agrees(tmp_path: Path) -> None:
    machine = Machine(files=[OTHER, TRACE])
    verified = run(tmp_path, TRACE, machine, layers=4)
    assert verified.replays[0].verdict is ReplayVerdict.AGREES
    assert [type(one.model).__name__ for one in machine.ran] == ["Factory", "HuggingFace"]
    assert "the claimed config in transformers, bf16, sdpa attention" in verified.replays[0].program


def test_other_kernels_leave_a_consistent_claim_open(tmp_path: Path) -> None:
    machine = Machine(files=["gpt2_head80.csv.gz"])
    verified = run(tmp_path, COUNTED, machine)
    assert verify.exit_code(verified) is Exit.UNDECIDED
    assert verified.verification.why.startswith("replay: ")
    assert "of 49 differ from the replay" in verified.verification.why
    assert "another implementation" in texts(verified)


def test_counters_need_ncu_and_launches_do_not(tmp_path: Path) -> None:
    machine = Machine(files=[COUNTED], can_count=False)
    (replayed,) = run(tmp_path, COUNTED, machine).replays
    assert machine.metrics == []
    assert "counters were not replayed: `ncu` is not on the PATH" in replayed.comparison.notes


def test_a_stated_recording_with_other_kernels_is_refuted(tmp_path: Path) -> None:
    """It names the settings and versions, so that nothing else explains the difference."""
    versions = {"torch": "2.11.0", "transformers": version("transformers")}
    stated = Workload(model=HuggingFace(config="gpt2"), precision="bf16", mode="inference", attention="sdpa", **{
        name: RUN[name] for name in ("batch", "context")
    })  # fmt: skip
    case = Case(workload=stated, timing=Timing())
    recording = open_recording(FOLDER / COUNTED).with_manifest(case=case, versions=versions, environment=HERE)
    store.save(recording, tmp_path / "evidence")
    claim = write_config(tmp_path, n_layer=2)
    for file, status in ((COUNTED, Exit.OK), ("gpt2_head80.csv.gz", Exit.GATE_FAILED)):
        machine = Machine(files=[file])
        replayer = Replayer(layers=2, machine=machine)
        verified = verify.verify_files([tmp_path / "evidence"], claim, replayer=replayer, **RUN)
        assert verify.exit_code(verified) is status
        assert len(machine.ran) == 1
    assert verified.verification.why.startswith("replay: #0 gather by index")


def test_a_refuted_claim_is_not_replayed(tmp_path: Path) -> None:
    machine = Machine()
    claim = write_config(tmp_path, n_layer=2, n_inner=4096)
    verified = verify.verify_files([FOLDER / COUNTED], claim, replayer=Replayer(layers=2, machine=machine), **RUN)
    assert verify.exit_code(verified) is Exit.GATE_FAILED
    assert machine.is_required
    assert machine.ran == []
    assert "not replayed: it would not change the verdict" in verified.verification.notes


def test_the_claim_and_the_gpu_are_checked_before_the_evidence_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "read_evidence", lambda *_, **__: pytest.fail("the evidence was read"))
    monkeypatch.setattr(replay, "gpus_of_this_machine", list)
    claim = write_config(tmp_path, n_layer=2)
    with pytest.raises(StepscopeError, match="requires batch, context, dtype"):
        verify.verify_files([FOLDER / COUNTED], claim, replayer=Replayer(layers=2, machine=Machine()))
    with LocalGpu() as machine, pytest.raises(StepscopeError, match="requires a GPU") as raised:
        verify.verify_files([FOLDER / COUNTED], claim, replayer=Replayer(layers=2, machine=machine), **RUN)
    assert "remove --replay" in raised.value.hint


def test_a_challenge_replaces_batch_and_context(tmp_path: Path) -> None:
    task = derive_challenge("5f0c21", max_tokens=8192)
    claim = write_config(tmp_path, n_layer=2)
    verified = verify.verify_files([FOLDER / COUNTED], claim, dtype="bf16", challenge=task)
    assert verify.exit_code(verified) is Exit.GATE_FAILED
    assert "7,680 rows" in verified.verification.why
    answered = msgspec.structs.replace(task, batch=3, context=200)
    verified = verify.verify_files([FOLDER / COUNTED], claim, dtype="bf16", challenge=answered)
    assert verify.exit_code(verified) is Exit.OK
    assert verify.state(verified)["challenge"] == msgspec.to_builtins(answered)
    assert "challenge 5f0c21: batch 3, context 200, one of 773 shapes, of which 0 others would pass" in texts(verified)
    with pytest.raises(StepscopeError, match="the claim has batch `4`, and the nonce asks for `8`"):
        verify.verify_files([FOLDER / COUNTED], claim, batch=4, challenge=task)


# --- The GPU of this machine, as far as the job can see


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin") + os.pathsep + "/usr/bin:/bin")
    probed = Probed(environment=HERE, models=(ProbedModel(source=None, takes_context=True),))
    monkeypatch.setattr(replay, "look_at", lambda *_: probed)
    monkeypatch.setattr(replay, "gpus_of_this_machine", lambda: [("NVIDIA H200", "GPU-0")])
    stand_in = StandIn(tmp_path / "bin")
    counted = NcuCounted(environment=HERE, parameters=1, optimizer=None, forward_flops={})
    stand_in.set(csv=str(FOLDER / COUNTED), answer=msgspec.json.encode(counted).decode())
    return stand_in


def test_the_local_gpu_counts_one_pass_of_the_claimed_model(tmp_path: Path, ncu: StandIn) -> None:
    claim = write_config(tmp_path, n_layer=2)
    with LocalGpu() as machine:
        assert machine.can_count
        replayer = Replayer(layers=2, machine=machine)
        verified = verify.verify_files([FOLDER / COUNTED], claim, replayer=replayer, **RUN)
    assert verified.replays[0].verdict is ReplayVerdict.AGREES
    ((given, _),) = ncu.calls()
    assert "sm__ops_path_tensor_src_bf16_dst_fp32.sum" in given["--metrics"]
    assert "dram__bytes_read.sum" not in given["--metrics"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (OutOfMemory(reason="tried to allocate 1 TiB"), "did not run here: oom"),
        (Failed(message="it broke", detail="", hint=""), "did not run here: error"),
    ],
)
def test_a_failure_to_run_is_an_error(
    ncu: StandIn, monkeypatch: pytest.MonkeyPatch, answer: OutOfMemory | Failed, says: str
) -> None:
    del ncu
    monkeypatch.setattr(Workers, "run", lambda *_, **__: Ended(answer=answer, log=b""))
    with LocalGpu() as machine, pytest.raises(StepscopeError, match=says) as raised:
        machine.record(Workload(model=HuggingFace(config="gpt2")))
    assert "--replay 2" in raised.value.hint


def test_a_machine_whose_torch_sees_no_gpu_is_rejected(ncu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    del ncu
    on_cpu = msgspec.structs.replace(HERE, device="cpu")
    probed = Probed(environment=on_cpu, models=(ProbedModel(source=None, takes_context=True),))
    monkeypatch.setattr(replay, "look_at", lambda *_: probed)
    with LocalGpu() as machine, pytest.raises(StepscopeError, match="requires a GPU") as raised:
        machine.inspect(Workload(model=HuggingFace(config="gpt2")))
    assert "torch 2.11.0 does not see one" in raised.value.detail
