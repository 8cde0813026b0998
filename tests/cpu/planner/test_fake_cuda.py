"""Fake CUDA is tried in another process first, and refused if that fails."""

import sys
from pathlib import Path

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.planner import fake_cuda
from stepscope.planner.fake_cuda import extension, vtables


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path))


def test_both_ways_pass_their_test_and_that_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [fake_cuda.why_not(way) for way in fake_cuda.WAYS] == ["", ""]
    monkeypatch.setattr(fake_cuda, "_test", lambda _way: pytest.fail("tested again"))
    assert fake_cuda.why_not("vtables") == ""


def test_a_version_with_unknown_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StepscopeError) as caught:
        fake_cuda.enable()
    assert "PyTorch 2.99.0" in caught.value.message
    assert "known for versions 2.11, 2.12, 2.13, not for 2.99" in caught.value.detail
    assert "`g++` is not installed" in caught.value.detail


def test_a_crash_in_the_test_is_a_reason_and_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    assert fake_cuda.why_not("vtables") == "its test was killed by signal 11"
    assert not list(tmp_path.glob("fake_cuda/*.passed"))


def test_a_compiler_error_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error not today\n")
    monkeypatch.setattr(extension, "SOURCE", broken)
    with pytest.raises(OSError, match="not today"):
        extension.build()


def test_a_cache_that_cannot_be_written_to_leaves_the_way_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(fake_cuda, "_test", lambda _way: "")
    assert fake_cuda.why_not("extension").startswith("cannot write to the cache directory")
    assert fake_cuda.why_not("vtables") == ""


def test_layout_is_known_for_the_installed_version() -> None:
    assert vtables.why_not() == ""


def test_a_process_that_uses_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(StepscopeError, match="in a process that uses a GPU"):
        fake_cuda.install("vtables")
