"""What is set if a CPU advertises instructions that it cannot run, with a fake probe."""

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.explain.experiments.attention_tables import attention_table
from stepscope.explain.experiments.bench_tables import bench_table
from stepscope.explain.experiments.comm_tables import comm_table
from stepscope.explain.memory.grid import grid_table
from stepscope.findings import Table
from stepscope.jobs.doctor import judge_instructions
from stepscope.jobs.workers.cpu_limits import (
    INHERITED,
    CpuIdentity,
    CpuLimits,
    ProbeOutcome,
    read_identity,
    settle_limits,
)
from stepscope.measure.instructions import COMPILED, LEVELS, PARTS
from stepscope.recording.rows.bench import Environment, Row, case_key
from tests.unit.attention_rows import attend
from tests.unit.comm_rows import communicate
from tests.unit.explain.test_memory_grid import weigh
from tests.unit.rows import ENVIRONMENT, row

R = TypeVar("R", bound=Row)

MACHINE = CpuIdentity(cpu="Xeon", flags="avx512_bf16 amx_tile amx_bf16", kernel="6.1", torch="2.13.0")
ONEDNN = LEVELS["ONEDNN_MAX_CPU_ISA"]
BF16, FP16 = "a bf16 GEMM", "an fp16 GEMM"


class StandIn:
    """A probe that crashes with SIGILL in a part, unless a variable is set to one of the levels that work there."""

    def __init__(
        self, needs: Mapping[str, Mapping[str, Collection[str]]], environ: Mapping[str, str] | None = None
    ) -> None:
        self.runs: list[dict[str, str]] = []
        self.compiled: list[bool] = []
        self._needs = needs
        self._environ = environ or {}

    def __call__(self, settings: Mapping[str, str], *, compiled: bool) -> ProbeOutcome:
        self.runs.append(dict(settings))
        self.compiled.append(compiled)
        in_effect = {**self._environ, **settings}
        for part in PARTS if compiled else PARTS[:-1]:
            needed = self._needs.get(part, {})
            if not all(in_effect.get(name) in working for name, working in needed.items()):
                return ProbeOutcome(part=part, signal="SIGILL")
        return ProbeOutcome()


def without_amx() -> StandIn:
    working = {"ONEDNN_MAX_CPU_ISA": ONEDNN[ONEDNN.index("AVX512_CORE_FP16") :]}
    return StandIn({BF16: working, FP16: working})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))


def test_healthy_machine_is_probed_once_without_compiling_and_not_limited() -> None:
    probe, environ = StandIn({}), {"HOME": "/"}
    assert settle_limits(environ, MACHINE, probe).settings == {}
    assert settle_limits({}, MACHINE, probe).settings == {}
    assert probe.runs == [{}]
    assert probe.compiled == [False]
    assert not set(LEVELS) & set(environ)


def test_forbidden_amx_selects_the_highest_level_below_it() -> None:
    environ: dict[str, str] = {}
    limits = settle_limits(environ, MACHINE, without_amx())
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert limits.settings == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    assert limits.deaths == (f"SIGILL in {BF16}",)


def test_cached_limit_is_set_without_a_probe() -> None:
    probe, environ = without_amx(), {"OTHER": ""}
    settle_limits({}, MACHINE, probe)
    runs = len(probe.runs)
    settle_limits(environ, MACHINE, probe)
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert len(probe.runs) == runs


@pytest.mark.parametrize(
    "changed", [{"torch": "2.14.0"}, {"kernel": "6.2"}, {"cpu": "EPYC"}, {"flags": "avx2"}, {"identity": "b"}]
)
def test_another_torch_kernel_cpu_or_machine_is_probed_again(changed: dict[str, str]) -> None:
    settle_limits({}, MACHINE, without_amx())
    probe = StandIn({})
    assert settle_limits({}, msgspec.structs.replace(MACHINE, **changed), probe).settings == {}
    assert len(probe.runs) == 1


@pytest.mark.parametrize("content", [b"", b"{", b'{"key": "x"}', b"\xff\xfe", b'{"key": 1}', b'{"x":' + b"[" * 100_000])
def test_damaged_cache_is_probed_again_and_repaired(content: bytes, tmp_path: Path) -> None:
    settle_limits({}, MACHINE, StandIn({}))
    (path,) = (tmp_path / "cache" / "instructions").iterdir()
    kept = path.read_bytes()
    path.write_bytes(content)
    probe = StandIn({})
    settle_limits({}, MACHINE, probe)
    assert len(probe.runs) == 1
    assert path.read_bytes() == kept


def test_unwritable_cache_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    environ: dict[str, str] = {}
    settle_limits(environ, MACHINE, without_amx())
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


def test_inconclusive_probe_is_not_cached() -> None:
    def ended(settings: Mapping[str, str], *, compiled: bool) -> ProbeOutcome:
        return ProbeOutcome(conclusive=False)

    assert settle_limits({}, MACHINE, ended).settings == {}
    assert settle_limits({}, MACHINE, without_amx()).settings


def test_inconclusive_setting_does_not_count_as_working() -> None:
    probe, unclear = without_amx(), "AVX512_CORE_FP16"

    def abort_once(settings: Mapping[str, str], *, compiled: bool) -> ProbeOutcome:
        if settings.get("ONEDNN_MAX_CPU_ISA") == unclear:
            return ProbeOutcome(conclusive=False)
        return probe(settings, compiled=compiled)

    level = ONEDNN[ONEDNN.index(unclear) + 1]
    assert settle_limits({}, MACHINE, abort_once).settings == {"ONEDNN_MAX_CPU_ISA": level}


def test_machine_is_identified_by_its_id_or_its_boot_id(tmp_path: Path) -> None:
    machine_id, boot_id = tmp_path / "machine-id", tmp_path / "boot_id"
    assert read_identity((machine_id, boot_id)) == ""
    machine_id.write_text("\n")  # as in container images
    boot_id.write_text("boot\n")
    assert read_identity((machine_id, boot_id)) == "boot"
    machine_id.write_text("machine\n")
    assert read_identity((machine_id, boot_id)) == "machine"


def test_machine_identity_is_neither_stored_nor_passed_on(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    settle_limits(environ, msgspec.structs.replace(MACHINE, identity="confidential"), without_amx())
    (path,) = (tmp_path / "cache" / "instructions").iterdir()
    assert "confidential" not in f"{path} {path.read_text()} {environ}"


def test_cache_entry_that_is_a_pipe_does_not_block(tmp_path: Path) -> None:
    settle_limits({}, MACHINE, StandIn({}))
    (path,) = (tmp_path / "cache" / "instructions").iterdir()
    path.unlink()
    os.mkfifo(path)
    probe = StandIn({})
    settle_limits({}, MACHINE, probe)
    assert len(probe.runs) == 1


def test_crash_of_compiled_code_is_limited_too() -> None:
    working = {"ONEDNN_MAX_CPU_ISA": ("AVX512_CORE_FP16",)}
    probe = StandIn({BF16: working, COMPILED: {"ATEN_CPU_CAPABILITY": ("avx2", "default")}})
    limits = settle_limits({}, MACHINE, probe)
    assert limits.settings == {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "ATEN_CPU_CAPABILITY": "avx2"}
    assert limits.deaths == (f"SIGILL in {BF16}", f"SIGILL in {COMPILED}")


def test_variables_that_only_help_together_are_set_together() -> None:
    step = {"ONEDNN_MAX_CPU_ISA": ("SSE41",), "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2",)}
    limits = settle_limits({}, MACHINE, StandIn({"a training step": step}))
    assert limits.settings.items() >= {name: level for name, (level,) in step.items()}.items()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_user_setting_is_kept(name: str) -> None:
    environ = {name: "AVX2"}
    probe = StandIn({BF16: {name: ("AVX2",)}}, environ)
    assert settle_limits(environ, MACHINE, probe).settings == {}
    assert environ == {name: "AVX2", INHERITED: environ[INHERITED]}
    assert probe.compiled == [True]


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_user_setting_that_crashes_is_named_and_not_changed(name: str) -> None:
    environ = {name: "AVX512_CORE_AMX"}
    with pytest.raises(StepscopeError) as failed:
        settle_limits(environ, MACHINE, StandIn({BF16: {"ONEDNN_MAX_CPU_ISA": ("AVX2",)}}, environ))
    assert f"`{name}=AVX512_CORE_AMX`" in failed.value.message
    assert f"SIGILL in {BF16}" in failed.value.message
    assert failed.value.hint == f"unset {name}"
    assert environ == {name: "AVX512_CORE_AMX"}


def test_error_lists_everything_that_was_tried() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(StepscopeError) as failed:
        settle_limits(environ, MACHINE, StandIn({FP16: {"ONEDNN_MAX_CPU_ISA": ()}}))
    assert f"SIGILL in {FP16}" in failed.value.message
    for level in (*ONEDNN, *LEVELS["MKL_ENABLE_INSTRUCTIONS"]):
        assert level in failed.value.detail
    assert environ == {}


def test_child_process_inherits_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    settle_limits(environ, MACHINE, without_amx())
    monkeypatch.setenv("STEPSCOPE_CACHE", "/dev/null/none")
    probe = StandIn({})
    assert settle_limits(environ, MACHINE, probe).deaths
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert probe.runs == []


def test_limits_from_the_submitting_machine_are_dropped_on_another() -> None:
    environ: dict[str, str] = {}
    settle_limits(environ, MACHINE, without_amx())
    settle_limits(environ, msgspec.structs.replace(MACHINE, cpu="EPYC"), StandIn({}))
    assert "ONEDNN_MAX_CPU_ISA" not in environ


def test_doctor_distinguishes_our_limits_from_user_settings() -> None:
    settings = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    ours = judge_instructions(CpuLimits(key="", settings=settings, deaths=(f"SIGILL in {BF16}",)), settings)
    theirs = judge_instructions(CpuLimits(key=""), settings)
    assert ours.verdict == theirs.verdict == "limited"
    assert ours.advice
    assert theirs.advice
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in ours.found
    assert "SIGILL" in ours.found
    assert "SIGILL" not in theirs.found
    assert judge_instructions(CpuLimits(key=""), {}).verdict == "fine"


def test_limit_makes_another_case_and_no_limit_keeps_old_keys() -> None:
    limited = msgspec.structs.replace(ENVIRONMENT, cpu_limits="ONEDNN_MAX_CPU_ISA=AVX2")
    case = row().case
    assert case_key(case, limited, None) != case_key(case, ENVIRONMENT, None)
    assert b"cpu_limits" not in msgspec.json.encode(ENVIRONMENT)
    assert len(ENVIRONMENT.identity) == 9
    assert msgspec.json.decode(msgspec.json.encode(ENVIRONMENT), type=Environment) == ENVIRONMENT
    assert msgspec.json.decode(msgspec.json.encode(limited), type=Environment) == limited


TABLES: dict[str, tuple[Callable[[list[Any]], Table], Row]] = {
    "bench": (bench_table, row()),
    "memory": (grid_table, weigh(parameters=5)),
    "attention": (partial(attention_table, part="time"), attend()),
    "comm": (comm_table, communicate()),
}


@pytest.mark.parametrize("verb", TABLES)
def test_table_notes_limits(verb: str) -> None:
    make, plain = TABLES[verb]
    assert not any("ONEDNN" in note for note in make([plain]).notes)
    assert any("ONEDNN_MAX_CPU_ISA=AVX2" in note for note in make([_limited(plain)]).notes)


def test_limited_rows_are_marked_and_never_compared_with_others() -> None:
    table = bench_table([row(precision="fp32"), _limited(row(precision="bf16"))])
    (column,) = (column for column in table.columns if column.key == "cpu_limits")
    assert not column.detail
    speedups = [column.key for column in table.columns].index("speedup_precision")
    assert [cells[speedups] for cells in table.rows] == [1.0, None]


def _limited(one: R) -> R:
    return msgspec.structs.replace(
        one, environment=msgspec.structs.replace(one.environment, cpu_limits="ONEDNN_MAX_CPU_ISA=AVX2")
    )
