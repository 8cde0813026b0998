"""A CPU that advertises instructions it cannot run: PyTorch crashes with SIGILL in bf16 and fp16 GEMMs until it is told
not to use them. This is simulated in every process that loads torch, so the chain from the command to the row is
real."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import TINY, rows, stepscope

# Python runs a module with this name at startup. It waits for torch to be imported and replaces its GEMMs.
_SITE = """
import importlib.abc, importlib.machinery, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def load_and_replace(module):
            load(module)
            for owner, product in ((module, "mm"), (module, "matmul"), (module.Tensor, "__matmul__")):
                setattr(owner, product, dying(module, getattr(owner, product)))
        spec.loader.exec_module = load_and_replace
        return spec

def dying(torch, product):
    def multiply(left, *others, **options):
        if left.dtype in (torch.bfloat16, torch.float16) and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
            os.kill(os.getpid(), signal.SIGILL)
        return product(left, *others, **options)
    return multiply

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Its environment, with an empty cache, and without a compiler so that the probe does not wait for one."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_SITE)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "STEPSCOPE_CPU_LIMITS"):
        monkeypatch.delenv(name, raising=False)
    path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "STEPSCOPE_CACHE": str(tmp_path / "cache"), "CXX": str(tmp_path / "missing")}


def test_bench_survives_crashing_bf16_matmuls_and_its_rows_say_what_was_limited(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    arguments = ("bench", *TINY, "--precision", "bf16", "--out", "runs/bench")
    done = stepscope(tmp_path, *arguments, **machine)
    assert done.returncode == 0, done.stderr
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in done.stdout
    (row,) = rows(tmp_path)
    assert row["status"] == "ok"
    assert row["environment"]["cpu_limits"] == "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
    assert stepscope(tmp_path, *arguments, **machine).returncode == 0
    assert rows(tmp_path) == [row], "the same command finds the row again"
    line = _verdicts(tmp_path, machine)["cpu instructions"]
    assert line["verdict"] == "limited"
    assert "SIGILL in a bf16 GEMM" in line["found"]


def test_crashing_user_setting_is_reported_and_kept(tmp_path: Path, machine: dict[str, str]) -> None:
    own = {**machine, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}
    done = stepscope(tmp_path, "bench", *TINY, "--precision", "bf16", **own)
    assert done.returncode == 2
    assert "`ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX`" in done.stderr
    assert "hint: unset ONEDNN_MAX_CPU_ISA" in done.stderr
    assert _verdicts(tmp_path, own)["cpu instructions"]["verdict"] == "broken"


def test_torch_that_crashes_on_import_is_broken_and_the_cpu_is_not(tmp_path: Path, machine: dict[str, str]) -> None:
    (tmp_path / "site" / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "site" / "sitecustomize.py").unlink()
    verdicts = _verdicts(tmp_path, machine)
    assert verdicts["torch"]["verdict"] == "broken"
    assert "SIGSEGV" in verdicts["torch"]["found"]
    assert verdicts["cpu instructions"]["verdict"] == "fine"


def _verdicts(folder: Path, machine: dict[str, str]) -> dict[str, dict[str, Any]]:
    done = stepscope(folder, "doctor", "--format", "json", **machine)
    return {row["subject"]: row for row in json.loads(done.stdout)["rows"]}
