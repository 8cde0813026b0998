"""Where a run is kept, and what may be replaced there."""

from pathlib import Path

import msgspec
import pytest

from stepscope.errors import StepscopeError
from stepscope.loop.place import RunPlace, choose_place, is_run, read_run
from stepscope.recording.rows.loop_run import RUN_NAME

COMMAND = "stepscope run train.py"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(place: RunPlace, *, command: str = COMMAND, script: str = "train.py", force: bool = False) -> None:
    place.prepare(command=command, script=script, world_size=1, force=force)


def fill(place: RunPlace) -> None:
    """What a complete run leaves."""
    for name in ("rank-0", "rank-1", "memory", "oom", "rank-2.raw"):
        (place.folder / name).mkdir()
        (place.folder / name / "manifest.json").write_text("{}")
    place.page.write_text('<!DOCTYPE html><meta name="generator" content="stepscope 1">')


@pytest.mark.parametrize(
    ("script", "folder"),
    [
        ("train.py", "train"),
        ("src/pretrain_gpt.py", "pretrain_gpt"),
        ("-m package.train", "package.train"),
        ("my train (2).py", "my-train-2"),
        ("..", "run"),
        ("über.py", "über"),
    ],
)
def test_without_out_the_directory_is_named_after_the_script(here: Path, script: str, folder: str) -> None:
    place = choose_place(None, script)
    assert place == RunPlace(folder=here / "runs/run" / folder, page=here / "report.html", is_default=True)


def test_out_is_the_page_or_the_directory(here: Path) -> None:
    page = choose_place("pages/today.HTML", "train.py")
    assert (page.page, page.folder) == (here / "pages/today.HTML", here / "runs/run/train")
    folder = choose_place(Path("runs/today"), "train.py")
    assert (folder.page, folder.folder) == (here / "runs/today/report.html", here / "runs/today")
    assert page.is_default
    assert not folder.is_default


def test_paths_stay_when_the_script_changes_its_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = choose_place("runs/today", "train.py")
    prepare(place)
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert is_run(place.folder)
    assert place.raw_folder(3) == here / "runs/today/rank-3.raw"


def test_the_directory_says_what_is_common_to_all_ranks() -> None:
    place = choose_place("runs/today", "train.py")
    place.prepare(command=COMMAND, script="train.py", world_size=8, force=False)
    facts = read_run(place.folder)
    assert (facts.command, facts.script, facts.world_size, facts.page) == (COMMAND, "train.py", 8, "report.html")
    outside = choose_place("today.html", "train.py")
    prepare(outside)
    assert read_run(outside.folder).page == "../../../today.html"
    assert (outside.folder / read_run(outside.folder).page).resolve() == outside.page


def test_the_same_command_replaces_its_run() -> None:
    place = choose_place("runs/today", "train.py")
    prepare(place)
    fill(place)
    prepare(place)
    assert sorted(path.name for path in place.folder.iterdir()) == ["report.html", RUN_NAME]


def test_another_command_is_refused_unless_forced() -> None:
    place = choose_place("runs/today", "train.py")
    prepare(place)
    fill(place)
    with pytest.raises(StepscopeError, match="`runs/today` already has a run") as caught:
        prepare(place, command="stepscope run other.py")
    assert caught.value.detail == f"made by: {COMMAND}"
    assert caught.value.hint is not None
    assert "--force" in caught.value.hint
    assert (place.folder / "rank-0/manifest.json").exists()
    prepare(place, command="stepscope run other.py", force=True)
    assert read_run(place.folder).command == "stepscope run other.py"
    assert not (place.folder / "rank-0").exists()


def test_a_directory_that_nobody_named_is_replaced_for_the_same_script() -> None:
    place = choose_place(None, "train.py")
    prepare(place)
    prepare(place, command="stepscope run train.py --lr 2")
    assert read_run(place.folder).command == "stepscope run train.py --lr 2"
    with pytest.raises(StepscopeError, match="already has a run"):
        prepare(place, command="stepscope run sub/train.py", script="another train.py")


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_of_something_else_is_never_touched(here: Path, *, force: bool) -> None:
    (here / "data").mkdir()
    (here / "data/photo.jpg").write_text("")
    with pytest.raises(StepscopeError, match="`data` is not the directory of a run"):
        prepare(choose_place("data", "train.py"), force=force)
    assert [path.name for path in (here / "data").iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "rank-x", "rank-0x/manifest.json", "models/best.pt"])
def test_a_foreign_file_in_a_run_is_never_deleted(name: str, *, force: bool) -> None:
    place = choose_place("runs/today", "train.py")
    prepare(place)
    fill(place)
    foreign = place.folder / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    with pytest.raises(StepscopeError, match="is not part of the run"):
        prepare(place, force=force)
    assert foreign.read_text() == "mine"
    assert (place.folder / "rank-0/manifest.json").exists()


def test_a_file_is_not_a_directory(here: Path) -> None:
    (here / "model").write_text("")
    with pytest.raises(StepscopeError, match="is not a directory"):
        prepare(choose_place("model", "train.py"))


def test_an_empty_directory_is_used(here: Path) -> None:
    (here / "runs").mkdir()
    prepare(choose_place("runs", "train.py"))
    assert is_run(here / "runs")


def test_a_page_of_someone_else_is_replaced_only_with_force(here: Path) -> None:
    (here / "index.html").write_text("<h1>Home</h1>")
    place = choose_place("index.html", "train.py")
    with pytest.raises(StepscopeError, match=r"index\.html"):
        prepare(place)
    assert (here / "index.html").read_text() == "<h1>Home</h1>"
    prepare(place, force=True)


def test_a_directory_that_cannot_be_written_is_an_error(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(StepscopeError, match="cannot write to"):
        prepare(choose_place("file/inside", "train.py"))


def test_a_damaged_run_is_an_error(here: Path) -> None:
    place = choose_place("runs/today", "train.py")
    prepare(place)
    (place.folder / RUN_NAME).write_bytes(msgspec.json.encode({"schema": "stepscope.run/1", "command": 3}))
    with pytest.raises(StepscopeError, match="not written by `stepscope run`"):
        read_run(place.folder)
    assert not is_run(here / "missing")
