"""`stepscope profile --counters` end to end, on a machine without a GPU."""

from pathlib import Path

import pytest

from tests.cli.command import stepscope
from tests.unit.ncu_files import COUNTED, StandIn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--counters"], ["`ncu` is not on the PATH", "hint: stepscope doctor"]),
        (
            ["--counters", "--size", "medium"],
            ["too many layers to count: `24`", "0.2 to 0.5 s a kernel", "--num-layers 2"],
        ),
        (["--counters", "--nsys"], ["`--nsys` and `--counters` are mutually exclusive"]),
        (["--counters", "--annotate", "a:b"], ["`--annotate` cannot be used with `--counters`"]),
        (["--kernel-class", "GEMM"], ["`--kernel-class` requires `--counters`"]),
        (["--format", "csv"], ["unsupported format: `csv`"]),
    ],
)
def test_invalid_counter_options_are_rejected_before_anything_runs(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    done = stepscope(tmp_path, "profile", *arguments, PATH="/nowhere")
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_missing_gpu_is_reported(tmp_path: Path) -> None:
    StandIn(tmp_path)
    done = stepscope(tmp_path, "profile", "--counters", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 2
    assert "hardware counters require a GPU; device `auto` is the CPU" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_explain_prints_the_counters_of_any_file(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "explain", str(COUNTED), "--table", "counters", "--format", "csv")
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.startswith("short,class,count,grid,tensor_ops,fp32_flops")
    assert sum("mem-efficient attention" in row for row in rows) == 1
