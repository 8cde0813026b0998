"""Labels of two runs: what differs, else the names of files, else before and after."""

from stepscope.explain.trace.run_labels import MOST_LABEL, RunIdentity, label_runs
from stepscope.spec import Scalar, build_case


def run(name: str = "run", *, device: str = "H200", torch: str = "2.13.0", **settings: Scalar) -> RunIdentity:
    return RunIdentity(name=name, case=build_case({"size": "small", **settings}), device=device, torch=torch)


def foreign(name: str) -> RunIdentity:
    return RunIdentity(name=name)


def test_settings_that_differ_name_the_runs() -> None:
    fast = run(precision="bf16", attention="flash", compile=True)
    assert label_runs(run(), fast) == ("fp32 + naive", "bf16 + flash + compile")
    assert label_runs(run(), run(compile=True)) == ("eager", "compile")
    assert label_runs(run(checkpoint="block"), run()) == ("checkpointing", "no checkpointing")
    assert label_runs(run(batch=4), run(batch=8)) == ("batch 4", "batch 8")
    assert label_runs(run(optimizer="adamw"), run(optimizer="adamw-fused")) == ("adamw", "adamw-fused")


def test_models_that_differ_name_the_runs() -> None:
    assert label_runs(run(), run(size="medium")) == ("small", "medium")
    assert label_runs(run(num_layers=2), run(num_layers=4)) == ("num_layers 2", "num_layers 4")


def test_device_or_version_names_equal_workloads() -> None:
    assert label_runs(run(device="H200"), run(device="A100")) == ("H200", "A100")
    assert label_runs(run(torch="2.12.0"), run(torch="2.13.0")) == ("PyTorch 2.12.0", "PyTorch 2.13.0")


def test_files_name_what_has_no_settings() -> None:
    assert label_runs(foreign("old/trace.json"), foreign("new/trace.json")) == ("old", "new")
    assert label_runs(foreign("a.json"), foreign("b.json")) == ("a.json", "b.json")
    assert label_runs(run("runs/a"), run("runs/b")) == ("a", "b")
    assert label_runs(run(), foreign("b.json")) == ("Small Transformer", "b.json")


def test_runs_that_nothing_distinguishes_are_before_and_after() -> None:
    assert label_runs(run(), run()) == ("before", "after")
    assert label_runs(foreign(""), foreign("x")) == ("before", "after")


def test_long_labels_are_clipped_and_stay_distinct() -> None:
    everything = run(
        precision="bf16",
        attention="flash",
        compile=True,
        checkpoint="2",
        grad_accumulation=2,
        optimizer="adamw-fused",
        batch=16,
        context=4096,
    )
    for labels in (label_runs(run(), everything), label_runs(foreign("a" * 500 + "1"), foreign("a" * 500 + "2"))):
        assert labels[0] != labels[1]
        assert all(len(label) <= MOST_LABEL for label in labels)
