"""Labels of two runs: what differs, else the names of files, else before and after."""

from stepscope.explain.trace.run_labels import MOST_LABEL, RunIdentity, label_pair, label_runs
from stepscope.spec import Scalar, build_case


def run(name: str = "run", *, device: str = "H200", torch: str = "2.13.0", **settings: Scalar) -> RunIdentity:
    return RunIdentity(name=name, case=build_case({"size": "small", **settings}), device=device, torch=torch)


def foreign(name: str) -> RunIdentity:
    return RunIdentity(name=name)


def test_settings_that_differ_name_the_runs() -> None:
    fast = run(precision="bf16", attention="flash", compile=True)
    assert label_pair(run(), fast) == ("fp32 + naive", "bf16 + flash + compile")
    assert label_pair(run(), run(compile=True)) == ("eager", "compile")
    assert label_pair(run(checkpoint="block"), run()) == ("checkpointing", "no checkpointing")
    assert label_pair(run(batch=4), run(batch=8)) == ("batch 4", "batch 8")
    assert label_pair(run(optimizer="adamw"), run(optimizer="adamw-fused")) == ("adamw", "adamw-fused")


def test_models_that_differ_name_the_runs() -> None:
    assert label_pair(run(), run(size="medium")) == ("small", "medium")
    assert label_pair(run(num_layers=2), run(num_layers=4)) == ("num_layers 2", "num_layers 4")


def test_device_or_version_names_equal_workloads() -> None:
    assert label_pair(run(device="H200"), run(device="A100")) == ("H200", "A100")
    assert label_pair(run(torch="2.12.0"), run(torch="2.13.0")) == ("PyTorch 2.12.0", "PyTorch 2.13.0")


def test_files_name_what_has_no_settings() -> None:
    assert label_pair(foreign("old/trace.json"), foreign("new/trace.json")) == ("old", "new")
    assert label_pair(foreign("a.json"), foreign("b.json")) == ("a.json", "b.json")
    assert label_pair(run("runs/a"), run("runs/b")) == ("a", "b")
    assert label_pair(run(), foreign("b.json")) == ("Small Transformer", "b.json")


def test_runs_that_nothing_distinguishes_are_before_and_after() -> None:
    assert label_pair(run(), run()) == ("before", "after")
    assert label_pair(foreign(""), foreign("x")) == ("before", "after")


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
    for labels in (label_pair(run(), everything), label_pair(foreign("a" * 500 + "1"), foreign("a" * 500 + "2"))):
        assert labels[0] != labels[1]
        assert all(len(label) <= MOST_LABEL for label in labels)


def test_many_runs_are_named_by_what_differs_between_any_of_them() -> None:
    runs = [run(), run(precision="bf16"), run(precision="bf16", compile=True)]
    assert label_runs(runs) == ("fp32", "bf16", "bf16 + compile")
    assert label_runs([run(size="small"), run(size="medium"), run(size="large")]) == ("small", "medium", "large")
    paths = [foreign(f"runs/bench-{commit}/results.jsonl") for commit in ("4abf962", "cc5a586", "1e4a9ec")]
    assert label_runs(paths) == ("bench-4abf962", "bench-cc5a586", "bench-1e4a9ec")


def test_repeated_runs_among_others_have_settings_and_a_name() -> None:
    runs = [run("runs/a"), run("runs/b", precision="bf16"), run("runs/c", precision="bf16")]
    assert label_runs(runs) == ("fp32 + a", "bf16 + b", "bf16 + c")
    assert label_runs([run("runs/a"), run("runs/b"), run("runs/c")]) == ("a", "b", "c")
    assert label_runs([run(), run(), run()]) == ("run 1", "run 2", "run 3")
