"""Making a report with fake stages: what is kept, what is reported, and what an early end leaves."""

import fcntl
import io
import os
import re
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from stepscope.cli.report_progress import Display, Forecast
from stepscope.errors import StepscopeError
from stepscope.explain.story.sources import Materials
from stepscope.explain.trace.profile import Profile
from stepscope.files import FullDiskError
from stepscope.findings import STAGES
from stepscope.jobs.experiments.sweep import Planned
from stepscope.jobs.report import run as report
from stepscope.jobs.report import stages
from stepscope.jobs.report.data import is_data, read_state, write_state
from stepscope.jobs.report.run import Ending, Interrupted, Made, ReportJob, parse_stages, without_flags
from stepscope.jobs.report.stage import StageWork, UnavailableError
from stepscope.jobs.workers.messages import Failed, Probed, ProbedModel
from stepscope.jobs.workers.process import InputRefusedError, Workers
from stepscope.spec import Grid, Scalar, build_case, grid_from_flags
from tests.unit.attention_rows import attend
from tests.unit.recordings import BF16, GEMM_BF16, Timeline
from tests.unit.rows import ENVIRONMENT, row

GRID = grid_from_flags({"size": "small", "device": "cuda:0"})


class FakeStage:
    """Adds a bench row to the materials on every run, or raises a given error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.what = f"what {name} makes"
        self.error: BaseException | None = None
        self.runs = 0

    def keys(self, work: StageWork) -> tuple[str, ...]:
        return (f"{self.name}-{work.planned.key}",)

    def command(self, work: StageWork) -> str:
        return f"stepscope {self.name} --size {work.planned.case.workload.model.name}"

    def expected_s(self, _work: StageWork) -> float:
        return 1.0

    def load(self, folder: Path, _keys: Sequence[str], materials: Materials, /) -> Materials:
        if not (folder / self.name).exists():
            raise StepscopeError("gone")
        return replace(materials, bench=(*materials.bench, row()))

    def run(self, work: StageWork, materials: Materials) -> tuple[Materials, tuple[str, ...]]:
        self.runs += 1
        if self.error is not None:
            raise self.error
        (work.folder / self.name).touch()
        return self.load(work.folder, (), materials), self.keys(work)

    def tell(self, materials: Materials) -> str:
        return f"{len(materials.bench)} so far"


class NoWorkers:
    def __enter__(self) -> "NoWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass


class Heard:
    def __init__(self) -> None:
        self.endings: list[tuple[str, Ending]] = []
        self.planned: list[str] = []

    def plan(self, expected_s: Any) -> None:
        self.planned = list(expected_s)

    def start(self, stage: str) -> None:
        pass

    def doing(self, text: str) -> None:
        pass

    def finish(self, stage: str, ending: Ending, outcome: str) -> None:
        assert outcome
        self.endings.append((stage, ending))


class Bench:
    """A directory for reports, with stages that can fail, and the pages that were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.stages = {name: FakeStage(name) for name in STAGES}
        self.pages: list[Materials] = []
        self.source: str | None = None
        monkeypatch.setattr(stages, "ALL", tuple(self.stages.values()))
        monkeypatch.setattr(report, "require_torch", lambda: None)
        monkeypatch.setattr(report, "Workers", NoWorkers)
        monkeypatch.setattr(
            report,
            "look_at",
            lambda cases, *_: Probed(
                environment=ENVIRONMENT,
                models=(ProbedModel(source=self.source, takes_context=True),) * len(cases),
            ),
        )
        monkeypatch.setattr(report, "write_page", self._write)

    def _write(self, page: Path, runs: Sequence[Materials]) -> Any:
        self.pages.append(runs[0])
        page.write_text("a page")

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    def make(self, **options: Any) -> tuple[Made, Heard]:
        heard = Heard()
        words = ["stepscope", "report", *options.pop("words", ())]
        grid = options.pop("grid", GRID)
        job = ReportJob(page=self.page, words=words, data=self.folder / "data", **options)
        return job.run(grid, heard), heard


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


def test_page_is_written_after_every_stage(bench: Bench) -> None:
    made, heard = bench.make()
    assert heard.endings == [(name, Ending.DONE) for name in STAGES]
    assert heard.planned == list(STAGES)
    assert [len(page.bench) for page in bench.pages] == [1, 2, 3, 4, 5, 6]
    assert [page.is_partial for page in bench.pages] == [True] * 5 + [False]
    assert list(bench.pages[1].absent) == ["memory", "precision", "attention", "plan"]
    assert bench.pages[-1].absent == {}
    assert bench.pages[-1].command == "stepscope report"
    assert made.num_done == len(STAGES)


def test_finished_stages_are_reused(bench: Bench) -> None:
    bench.make()
    made, heard = bench.make()
    assert heard.endings == [(name, Ending.REUSED) for name in STAGES]
    assert [stage.runs for stage in bench.stages.values()] == [1] * 6
    assert made.num_done == len(STAGES)
    bench.make(fresh=True)
    assert [stage.runs for stage in bench.stages.values()] == [2] * 6


def test_optimise_runs_on_request_and_is_reused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = FakeStage("optimise")
    monkeypatch.setattr(stages, "ON_REQUEST", (asked,))
    _, heard = bench.make()
    assert asked.runs == 0
    _, heard = bench.make(optimise=True)
    assert heard.endings[-1] == ("optimise", Ending.DONE)
    assert heard.planned == ["optimise"]
    _, heard = bench.make()
    assert heard.endings[-1] == ("optimise", Ending.REUSED)
    bench.make(fresh=True)
    assert asked.runs == 1


def test_optimise_does_not_apply_to_every_step(tmp_path: Path) -> None:
    case = build_case({"precision": "fp16", "device": "cpu"})
    work = StageWork(
        folder=tmp_path,
        command="stepscope report",
        planned=Planned(case=case, environment=ENVIRONMENT, source=None),
        other=Planned(case=case, environment=ENVIRONMENT, source=None),
        workers=NoWorkers(),  # type: ignore[arg-type]
        fresh=False,
        on_stage=lambda _: None,
    )
    with pytest.raises(UnavailableError, match="precision `fp16` cannot be optimized: the loss scale"):
        stages.ON_REQUEST[0].run(work, Materials(name="a"))


def test_edited_model_and_lost_results_run_again(bench: Bench) -> None:
    bench.make()
    (bench.folder / "data" / "memory").unlink()
    bench.make()
    assert [stage.runs for stage in bench.stages.values()] == [1, 1, 2, 1, 1, 1]
    bench.source = "edited"
    bench.make()
    assert [stage.runs for stage in bench.stages.values()] == [2, 2, 3, 2, 2, 2]


def test_failed_stage_costs_only_its_section(bench: Bench) -> None:
    bench.stages["memory"].error = StepscopeError("oom: too much", hint="--batch 1")
    bench.stages["attention"].error = UnavailableError("nothing to do")
    made, heard = bench.make()
    assert ("memory", Ending.FAILED) in heard.endings
    missing = bench.pages[-1].absent["memory"]
    assert (missing.what, missing.why) == ("what memory makes", "oom: too much")
    assert missing.command == "stepscope memory --size small"
    assert not bench.pages[-1].is_partial
    assert made.num_done == 4
    bench.stages["memory"].error = None
    _, heard = bench.make()
    assert ("memory", Ending.DONE) in heard.endings
    assert list(bench.pages[-1].absent) == ["attention"]


def test_full_disk_ends_the_report(bench: Bench) -> None:
    """A page without a stage would look like a result, and the command would succeed."""
    bench.stages["profile"].error = FullDiskError("cannot write to `data/profile`: No space left on device")
    with pytest.raises(FullDiskError, match="No space left"):
        bench.make()
    assert [stage.runs for stage in bench.stages.values()][2:] == [0, 0, 0, 0]


def test_directory_keeps_the_reason_of_a_missing_stage(bench: Bench) -> None:
    bench.stages["plan"].error = StepscopeError("crash")  # the last stage: none is kept after it
    bench.make()
    assert read_state(bench.folder / "data").absent["plan"].why == "crash"
    bench.stages["plan"].error = UnavailableError("only for GPUs", hint="stepscope plan --gpu H200")
    bench.make()
    kept = read_state(bench.folder / "data").absent["plan"]
    assert (kept.why, kept.command) == ("only for GPUs", "stepscope plan --gpu H200")


def test_all_stages_failing_leaves_a_page_and_no_directory(bench: Bench) -> None:
    for stage in bench.stages.values():
        stage.error = StepscopeError("crash")
    made, _ = bench.make()
    assert made.num_done == 0
    assert set(bench.pages[-1].absent) == set(STAGES)
    assert not (bench.folder / "data").exists()


def test_all_stages_failing_keeps_an_older_page(bench: Bench) -> None:
    bench.page.write_text("an older page")
    for stage in bench.stages.values():
        stage.error = StepscopeError("crash")
    made, heard = bench.make()
    assert made.report is None
    assert bench.page.read_text() == "an older page"
    assert heard.endings == [(name, Ending.FAILED) for name in STAGES]


def test_bad_input_in_the_first_stage_raises(bench: Bench) -> None:
    bench.stages["attention"].error = UnavailableError("nothing to do")
    bench.stages["bench"].error = InputRefusedError(Failed(message="the factory raised", bad_input=True))
    with pytest.raises(StepscopeError, match="the factory raised"):
        bench.make()
    assert list(bench.folder.iterdir()) == []


def test_bad_input_in_a_later_stage_costs_only_its_section(bench: Bench) -> None:
    bench.stages["profile"].error = InputRefusedError(Failed(message="the factory raised", bad_input=True))
    bench.make()
    assert bench.pages[-1].absent["profile"].why == "the factory raised"


def test_rejected_report_keeps_the_results_of_another_case(bench: Bench) -> None:
    bench.make()
    before = read_state(bench.folder / "data")
    bench.source = "edited"
    bench.stages["bench"].error = InputRefusedError(Failed(message="the factory raised", bad_input=True))
    with pytest.raises(StepscopeError):
        bench.make()
    assert read_state(bench.folder / "data") == before


def test_interruption_leaves_a_page_and_the_command_to_resume(bench: Bench) -> None:
    bench.stages["memory"].error = KeyboardInterrupt()
    with pytest.raises(Interrupted) as raised:
        bench.make(words=["--fresh", "--size", "small"], fresh=True)
    assert raised.value.page == bench.page
    assert raised.value.go_on == "stepscope report --size small"
    page = bench.pages[-1]
    assert page.is_partial
    assert len(page.bench) == 2
    assert set(page.absent) == {"memory", "precision", "attention", "plan"}
    assert {missing.why for missing in page.absent.values()} == {"the report was interrupted"}
    assert {missing.command for missing in page.absent.values()} == {raised.value.go_on}
    bench.stages["memory"].error = None
    _, heard = bench.make()
    assert [ending for _, ending in heard.endings] == [Ending.REUSED] * 2 + [Ending.DONE] * 4


def test_empty_page_does_not_replace_an_older_one(bench: Bench) -> None:
    bench.page.write_text("an older page")
    bench.stages["bench"].error = KeyboardInterrupt()
    with pytest.raises(Interrupted) as raised:
        bench.make()
    assert raised.value.page is None
    assert bench.page.read_text() == "an older page"
    bench.page.unlink()
    with pytest.raises(Interrupted) as raised:
        bench.make()
    assert raised.value.page == bench.page
    assert set(bench.pages[-1].absent) == set(STAGES)


def test_stages_can_be_skipped(bench: Bench) -> None:
    _, heard = bench.make(words=["--without", "bench,memory"], without=("bench", "memory"))
    assert [name for name, ending in heard.endings if ending is Ending.LEFT_OUT] == ["bench", "memory"]
    missing = bench.pages[-1].absent["memory"]
    assert (missing.why, missing.command) == ("skipped with --without", "stepscope report")
    assert bench.stages["memory"].runs == 0


def test_unavailable_stage_has_a_reason(bench: Bench) -> None:
    bench.stages["attention"].error = UnavailableError("heads are not known")
    _, heard = bench.make()
    assert ("attention", Ending.LEFT_OUT) in heard.endings
    assert bench.pages[-1].absent["attention"].why == "heads are not known"


def test_two_reports_cannot_share_a_directory(bench: Bench) -> None:
    bench.make()
    descriptor = os.open(bench.folder / "data", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StepscopeError, match="another report is running"):
        bench.make()
    os.close(descriptor)


def test_foreign_directory_is_left_alone(bench: Bench) -> None:
    (bench.folder / "data").mkdir()
    (bench.folder / "data" / "thesis.tex").touch()
    with pytest.raises(StepscopeError, match="is not a report directory"):
        bench.make()
    assert not is_data(bench.folder / "data")
    assert bench.stages["bench"].runs == 0


def test_directory_of_another_case_is_left_alone(bench: Bench) -> None:
    bench.make()
    before = read_state(bench.folder / "data")
    with pytest.raises(StepscopeError, match="belongs to another case"):
        bench.make(grid=grid_from_flags({"size": "nano", "batch": "7"}))
    assert read_state(bench.folder / "data") == before
    assert bench.stages["bench"].runs == 1


@pytest.mark.parametrize("keys", [(), ("../../somewhere",)])
def test_invalid_keys_are_rejected(bench: Bench, keys: tuple[str, ...]) -> None:
    bench.make()
    state = read_state(bench.folder / "data")
    write_state(bench.folder / "data", msgspec.structs.replace(state, done={"memory": keys}))
    with pytest.raises(StepscopeError, match="not written by `stepscope report`"):
        read_state(bench.folder / "data")


# --- What was typed --------------------------------------------------------------------------------------------------


def test_stage_names_are_checked() -> None:
    assert parse_stages("precision, attention") == ("precision", "attention")
    with pytest.raises(StepscopeError) as raised:
        parse_stages("memry")
    assert raised.value.hint == "--without memory"
    with pytest.raises(StepscopeError, match="every stage"):
        parse_stages(",".join(STAGES))


def test_flags_are_removed_from_a_command() -> None:
    words = ["stepscope", "report", "--fresh", "--without", "bench", "--size", "nano", "--without=memory"]
    assert without_flags(words, "--fresh") == "stepscope report --without bench --size nano --without=memory"
    assert without_flags(words, "--fresh", "--without") == "stepscope report --size nano"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("page.txt", "unsupported file extension `.txt`"),
        ("missing/page.html", "directory not found"),
        ("folder.html", "is a directory"),
    ],
)
def test_unwritable_page_is_rejected_early(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(StepscopeError, match=says):
        report.check_page(tmp_path / name, force=True)


@pytest.mark.parametrize(("name", "hint"), [("a.html.txt", "a.html"), ("a.b.txt", "a.b.html"), ("a", "a.html")])
def test_hint_names_the_page_that_was_meant(name: str, hint: str) -> None:
    with pytest.raises(StepscopeError) as raised:
        report.check_page(Path(name), force=True)
    assert raised.value.hint == f"--out {hint}"


def test_only_earlier_pages_are_replaced_without_force(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html>mine</html>")
    with pytest.raises(StepscopeError, match="stepscope did not write it"):
        report.check_page(page, force=False)
    report.check_page(page, force=True)
    with pytest.raises(StepscopeError, match="an input file"):
        report.check_page(page, force=True, inputs=[page])
    report.write_page(page, [Materials(name="a run", bench=(row(),))])
    report.check_page(page, force=False)


def test_full_disk_keeps_the_old_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("the old one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StepscopeError, match="cannot write to"):
            report.write_page(page, [Materials(name="a run", bench=(row(),))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert page.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(("device", "size", "context"), [("cpu", "nano", 128), ("cuda:0", "small", 256)])
def test_default_case_depends_on_the_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, device: str, size: str, context: int
) -> None:
    environment = msgspec.structs.replace(ENVIRONMENT, device=device)
    builtin = ProbedModel(source=None, takes_context=True)
    monkeypatch.setattr(report, "look_at", lambda *_: Probed(environment=environment, models=(builtin,) * 2))
    monkeypatch.chdir(bench.folder)
    made = ReportJob(page=bench.page, words=["stepscope", "report"]).run(Grid(), Heard())
    assert made.data.parent == Path("runs/report")
    assert made.data.name == f"{size}-batch-4-context-{context}-fp32-train-naive-{device.replace(':', '-')}"
    workload = read_state(made.data).case.workload
    assert (workload.model.name, workload.context, workload.device) == (size, context, device)


# --- While it runs ---------------------------------------------------------------------------------------------------


def test_display_has_a_line_per_stage() -> None:
    console = Console(width=60, file=io.StringIO())
    display = Display(console)
    display.finish("bench", Ending.REUSED, "95.1 ms per step")
    display.plan({"profile": 5.0, "memory": 6.0})
    display.start("profile")
    display.doing("warming up \x1b[31m" + "and on " * 20)
    console.print(display.render())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "bench      95.1 ms per step (reused; --fresh runs it again)"
    assert lines[1].startswith(r"profile    warming up \u001b[31mand on")
    assert len(lines[1]) == 60
    assert lines[1].endswith("…")
    assert lines[2] == "memory     waiting"
    assert lines[3] == "0 s elapsed, about 11 s left"
    display.finish("profile", Ending.FAILED, "oom")
    display.start("memory")
    display.finish("memory", Ending.DONE, "peak 1 MiB")
    display.close()
    console.print(display.render())
    assert console.file.getvalue().splitlines()[5:] == [  # type: ignore[attr-defined]
        "profile    failed: oom",
        "memory     peak 1 MiB  0 s",
    ]


def test_time_left_scales_with_finished_stages() -> None:
    forecast = Forecast()
    forecast.plan({"bench": 2.0, "profile": 4.0, "memory": 6.0})
    assert forecast.left_s("bench", 1.0) == 11.0
    forecast.take("bench", 4.0)
    assert forecast.left_s("profile", 0.0) == 20.0
    assert forecast.left_s("profile", 3.0) == 17.0
    assert forecast.left_s("profile", 100.0) == 12.0
    forecast.take("profile", 8.0)
    forecast.take("memory", 12.0)
    assert forecast.left_s("", 0.0) == 0.0


# --- Stages ----------------------------------------------------------------------------------------------------------


def work_on(**settings: Scalar) -> StageWork:
    case = build_case(settings)
    environment = msgspec.structs.replace(ENVIRONMENT, device=case.workload.device)
    planned = Planned(case=case, environment=environment, source=None)
    return StageWork(
        folder=Path("data"),
        command="stepscope report",
        planned=planned,
        other=planned,
        workers=cast(Workers, NoWorkers()),
        fresh=False,
        on_stage=lambda _: None,
    )


def test_stage_commands_are_valid() -> None:
    work = work_on(size="nano", device="cpu", compile=True, precision="bf16", attention="flash", checkpoint="block")
    said = {stage.name: stage.command(work) for stage in stages.ALL}
    assert said["memory"].startswith("stepscope memory --size nano")
    assert "--compile" in said["memory"]
    assert "--compile" not in said["precision"]
    assert "--checkpoint" not in said["precision"]
    assert "--context 32" in said["precision"]
    assert said["attention"] == (
        "stepscope attention --batch 4 --heads 4 --head-dim 32 --length 64,128,256 --precision bf16"
    )


@pytest.mark.parametrize(
    ("device", "precision", "implementations"),
    [
        ("cpu", "fp32", {"naive", "sdpa", "tiled"}),
        ("cuda:0", "fp32", {"naive", "sdpa-efficient", "triton"}),
        ("cuda:0", "bf16", {"naive", "sdpa-flash", "sdpa-efficient", "sdpa-cudnn", "triton", "hopper"}),
    ],
)
def test_attention_implementations_depend_on_the_device(device: str, precision: str, implementations: set[str]) -> None:
    planned = stages.AttentionStage().plan(work_on(size="small", device=device, precision=precision), None)
    assert {one.case.implementation for one in planned} == implementations


def attending(**settings: Any) -> Profile:
    """A call of SDPA with two queries per key."""
    timeline = Timeline()
    shapes = [[2, 8, 300, 64], [2, 4, 300, 64], [2, 4, 300, 64], [], [], []]
    call = {
        "shapes": shapes,
        "dtypes": [BF16] * 3 + ["", "Scalar", "Scalar"],
        "arguments": ["", "", "", "", "0.", "False"],
    }
    with timeline.step():
        timeline.launch(GEMM_BF16, 10, **{"op": "aten::scaled_dot_product_attention", **call, **settings})
    return timeline.profile()


def test_attention_of_other_models_has_the_recorded_shape() -> None:
    stage, work = stages.AttentionStage(), work_on(model="mine:build", device="cpu", precision="bf16")
    planned = stage.plan(work, attending())
    shapes = {(one.case.batch, one.case.heads, one.case.head_dim, one.case.causal) for one in planned}
    assert shapes == {(2, 8, 64, False)}
    assert {one.case.length for one in planned} == {150, 300, 600}
    assert {one.case.precision for one in planned} == {"bf16"}
    assert {one.case.causal for one in stage.plan(work, attending(arguments=["", "", "", "", "0.", "True"]))} == {True}
    # Its rows are not known before it is profiled: a key of the case stands for them.
    assert stage.keys(work) == (f"case-{work.planned.key}",)
    assert stage.expected_s(work) > 0
    assert stage.command(work) == "stepscope attention"


def test_rows_of_other_models_are_found_again(tmp_path: Path) -> None:
    """A state with the stage's keys is valid, and the key of the case is not looked for among the rows."""
    stage, work = stages.AttentionStage(), work_on(model="mine:build")
    one = attend("naive")
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "results.jsonl").write_bytes(msgspec.json.encode(one) + b"\n")
    keys = (*stage.keys(work), one.key)
    assert all(re.fullmatch(r"[\w-]{1,64}", key) for key in keys)
    assert stage.load(tmp_path, keys, Materials(name="mine")).attention == (one,)
    with pytest.raises(StepscopeError, match="no longer has the rows"):
        stage.load(tmp_path, (*keys, "0" * 16), Materials(name="mine"))


def test_attention_of_other_models_requires_a_recording_that_shows_it() -> None:
    stage, work = stages.AttentionStage(), work_on(model="mine:build")
    with pytest.raises(UnavailableError, match="profile stage"):
        stage.plan(work, None)
    cross = [[2, 8, 300, 64], [2, 8, 77, 64], [2, 8, 77, 64]]
    for profile in (attending(op="aten::mm"), attending(shapes=cross), attending(shapes=None)):
        with pytest.raises(UnavailableError, match="no self-attention"):
            stage.plan(work, profile)
