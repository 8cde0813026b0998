"""`stepscope run` on scripts that do whatever a script may do. The docstring of each says what must happen."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from stepscope.files import is_ours
from stepscope.recording.rows.loop_run import LoopFacts
from stepscope.recording.store import Manifest
from tests.cli.command import PATIENCE_S, kill, run_anew, start, stepscope, wait_until, workers

SCRIPTS = Path(__file__).parent / "scripts"
FINISHER = "stepscope.api.finish_run"
NOT_FOUND, TOO_FEW = "no training steps found: saw", "nothing was recorded: the script ran"
# A loop that can be changed by what follows it, in files of the tests' own.
LOOP = """\
import os, signal, sys, time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    model(torch.randn(2, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {in_loop}
{after}
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A script and what must happen. Everything in `out` and `err` is printed, nothing in `never` is."""

    script: str
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    status: int = 0
    out: tuple[str, ...] = ()
    err: tuple[str, ...] = ()
    never: tuple[str, ...] = ("Traceback", "error:")
    page: bool = True
    anew: bool = False  # in a new Python: it depends on how that starts, imports torch or ends

    def __str__(self) -> str:
        return " ".join((self.script, *self.arguments))


CASES = (
    Case(script="at_exit.py", out=("done\ntrained at exit",), page=False, anew=True),
    Case(script="chdir.py", out=("done",)),
    Case(script="closes_outputs.py"),
    Case(script="ends_while_recorded.py", out=("done",), err=(f"{TOO_FEW} 12 steps; 22 are needed",), page=False),
    Case(script="ends_while_recorded.py", options=("--skip", "2", "--steps", "5"), err=("recorded 4 steps",)),
    Case(script="exits.py", status=3),
    Case(script="exits.py", arguments=("4",), status=3, err=(f"{TOO_FEW} 5 steps",), page=False),
    Case(script="forks.py", out=("parent 40", "child 40"), err=("recorded 3 steps",)),
    Case(script="gan.py", out=("done",), err=("optimizer steps of RMSprop and Adam, 2 backward passes per step",)),
    Case(script="hooks_left.py", out=("clean",)),
    Case(script="inference.py", err=(f"{NOT_FOUND} no optimizer, backward pass", "stepscope.record"), page=False),
    Case(script="interrupted.py", arguments=("35",), out=("saved after 35 steps",)),
    Case(script="late_optimizer.py", out=("done",), err=("optimizer steps of SGD",)),
    Case(script="lbfgs.py", out=("done",), err=("optimizer steps of LBFGS",)),
    Case(script="no_optimizer.py", err=(f"{NOT_FOUND} 40 backward passes", "stepscope.record"), page=False),
    Case(script="no_torch.py", out=("done",), err=("the script did not import torch",), page=False, anew=True),
    Case(script="os_exit.py", status=4, anew=True),
    Case(script="os_exit.py", arguments=("4",), status=4, err=(f"{TOO_FEW} 5 steps",), page=False),
    Case(
        script="own_flags.py",
        arguments=("--steps", "40", "--out", "mine", "--stop"),
        out=("steps=40 out=mine stop=True",),
    ),
    Case(script="own_flags.py", arguments=("--help",), out=("usage: own_flags.py",), err=(NOT_FOUND,), page=False),
    Case(script="own_profiler.py", out=("done",), err=("another profiler was active until the end",), page=False),
    Case(script="pickles.py", out=("loaded",)),
    Case(
        script="raises.py",
        status=1,
        err=("Traceback (most recent call last):\n  File ", "broken in step 5", f"{TOO_FEW} 6 steps"),
        never=("loop/script.py", "error:"),
        page=False,
    ),
    Case(script="raises.py", arguments=("30",), status=1, err=("broken in step 30",), never=("loop/script.py",)),
    Case(script="replaces_stdout.py", err=("found steps", "page: "), anew=True),
    Case(script="scheduled_profiler.py", out=("done",)),
    Case(script="sibling_import.py", out=("done",), anew=True),
    Case(script="skipped_steps.py", out=("done",)),
    Case(script="spawn_workers.py", out=("40 batches",), never=("Traceback", "bootstrapping")),
    Case(script="step_in_backward.py", out=("done",)),
    Case(script="threads.py", out=("a done", "b done"), err=("recorded 3 steps",)),
    Case(script="too_short.py", err=(f"{TOO_FEW} 4 steps", "(9 with --skip 2)"), page=False),
    Case(script="trains_in_a_thread.py", out=("done",)),
    Case(script="uneven_accumulation.py", out=("44 steps",), err=("4 backward passes per step",)),
    Case(script="warnings_as_errors.py", out=("done",), anew=True),
    Case(script="latin1.txt", out=("caf",)),
    Case(
        script="not_utf8.txt",
        status=1,
        err=("SyntaxError", "can't decode byte 0xe9"),
        never=("loop/script.py",),
        page=False,
    ),
    Case(script="syntax_error.txt", status=1, err=("SyntaxError", "line 9"), never=("loop/script.py",), page=False),
)


def read_facts(folder: Path) -> LoopFacts:
    manifest = msgspec.json.decode((folder / "run/rank-0/manifest.json").read_bytes(), type=Manifest)
    assert manifest.loop is not None
    return manifest.loop


def run(folder: Path, *arguments: str, anew: bool = False) -> "subprocess.CompletedProcess[str]":
    if anew:
        return run_anew(folder, "run", "--out", "run", *arguments, PYTHONIOENCODING="utf-8")
    return stepscope(folder, "run", "--out", "run", *arguments)


def write_script(folder: Path, *, in_loop: str = "", after: str = "") -> str:
    (folder / "train.py").write_text(LOOP.format(in_loop=in_loop or "pass", after=after))
    return "train.py"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_script_does_what_it_does_alone(tmp_path: Path, case: Case) -> None:
    done = run(tmp_path, *case.options, str(SCRIPTS / case.script), *case.arguments, anew=case.anew)
    assert done.returncode == case.status, done.stderr
    for text in case.out:
        assert done.stdout.count(text) == 1, done.stdout
    for text in case.err:
        assert text in done.stderr
    for text in case.never:
        assert text not in done.stdout + done.stderr
    assert is_ours(tmp_path / "run/report.html") == case.page, done.stderr
    assert [path.name for path in (tmp_path / "run").glob("*.raw")] == []
    check = CHECKS.get(case.script)
    if check is not None and case.page:
        check(tmp_path)


def check_gan(folder: Path) -> None:
    facts = read_facts(folder)
    assert set(facts.optimizers) == {"RMSprop", "Adam"}
    assert facts.backwards_per_step == pytest.approx(2, abs=0.1)


def check_lbfgs(folder: Path) -> None:
    assert read_facts(folder).backwards_per_step >= 3


def check_accumulation(folder: Path) -> None:
    assert read_facts(folder).backwards_per_step == pytest.approx(4, abs=0.2)


def check_skipped(folder: Path) -> None:
    facts = read_facts(folder)
    assert facts.uses_scaler
    assert facts.skipped_steps == pytest.approx(facts.steps_seen / 5, abs=1)


def check_single_parameters(folder: Path) -> None:
    facts = read_facts(folder)
    assert facts.backwards_per_step == pytest.approx(1, abs=0.1)
    assert facts.optimizers == ("SGD",)


def check_forks(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["rank-0", "report.html", "run.json"]


def check_log(folder: Path) -> None:
    log = (folder / "log.txt").read_text().splitlines()
    assert log == [f"step {step}" for step in range(40)]


def check_own_trace(folder: Path) -> None:
    text = (folder / "own_trace.json").read_text()
    assert text.count('"ProfilerStep#') == 3
    assert "step:0" not in text
    assert any("another profiler" in note for note in read_facts(folder).notes)


def check_loader(folder: Path) -> None:
    (loader,) = read_facts(folder).loaders
    assert (loader.dataset, loader.num_workers, loader.batch_size) == ("Numbers", 1, 4)


CHECKS = {
    "gan.py": check_gan,
    "lbfgs.py": check_lbfgs,
    "uneven_accumulation.py": check_accumulation,
    "skipped_steps.py": check_skipped,
    "step_in_backward.py": check_single_parameters,
    "forks.py": check_forks,
    "replaces_stdout.py": check_log,
    "scheduled_profiler.py": check_own_trace,
    "spawn_workers.py": check_loader,
}


def test_every_script_has_a_case() -> None:
    elsewhere = {"names.py", "same_result.py", "long_loop.py", "ignores_interrupts.py", "sibling_model.py"}
    there = {path.name for path in SCRIPTS.iterdir() if path.is_file()}
    assert there - elsewhere == {case.script for case in CASES}


@pytest.mark.parametrize(("script", "arguments"), [("names.py", ["a", "--b"]), ("same_result.py", [])])
def test_a_script_prints_what_it_prints_alone(tmp_path: Path, script: str, arguments: list[str]) -> None:
    command = [str(SCRIPTS / script), *arguments]
    alone = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run(tmp_path, *command, anew=script == "names.py").stdout == alone.stdout


# --- Options ----------------------------------------------------------------------------------------------------------


def test_a_module_runs_as_with_python(tmp_path: Path) -> None:
    command = ["-m", "package.train", "--lr", "2"]
    done = run_anew(SCRIPTS, "run", "--out", str(tmp_path / "run"), *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ package package.train\n['--lr', '2']\n"
    assert read_facts(tmp_path).script == "-m package.train"


@pytest.mark.parametrize(
    ("target", "message"), [("missing.py", "file not found: `missing.py`"), (".", "`.` is a directory")]
)
def test_what_is_not_a_script_is_an_error(tmp_path: Path, target: str, message: str) -> None:
    done = stepscope(tmp_path, "run", target)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_stop_ends_the_script_after_the_recording(tmp_path: Path) -> None:
    script = write_script(tmp_path, after="print('trained')")
    done = run(tmp_path, "--stop", "--skip", "3", script)
    assert (done.returncode, done.stdout) == (0, "")
    assert is_ours(tmp_path / "run/report.html")
    assert "Traceback" not in done.stderr


def test_out_names_the_page_and_a_second_run_replaces_it(tmp_path: Path) -> None:
    """The directory is named after the script. The same script may run again, with other arguments."""
    script = write_script(tmp_path)
    for _ in range(2):
        done = stepscope(tmp_path, "run", "--out", "today.html", "--skip", "2", "--steps", "1", script)
        assert done.returncode == 0, done.stderr
    assert is_ours(tmp_path / "today.html")
    assert (tmp_path / "runs/run/train/rank-0/manifest.json").is_file()


def test_another_command_does_not_replace_a_run_without_force(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch")
    (tmp_path / "b.py").write_text("print('ran')")
    assert run(tmp_path, "a.py").returncode == 0
    refused = run(tmp_path, "b.py")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "already has a run" in refused.stderr
    assert "a.py" in refused.stderr
    assert run(tmp_path, "--force", "b.py").stdout == "ran\n"


def test_help_lists_the_options(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "run", "--help", COLUMNS="200")
    assert done.returncode == 0
    for option in ("-m", "--steps", "--skip", "--out", "--stop", "--sources", "--force"):
        assert option in done.stdout


# --- Signals and faults -----------------------------------------------------------------------------------------------


@pytest.fixture
def slow_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that writes the page waits first."""
    (tmp_path / "slow").mkdir()
    code = f"import sys, time\nif {FINISHER!r} in sys.orig_argv:\n    time.sleep(600)\n"
    (tmp_path / "slow/sitecustomize.py").write_text(code)
    paths = [str(tmp_path / "slow"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def said(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()


@pytest.mark.usefixtures("slow_page")
@pytest.mark.parametrize("end", ["", "os._exit(0)"])
def test_ctrl_c_while_the_page_is_written_ends_it(tmp_path: Path, end: str) -> None:
    process = start(tmp_path, "run", "--out", "run", write_script(tmp_path, after=end))
    wait_until(lambda: "Ctrl-C to skip" in said(tmp_path) or process.poll() is not None)
    wait_until(lambda: bool(workers(tmp_path / "run", FINISHER)) or process.poll() is not None)
    assert kill(process, signal.SIGINT) == 130
    assert workers(tmp_path / "run", FINISHER) == []
    assert "stopped before the page was complete" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)


def test_ctrl_c_in_the_script_is_the_scripts_own(tmp_path: Path) -> None:
    script = write_script(tmp_path, in_loop="if step == 35: signal.raise_signal(signal.SIGINT)")
    done = run(tmp_path, script, anew=True)
    assert done.returncode == -signal.SIGINT  # as of any Python that is interrupted
    assert "KeyboardInterrupt" in done.stderr
    assert is_ours(tmp_path / "run/report.html")


def test_the_page_appears_if_the_script_is_killed_after_the_recording(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "--out", "run", write_script(tmp_path, after="time.sleep(600)"))
    wait_until(lambda: "recorded 3 steps" in said(tmp_path) or process.poll() is not None)
    assert kill(process) == -signal.SIGKILL
    wait_until(lambda: "page: " in said(tmp_path))
    assert is_ours(tmp_path / "run/report.html")


def test_a_disk_without_space_for_the_trace_does_not_stop_the_script(tmp_path: Path) -> None:
    """Files cannot grow beyond some kilobytes, in which the trace does not fit."""
    script = write_script(tmp_path, after="print('trained')\nsys.exit(5)")
    command = f"ulimit -f 8; exec {sys.executable} -m stepscope run --out run {script}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (5, "trained\n"), done.stderr
    assert "stepscope: error: nothing was recorded: cannot write to" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run/report.html").exists()
