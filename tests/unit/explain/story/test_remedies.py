"""Fixes to copy: every rule has one, commands parse, and Python code compiles."""

import ast
import shlex
from unittest.mock import patch

import msgspec
import pytest

from stepscope.explain.commands import fit_command, write_command
from stepscope.explain.questions import answer
from stepscope.explain.rules import RULES
from stepscope.explain.story import Materials
from stepscope.explain.story.missing import command_for
from stepscope.explain.story.run import advise, list_advice
from stepscope.findings import Advice, Finding
from stepscope.recording.store import Manifest
from stepscope.spec import Case, Scalar, build_case, grid_from_flags
from tests.unit.explain.story.story_materials import addition, product, record, record_ours
from tests.unit.recordings import Timeline

CODES = list(RULES)
SETTINGS: dict[str, dict[str, Scalar]] = {
    "named size": {"size": "small", "context": 256, "precision": "bf16"},
    "own widths": {"d_model": 96, "d_ff": 256, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "vocab": 500},
    "tied": {"d_model": 96, "d_ff": 256, "num_layers": 3, "num_heads": 6, "tie_embeddings": True},
    "all else": {
        "size": "medium",
        "batch": 2,
        "mode": "forward-backward",
        "attention": "flash",
        "compile": True,
        "checkpoint": "nested:2",
        "optimizer": "sgd",
        "seed": 3,
    },
    "micro-batches": {"size": "small", "batch": 8, "grad_accumulation": 4},
    "cpu": {"size": "nano", "device": "cpu"},
    "factory": {"model": "my_model:build"},
    "file": {"model": "models/my model.py:build", "context": 64},
    "no tokens": {"hf": "vit"},
    "transformers": {"hf": "gpt2", "attention": "sdpa"},
}


def finding(code: str) -> Finding:
    rule = RULES[code]
    return Finding(code=code, title="t", evidence="e", action=rule.action, fix=rule.paste)


def read_case(command: str) -> Case:
    """The case that a command describes."""
    program, _, *words = shlex.split(command)
    assert program == "stepscope"
    flags: dict[str, str] = {}
    arguments = []
    while words:
        name = words.pop(0).removeprefix("--").replace("-", "_")
        value = words.pop(0) if words and not words[0].startswith("--") else "yes"
        if name == "set":
            arguments.append(value)
        else:
            flags[name] = value
    return grid_from_flags(flags, arguments).cases()[0]


def advice_for(code: str, **settings: Scalar) -> Advice:
    case = build_case({"size": "small", "device": "cuda:0", **settings})
    return advise(finding(code), record_ours(product, case=case))


# --- Every rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_every_rule_has_something_to_copy_for_any_code(code: str) -> None:
    fixes = advise(finding(code), record(product)).fixes
    assert fixes
    for fix in fixes:
        if fix.text.startswith("stepscope "):
            assert shlex.split(fix.text)[1] in ("kernel", "rule", "doctor")
        elif fix.text.startswith("nsys "):
            assert shlex.split(fix.text, comments=True)[1] == "profile"
        else:
            ast.parse(fix.text)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("settings", [{}, {"compile": True, "attention": "flash", "checkpoint": "2"}])
def test_a_run_of_the_built_in_model_gets_commands_that_change_it(code: str, settings: dict[str, Scalar]) -> None:
    case = build_case({"size": "small", "device": "cuda:0", **settings})
    fixes = advise(finding(code), record_ours(product, case=case)).fixes
    if RULES[code].look_up is not None:
        assert len(fixes) == 1
        return
    for fix in fixes:
        assert fix.text.startswith("stepscope report")
        assert read_case(fix.text).workload != msgspec.structs.replace(case.workload, device="auto")


def test_a_flag_that_is_already_set_is_not_a_fix() -> None:
    assert "--compile" in advice_for("SS003").fixes[0].text
    assert advice_for("SS003", compile=True).fixes == ()
    compiled = read_case(advice_for("SS001", compile=True).fixes[0].text).workload
    assert (compiled.graph, compiled.batch) == (True, 4)
    assert read_case(advice_for("SS001", compile=True, graph=True).fixes[0].text).workload.batch == 8
    assert read_case(advice_for("SS001", compile=True, precision="fp16").fixes[0].text).workload.batch == 8


def test_each_flag_fixes_its_rule() -> None:
    def workload(code: str, **settings: Scalar) -> object:
        return read_case(advice_for(code, **settings).fixes[0].text).workload

    assert workload("SS002", precision="fp16") == build_case({"size": "small", "precision": "bf16"}).workload
    assert workload("SS004") == build_case({"size": "small", "attention": "flash"}).workload
    assert workload("SS005") == build_case({"size": "small", "precision": "tf32"}).workload
    assert workload("SS007") == build_case({"size": "small", "optimizer": "adamw-fused"}).workload
    assert workload("SS009", vocab=10_007) == build_case({"size": "small", "vocab": 10_048}).workload
    assert workload("SS013", checkpoint="2") == build_case({"size": "small"}).workload
    assert workload("SS015") == build_case({"size": "small", "batch": 8}).workload


def test_own_model_gets_a_command_and_code() -> None:
    case = build_case({"model": "my_model:build", "context": 128, "device": "cuda:0"})
    command, python = advise(finding("SS003"), record_ours(product, case=case)).fixes
    assert command.text == "stepscope report --model my_model:build --context 128 --compile"
    assert python.text == "model = torch.compile(model)"


@pytest.mark.parametrize("settings", [{"model": "my_model:build"}, {"hf": "gpt2"}])
def test_own_model_gets_no_command_that_does_something_else_than_advised(settings: dict[str, Scalar]) -> None:
    """The compiler is to choose the tiles, which no flag does. CUDA graphs of inference are the user's own."""
    profile, inference, captured = (
        record_ours(product, case=build_case({**settings, "compile": True, **more}))
        for more in ({}, {"mode": "inference"}, {"graph": True})
    )
    graphs = msgspec.structs.replace(finding("SS001"), action="Launch the compiled code with CUDA graphs", fix="code")
    grow = msgspec.structs.replace(graphs, action=RULES["SS015"].action)
    assert [fix.label for fix in advise(finding("SS010"), profile).fixes] == ["in your own code"]
    assert [fix.label for fix in advise(graphs, inference).fixes] == ["in your own code"]
    assert read_case(advise(graphs, profile).fixes[0].text).workload.graph
    assert read_case(advise(grow, captured).fixes[0].text).workload.batch == 2 * build_case(settings).workload.batch


@pytest.mark.parametrize("fix", ["stepscope explain rank*.json", "NCCL_DEBUG=INFO torchrun train.py"])
def test_shell_command_is_not_code(fix: str) -> None:
    (copyable,) = advise(msgspec.structs.replace(finding("SS011"), fix=fix), record(product)).fixes
    assert copyable.label == "in a shell"


@pytest.mark.parametrize("settings", [{"model": "my_model.py:build"}, {"hf": "gpt2"}])
def test_flag_fuses_the_adamw_of_an_own_model(settings: dict[str, Scalar]) -> None:
    profile = record_ours(product, case=build_case(settings), optimizer="adamw-torch")
    command, python = advise(finding("SS007"), profile).fixes
    assert read_case(command.text).workload == build_case({**settings, "optimizer": "adamw-fused"}).workload
    assert "fused=True" in python.text


def test_no_flag_replaces_the_optimizer_of_a_factory() -> None:
    """`--optimizer` would be rejected."""
    profile = record_ours(product, case=build_case({"model": "my_model:build"}), optimizer="AdamW")
    (python,) = advise(finding("SS007"), profile).fixes
    assert "fused=True" in python.text


@pytest.mark.parametrize("settings", [{"model": "my_model:build"}, {"hf": "gpt2"}, {"size": "small"}])
def test_precision_command_has_no_optimizer(settings: dict[str, Scalar]) -> None:
    """`stepscope precision` rejects it, because it runs no optimizer."""
    case = build_case({**settings, "optimizer": "sgd", "device": "cuda:0"})
    assert "--optimizer" not in command_for(Materials(name="a", profile=record_ours(product, case=case)), "precision")


def test_finding_without_a_fixing_flag_has_code_only() -> None:
    case = build_case({"model": "my_model:build", "device": "cuda:0"})
    (python,) = advise(finding("SS004"), record_ours(product, case=case)).fixes
    assert "scaled_dot_product_attention" in python.text
    assert advice_for("SS007", optimizer="adamw-fused").fixes == ()


def test_kernel_names_are_quoted_and_huge_ones_left_out() -> None:
    def longest(name: str) -> list[str]:
        def launch(timeline: Timeline) -> None:
            timeline.launch(name, 500)

        return [fix.text for fix in advise(finding("SS014"), record(product, launch)).fixes]

    (command,) = longest("evil'; rm -rf $HOME")
    assert shlex.split(command) == ["stepscope", "kernel", "evil'; rm -rf $HOME"]
    assert longest("a" * 5000) == []
    assert longest("two\nlines") == []


def test_advice_keeps_the_order_of_the_findings() -> None:
    found = (finding("SS001"), finding("SS019"))
    with patch("stepscope.explain.story.sources.find_once", return_value=found):
        advice = list_advice(Materials(name="a", profile=record_ours(product)))
    assert advice is not None
    assert [(one.finding.code, one.finding.is_remark) for one in advice] == [("SS001", False), ("SS019", True)]
    (stacks,) = advice[1].fixes
    assert "with_stack=True" in stacks.text


def test_a_finding_has_the_fixes_of_those_that_are_part_of_it() -> None:
    """One flag fixes SS001 and SS003, and another one SS004."""
    joined = msgspec.structs.replace(finding("SS001"), also=(finding("SS003"), finding("SS004")))
    compiled, flash = advise(joined, record_ours(product)).fixes
    assert compiled.text.endswith("--compile")
    assert flash.text.endswith("--attention flash")
    assert [fix.text for fix in advise(joined, record(product)).fixes] == [
        RULES[code].paste for code in ("SS001", "SS004")
    ]


# --- Commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_command_round_trips_the_workload(settings: dict[str, Scalar]) -> None:
    workload = build_case(settings).workload
    assert read_case(write_command("report", workload)).workload == workload


def test_command_round_trips_factory_arguments() -> None:
    workload = build_case({"model": "my_model:build", "set": {"depth": 4, "wide": True, "kind": "a b"}}).workload
    assert read_case(write_command("profile", workload)).workload == workload


def test_first_gpu_needs_no_flag() -> None:
    workload = build_case({"size": "small", "device": "cuda:0"}).workload
    assert write_command("report", workload) == "stepscope report --size small --context 128"
    second = msgspec.structs.replace(workload, device="cuda:1")
    assert write_command("report", second).endswith("--device cuda:1")


def test_command_of_a_question_gets_the_missing_settings() -> None:
    case = build_case({"size": "small", "context": 1024, "attention": "flash", "compile": True})
    ours = Manifest(source="pytorch profiler", case=case)
    settings = "--size small --context 1024 --attention flash"
    command = "stepscope profile --mode inference --out runs/i && stepscope explain a.json runs/i --questions"
    completed = f"stepscope profile {settings} --compile {command.removeprefix('stepscope profile ')}"
    assert fit_command(command, ours) == completed
    assert fit_command("stepscope memory --compile no", ours) == f"stepscope memory {settings} --compile no"
    for other in (
        "torch.profiler.profile(record_shapes=True)",
        "stepscope profile --size large",
        "stepscope doctor",
        "",
    ):
        assert fit_command(other, ours) == other


def test_no_command_of_a_foreign_trace_measures_the_built_in_model() -> None:
    """A question about someone's own model is not answered by measuring another one, and a command has no
    placeholder for a file that is known."""
    profile = record(product, addition, file="traces/my run.json")
    asked = [one.command for one in answer([profile]) if one.command]
    asked += [one.command for one in answer([record(product, steps=1, file="traces/my run.json")])]
    for command in (one for text in asked for one in text.split(" && ")):
        assert not command.startswith("stepscope profile") or "--model my_model:build" in command
        assert "RECORDING" not in command
    assert any("stepscope explain 'traces/my run.json' runs/" in command for command in asked)
