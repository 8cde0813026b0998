"""`stepscope.annotate` under profilers that stepscope did not start."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.profiler import profile

import stepscope

layer = sys.modules["stepscope.annotate"]  # the attribute of this name is the public object


@stepscope.annotate("decorated")
def decorated(x: Tensor) -> Tensor:
    return x.sin()


def annotate_all(x: Tensor) -> Tensor:
    """Run one range of each form."""
    with stepscope.annotate("block"):
        x = decorated(x)
    stepscope.annotate.push("pushed")
    x = x.cos()
    stepscope.annotate.pop()
    return x


def ranges_of(profiler: profile, folder: Path) -> list[str]:
    """The names of the user's ranges in a trace, as stepscope reads it."""
    path = folder / f"trace-{len(list(folder.iterdir()))}.json"
    profiler.export_chrome_trace(str(path))
    return sorted(stepscope.load(path).opened[0].recording.ranges.filter(source="user")["name"].to_list())


@pytest.mark.parametrize("record_shapes", [False, True])
def test_ranges_of_every_form_are_in_the_users_trace(tmp_path: Path, record_shapes: bool) -> None:
    with profile(record_shapes=record_shapes) as profiler:
        annotate_all(torch.ones(4))
    assert ranges_of(profiler, tmp_path) == ["block", "decorated", "pushed"]


def test_ranges_are_only_in_the_recorded_steps_of_a_schedule(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(schedule=schedule) as profiler:
        for step in range(6):
            with stepscope.annotate(f"mine {step}"):
                torch.ones(4).sin()
            profiler.step()
    assert [name for name in ranges_of(profiler, tmp_path) if "mine" in name] == ["mine 2", "mine 3"]


def test_a_range_entered_before_the_profiler_is_harmless(tmp_path: Path) -> None:
    stepscope.annotate.push("pushed before")
    profiler = profile()
    with stepscope.annotate("entered before"):
        profiler.start()
        decorated(torch.ones(4))
    stepscope.annotate.pop()
    decorated(torch.ones(4))
    profiler.stop()
    assert ranges_of(profiler, tmp_path) == ["decorated", "decorated"]
    assert layer._opened.ranges == []


def test_a_range_left_after_the_profiler_is_harmless(tmp_path: Path) -> None:
    first, second = profile(), profile()
    first.start()
    with stepscope.annotate("open"):
        stepscope.annotate.push("pushed")
        first.stop()
        second.start()
        stepscope.annotate.pop()
    decorated(torch.ones(4))
    second.stop()
    assert ranges_of(first, tmp_path) == ["open", "pushed"]
    assert ranges_of(second, tmp_path) == ["decorated"]
    assert layer._opened.ranges == []


def test_a_range_in_a_thread_that_is_not_profiled_is_harmless(tmp_path: Path) -> None:
    with profile() as profiler:
        other = threading.Thread(target=annotate_all, args=(torch.ones(4),))
        other.start()
        other.join()
        decorated(torch.ones(4))
    assert ranges_of(profiler, tmp_path).count("decorated") >= 1


def test_our_recorder_decides_how_a_range_opens_under_their_profiler(tmp_path: Path) -> None:
    log: list[str] = []

    def open_range(name: str) -> Callable[[], None]:
        log.append(name)
        return lambda: None

    with profile() as profiler, stepscope.annotate("theirs"):
        with layer.activate(open_range):
            decorated(torch.ones(4))
        assert len(layer._opened.ranges) == 1
    assert log == ["decorated"]
    assert ranges_of(profiler, tmp_path) == ["theirs"]


def test_compiled_code_is_neither_broken_nor_compiled_again_by_a_profiler(tmp_path: Path) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(annotate_all, backend=counter, fullgraph=True)
    compiled(torch.ones(4))
    with profile() as profiler:
        compiled(torch.ones(4))
    compiled(torch.ones(4))
    assert counter.frame_count == 1
    assert not {"block", "decorated", "pushed"} & set(ranges_of(profiler, tmp_path))


class TestNsightSystems:
    @contextmanager
    def under_nsys(self) -> Iterator[list[str]]:
        """Nsight Systems and a torch with NVTX, and the ranges that are pushed and popped."""
        log: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, "_UNDER_NSYS", True)
            patch.setattr(layer, "_has_nvtx", lambda: True)
            patch.setattr(torch.cuda.nvtx, "range_push", lambda name: log.append(f"+{name}"))
            patch.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append("-"))
            layer._nvtx_opener.cache_clear()
            yield log
        layer._nvtx_opener.cache_clear()

    def test_ranges_are_nvtx_ranges(self) -> None:
        with self.under_nsys() as log:
            annotate_all(torch.ones(4))
        assert log == ["+block", "+decorated", "-", "-", "+pushed", "-"]

    def test_a_profiler_of_pytorch_comes_first(self, tmp_path: Path) -> None:
        with self.under_nsys() as log, profile() as profiler:
            decorated(torch.ones(4))
        assert log == []
        assert ranges_of(profiler, tmp_path) == ["decorated"]

    @pytest.mark.parametrize("imports", ["", "import torch; "])
    def test_without_a_torch_with_nvtx_nothing_happens(self, imports: str) -> None:
        if hasattr(torch._C, "_nvtx"):
            pytest.skip("this torch has NVTX")
        code = f"{imports}import stepscope, sys; layer = sys.modules['stepscope.annotate']\n"
        code += "with stepscope.annotate('x'): assert layer._UNDER_NSYS and not layer._opened.ranges"
        environment = os.environ | {"NSYS_PROFILING_SESSION_ID": "7"}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
