"""`stepscope bench` end to end: tables, resuming, failures, bad input."""

import csv
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.cli.command import PATIENCE_S, TINY, kill, rows, start, stepscope, wait_until, workers

FACTORY = """
import os
import torch
from torch import nn

def build(batch, context):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.randn(batch, context, 4), lambda output: output.square().mean()

def raises(batch, context, again=0):
    raise RuntimeError("no such dataset")

def dies(batch, context):
    if context == 32:
        os.kill(os.getpid(), 11)
    return build(batch, context)

def raises_at_32(batch, context):
    if context == 32:
        raise RuntimeError("only 16")
    return build(batch, context)

def trained(batch, context):
    model, *rest = build(batch, context)
    return model, *rest, torch.optim.Adagrad(model.parameters())

def hangs(batch, context):
    import time
    open("hanging", "w").close()
    time.sleep(600)

def hangs_at_32(batch, context):
    return hangs(batch, context) if context == 32 else build(batch, context)
"""


def test_grid_gives_a_row_per_case_and_resumes_without_rerunning(tmp_path: Path) -> None:
    command = ["bench", *TINY, "--context", "8,16", "--precision", "fp32,bf16"]
    first = stepscope(tmp_path, *command)
    assert first.returncode == 0, first.stderr
    assert "vs fp32" in first.stdout
    assert [r["status"] for r in rows(tmp_path)] == ["ok"] * 4
    again = stepscope(tmp_path, *command)
    assert "4 of 4 cases are already done" in again.stderr
    assert again.stdout == first.stdout
    assert len(rows(tmp_path)) == 4
    fresh = stepscope(tmp_path, *command, "--fresh", "--context", "8", "--precision", "fp32")
    assert fresh.returncode == 0
    assert len(rows(tmp_path)) == 5


def test_presets_are_compared(tmp_path: Path) -> None:
    """Without a compiler, which would take most of a minute here."""
    ended = stepscope(tmp_path, "bench", *TINY, "--context", "8", "--preset", "none,fast", "--compile", "no")
    assert ended.returncode == 0, ended.stderr
    plain, fast = rows(tmp_path)
    workloads = [one["case"]["workload"] for one in (plain, fast)]
    assert [one["precision"] for one in workloads] == ["fp32", "bf16"]
    assert [one["graph"] for one in workloads] == [False, True]
    assert fast["measurement"]["optimizer"] == "adamw-onelaunch"
    assert "uncaptured: not captured: CUDA graphs need a GPU (1 case)" in ended.stdout


@pytest.mark.parametrize("verb", ["bench", "profile", "memory", "precision", "report", "train"])
def test_preset_is_in_the_help_of_verbs_with_settings(tmp_path: Path, verb: str) -> None:
    assert stepscope(tmp_path, verb, "--help").stdout.count("--preset") == 1


def test_formats_carry_the_same_rows(tmp_path: Path) -> None:
    stepscope(tmp_path, "bench", *TINY, "--context", "8")
    show = ["bench", "--from", "runs/bench/results.jsonl"]
    table = json.loads(stepscope(tmp_path, *show, "--format", "json").stdout)
    (by_csv,) = csv.DictReader(stepscope(tmp_path, *show, "--format", "csv").stdout.splitlines())
    assert float(by_csv["step_median_ms"]) == table["rows"][0]["step_median_ms"]
    assert {"forward_p20_ms", "optimizer_sd_ms", "step_max_ms", "mfu"} <= set(by_csv)
    assert stepscope(tmp_path, *show, "--format", "md").stdout.count("|") > 20
    assert r"\toprule" in stepscope(tmp_path, *show, "--format", "latex").stdout


def test_chart_is_redrawn_and_a_foreign_file_is_kept_unless_forced(tmp_path: Path) -> None:
    stepscope(tmp_path, "bench", *TINY, "--context", "8,16")
    show = ["bench", "--from", "runs/bench/results.jsonl", "--plot", "chart.png"]
    assert stepscope(tmp_path, *show).returncode == 0
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert stepscope(tmp_path, *show).returncode == 0
    (tmp_path / "chart.png").write_bytes(b"\x89PNG of somebody else")
    refused = stepscope(tmp_path, *show)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert stepscope(tmp_path, *show, "--force").returncode == 0


def test_every_case_has_its_own_process(tmp_path: Path) -> None:
    """One crashes and the others are measured."""
    (tmp_path / "mine.py").write_text(FACTORY)
    done = stepscope(
        tmp_path, "bench", "--model", "mine:dies", "--context", "16,32,64", "--device", "cpu", "--steps", "2"
    )
    assert done.returncode == 0, done.stderr
    found = {r["case"]["workload"]["context"]: r for r in rows(tmp_path)}
    assert [found[context]["status"] for context in (16, 32, 64)] == ["ok", "crash", "ok"]
    assert "SIGSEGV" in found[32]["reason"]
    assert (tmp_path / "runs/bench/logs" / f"{found[32]['key']}.log").exists()


def test_a_case_that_needs_more_than_its_limit_is_oom_and_the_others_complete(tmp_path: Path) -> None:
    grid = [*TINY, "--context", "8,16,24,32,40,48,56,64,72,80,88,2048"]
    done = stepscope(tmp_path, "bench", *grid, "--memory-limit", "100MB")
    assert done.returncode == 0, done.stderr
    statuses = {r["case"]["workload"]["context"]: r["status"] for r in rows(tmp_path)}
    assert statuses.pop(2048) == "oom"
    assert set(statuses.values()) == {"ok"}
    assert len(statuses) == 11


def test_a_sweep_killed_three_times_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    command = ["bench", *TINY, "--context", "8,16,24", "--batch", "1,2,3,4", "--precision", "fp32,bf16"]
    chance = random.Random(2)
    for num_rows in (1, 4, 7):
        sweep = start(tmp_path, *command)
        wait_until(partial(_has_rows, tmp_path, num_rows))
        time.sleep(chance.uniform(0, 0.4))
        kill(sweep)
        assert len(rows(tmp_path)) < 24, "killed before it was done"
        wait_until(lambda: workers(tmp_path) == [])  # a killed sweep leaves no worker running
    assert stepscope(tmp_path, *command).returncode == 0
    lines = (tmp_path / "runs/bench/results.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert len(keys) == len(set(keys)) == 24


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_worker_and_keeps_the_rows(tmp_path: Path, with_signal: signal.Signals) -> None:
    contexts = [str(8 * number) for number in range(1, 41)]
    sweep = start(tmp_path, "bench", *TINY, "--context", ",".join(contexts))
    wait_until(partial(_has_rows, tmp_path, 1))
    assert kill(sweep, with_signal) == 130
    assert "interrupted: finished cases are saved" in (tmp_path / "stderr.txt").read_text()
    assert workers(tmp_path) == []
    assert 1 <= len(rows(tmp_path)) < len(contexts)


@pytest.mark.parametrize("whom", ["worker", "nursery"])
def test_killed_process_is_a_row_and_the_sweep_continues(tmp_path: Path, whom: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    sweep = start(
        tmp_path, "bench", "--model", "mine:hangs_at_32", "--context", "16,32,64", "--device", "cpu", "--steps", "2"
    )
    wait_until((tmp_path / "hanging").exists)
    (worker,) = (pid for pid in workers(tmp_path) if _parent(pid) in workers(tmp_path))
    os.kill(worker if whom == "worker" else _parent(worker), signal.SIGKILL)
    assert sweep.wait(PATIENCE_S) == 0
    assert [r["status"] for r in rows(tmp_path)] == ["ok", "killed", "ok"]
    assert "SIGKILL while building" in rows(tmp_path)[1]["reason"]
    assert workers(tmp_path) == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _has_rows(folder: Path, count: int) -> bool:
    return len(rows(folder)) >= count


def test_hanging_case_times_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    done = stepscope(tmp_path, "bench", "--model", "mine:hangs", "--device", "cpu", "--timeout", "15")
    assert done.returncode == 0
    assert [r["status"] for r in rows(tmp_path)] == ["timeout"]


def test_edited_model_is_measured_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    command = ["bench", "--model", "mine:build", "--device", "cpu", "--steps", "2"]
    stepscope(tmp_path, *command)
    (tmp_path / "mine.py").write_text(FACTORY + "\n# edited\n")
    stepscope(tmp_path, *command)
    assert [r["status"] for r in rows(tmp_path)] == ["ok", "ok"]


def test_a_factory_in_a_file_trains_with_the_optimizer_that_it_returns(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/layers.py").write_text(FACTORY)
    (tmp_path / "models/my-model.py").write_text("from layers import build, trained\n")
    command = ["bench", "--model", "models/my-model.py:build,models/my-model.py:trained", "--device", "cpu"]
    done = stepscope(tmp_path, *command, "--steps", "2")
    assert done.returncode == 0, done.stderr
    assert [r["measurement"]["optimizer"] for r in rows(tmp_path)] == ["adamw-torch", "Adagrad"]
    assert [r["case"]["workload"]["context"] for r in rows(tmp_path)] == [128, 128]
    assert "Adagrad" in done.stdout


def test_image_model_has_no_context(tmp_path: Path) -> None:
    sizes = ["hidden_size=16", "intermediate_size=32", "num_hidden_layers=1", "num_attention_heads=2", "image_size=32"]
    command = ["bench", "--hf", "vit", *(word for size in sizes for word in ("--set", size)), "--device", "cpu"]
    done = stepscope(tmp_path, *command, "--batch", "2", "--steps", "2", "--format", "json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["rows"]
    assert (found["context"], found["tokens_per_s"], found["optimizer"]) == (None, None, "adamw-torch")
    assert found["samples_per_s"] == pytest.approx(2 / found["step_median_ms"] * 1e3)
    assert found["tflops"] > 0
    refused = stepscope(tmp_path, *command, "--context", "128")
    assert refused.returncode == 2
    assert "`vit` does not support `--context`" in refused.stderr


@pytest.mark.parametrize("contexts", ["16,32", "32,16"])
def test_a_factory_that_fails_at_one_point_is_a_row_and_retry_runs_it_again(tmp_path: Path, contexts: str) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    command = ["bench", "--model", "mine:raises_at_32", "--context", contexts, "--device", "cpu", "--steps", "2"]
    assert stepscope(tmp_path, *command).returncode == 0
    assert [r["status"] for r in rows(tmp_path)] == ["ok", "error"]
    assert "only 16" in rows(tmp_path)[1]["reason"]
    stepscope(tmp_path, *command, "--retry")
    assert [r["status"] for r in rows(tmp_path)] == ["ok", "error", "error"]


def test_retry_doubtful_reruns_unreliable_cases(tmp_path: Path) -> None:
    command = ["bench", *TINY, "--context", "8,16"]
    assert stepscope(tmp_path, *command).returncode == 0
    path = tmp_path / "runs/bench/results.jsonl"
    sound, doubtful = (json.loads(line) | {"doubts": []} for line in path.read_text().splitlines())
    doubtful["doubts"] = [{"code": "spread", "text": "it spread"}]
    path.write_text("".join(f"{json.dumps(one)}\n" for one in (sound, doubtful)))
    assert stepscope(tmp_path, *command).returncode == 0
    assert len(rows(tmp_path)) == 2
    assert stepscope(tmp_path, *command, "--retry").returncode == 0
    assert len(rows(tmp_path)) == 2
    assert stepscope(tmp_path, *command, "--retry", "doubtful").returncode == 0
    assert [r["key"] for r in rows(tmp_path)] == [sound["key"], doubtful["key"], doubtful["key"]]
    refused = stepscope(tmp_path, *command, "--retry", "everything")
    assert refused.returncode == 2


def test_factory_that_never_builds_is_rejected_despite_other_results(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    assert stepscope(tmp_path, "bench", *TINY, "--context", "8").returncode == 0
    done = stepscope(tmp_path, "bench", "--model", "mine:raises", "--device", "cpu", "--set", "again=1,2")
    assert done.returncode == 2
    assert "no such dataset" in done.stderr
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "smal"], ["unknown size: `smal`", "did you mean `small`", "hint: stepscope bench --list"]),
        (["--num-heads", "7"], ["num_heads `7`", "hint: --num-heads 8"]),
        (["--batch", "0"], ["batch must be at least 1, got `0`"]),
        (["--steps", "-3"], ["steps must be at least 1, got `-3`"]),
        (["--size"], ["--size"]),
        (["--contxt", "8"], ["--contxt", "--context"]),
        (["--model", "mine:raises"], ["building `mine:raises` raised RuntimeError: no such dataset", "mine.py:"]),
        (["--model", "mine:missing"], ["`mine` has no `missing`"]),
        (["--model", "absent:build"], ["cannot import `absent`", "hint: run from the directory"]),
        (["--model", "broken:build"], ["importing `broken:build` raised SyntaxError"]),
        (["--model", "gone/mine.py:build"], ["not found: `gone/mine.py`", "hint: --model path/to/file.py:build"]),
        (["--model", "mine.py:trained", "--optimizer", "sgd"], ["`--optimizer sgd`", "its own Adagrad"]),
        (["--hf", "acme/Llama-8B"], ["on the Hugging Face Hub", "hint: --hf llama", "hf download acme/Llama-8B"]),
        (["--hf", "gone/config.json"], ["not found: `gone/config.json`"]),
        (["--device", "cuda:7"], ["device not found: `cuda:7`", "hint: stepscope doctor"]),
        (["--config", "none.toml"], ["settings file: `none.toml`"]),
        (["--out", "mine.py/x"], ["cannot write to", "hint: stepscope bench --out DIR"]),
        (["--out", "old"], ["not a results file from this version", "stepscope.bench/0"]),
        (["--from", "nowhere.jsonl"], ["cannot read the results file: `nowhere.jsonl`"]),
        (["--plot", "chart.gif"], ["chart.gif", ".png"]),
        (["--plot", "none/chart.png"], ["not found: `none`", "mkdir"]),
        (["--precision", "tf32", "--device", "cpu"], ["tf32", "hint: --precision"]),
        (["--seed", "99999999999999999999"], ["seed", "out of range"]),
        (["--batch", "99999999999999999999"], ["batch", "too large"]),
        (["--device", "cuda:99999999999"], ["unknown device"]),
        (["--plot", ""], ["unsupported figure format", "--plot figure.png"]),
        (["--out", "x" * 300], ["cannot write to", "too long"]),
        (
            ["--from", "mine.py"],
            ["not a results file from this version of stepscope: `mine.py`", "stepscope bench --out"],
        ),
        (["--config", "deep.toml"], ["not a valid TOML file"]),
        (["--model", "mine:build", "--set", "batch=7"], ["`--set batch`", "hint: --batch 7"]),
        (["--model", "endless:build", "--timeout", "8"], ["timed out after 8 s while importing `endless:build`"]),
        (["--set", "depth=2"], ["`--set` requires `--model`"]),
        (["--from", "old/results.jsonl", "--size", "small"], ["`--size` has no effect"]),
        (["--model", "quits:build"], ["importing `quits:build` raised SystemExit"]),
        (["--model", "half:build"], ["importing `half:build` raised ImportError", "half.py:1"]),
    ],
)
def test_bad_input_is_an_error_with_a_hint_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(FACTORY)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "deep.toml").write_text("context = " + "[" * 100_000)
    (tmp_path / "endless.py").write_text("import time\nwhile True: time.sleep(1)\n")
    (tmp_path / "quits.py").write_text("raise SystemExit('bye')\n")
    (tmp_path / "half.py").write_text("from torch import no_such_thing\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/results.jsonl").write_text('{"schema":"stepscope.bench/0"}\n')
    done = stepscope(tmp_path, "bench", *arguments)
    assert done.returncode == 2, done.stderr
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()
    assert (tmp_path / "old/results.jsonl").read_text() == '{"schema":"stepscope.bench/0"}\n'


def test_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    shell = f"{sys.executable} -m stepscope bench --list --format csv | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_log_that_cannot_be_written_does_not_end_the_sweep(tmp_path: Path, where: str) -> None:
    shell = shlex.join([sys.executable, "-m", "stepscope", "bench", *TINY, "--context", "8,16"])
    done = subprocess.run(["bash", "-c", f"{shell} {where}"], cwd=tmp_path, stdout=subprocess.PIPE, check=False)
    assert done.returncode == 0
    assert len(rows(tmp_path)) == 2


@pytest.mark.parametrize(("where", "status"), [(">/dev/full", 2), (">&-", 0)])
def test_unwritable_output_gives_no_traceback(tmp_path: Path, where: str, status: int) -> None:
    shell = f"{sys.executable} -m stepscope bench --list {where}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


def test_non_finite_loss_has_a_remark(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        FACTORY + "def nan(batch, context):\n    model, x, loss = build(batch, context)\n"
        "    return model, x, lambda output: loss(output) * float('nan')\n"
    )
    done = stepscope(tmp_path, "bench", "--model", "mine:nan", "--device", "cpu", "--steps", "2")
    assert "not-finite" in done.stdout


def test_without_torch_analysis_works_and_bench_says_what_to_install(tmp_path: Path) -> None:
    """A path finder that hides torch simulates an installation without it."""
    stepscope(tmp_path, "bench", *TINY, "--context", "8")
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide/sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def find_spec(name, path=None, target=None):\n"
        "    return None if name.split('.')[0] in ('torch', 'triton') else find(name, path, target)\n"
        "PathFinder.find_spec = find_spec\n"
    )
    hidden = {"PYTHONPATH": str(tmp_path / "hide")}
    shown = stepscope(tmp_path, "bench", "--from", "runs/bench/results.jsonl", **hidden)
    assert shown.returncode == 0, shown.stderr
    refused = stepscope(tmp_path, "bench", *TINY, **hidden)
    assert refused.returncode == 2
    assert "torch is not installed" in refused.stderr
    assert "pip install 'stepscope[train]'" in refused.stderr
    examined = stepscope(tmp_path, "doctor", **hidden)
    assert examined.returncode == 0
    assert "not installed" in examined.stdout
