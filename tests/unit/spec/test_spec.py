"""Flags, TOML and Python give the same workloads, and invalid ones are rejected with a hint."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.spec import (
    RUN_SETTINGS,
    SETTINGS,
    SHAPE_SETTINGS,
    SIZES,
    TIMING_SETTINGS,
    Case,
    Factory,
    ModelShape,
    Scalar,
    Setting,
    SpecError,
    Timing,
    Workload,
    build_case,
    grid_from_flags,
    grid_from_toml,
    parse_bytes,
    with_precision,
)
from stepscope.spec.settings import declared


def test_flags_toml_and_python_give_the_same_case(tmp_path: Path) -> None:
    by_flags = grid_from_flags({"size": "small", "context": "256", "precision": "bf16", "memory_limit": "24GB"})
    file = tmp_path / "grid.toml"
    file.write_text('size = "small"\ncontext = 256\nprecision = "bf16"\nmemory_limit = "24GB"\n')
    by_hand = Case(
        workload=Workload(model=SIZES["small"], context=256, precision="bf16"),
        timing=Timing(memory_limit=24 * 10**9),
    )
    assert by_flags.cases() == grid_from_toml(file).cases() == (by_hand,)


def test_grid_is_the_product_of_its_axes_first_axis_slowest() -> None:
    cases = grid_from_flags({"size": "small,medium", "context": "128,256", "warmup": "0,5"}).cases()
    seen = [(c.workload.model.name, c.workload.context, c.timing.warmup) for c in cases]
    assert seen == [(s, c, w) for s in ("small", "medium") for c in (128, 256) for w in (0, 5)]


def test_a_value_given_twice_counts_once() -> None:
    assert len(grid_from_flags({"context": "128,128,256"}).cases()) == 2


def test_flags_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text("context = [128, 256]\nbatch = 2\n")
    (case,) = grid_from_toml(file).override(grid_from_flags({"context": "64"})).cases()
    assert (case.workload.context, case.workload.batch) == (64, 2)


def test_model_arguments_are_axes_too() -> None:
    cases = grid_from_flags({"model": "mine:build"}, ["depth=2,4", "fast=true", "name=a"]).cases()
    models = [c.workload.model for c in cases]
    assert [m.arguments for m in models if isinstance(m, Factory)] == [
        (("depth", depth), ("fast", True), ("name", "a")) for depth in (2, 4)
    ]


def test_case_survives_json() -> None:
    case = build_case({"hf": "gpt2", "set": {"n_layer": 2}, "compile": True})
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case) == case


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"size": "smal"}, ("smal", "did you mean `small`")),
        ({"num_heads": "5"}, ("num_heads `5`", "d_model `128`", "--num-heads 4")),
        ({"num_kv_heads": "3"}, ("num_kv_heads `3`", "--num-kv-heads 2")),
        ({"d_model": "12", "num_heads": "4"}, ("odd", "--d-model 16")),
        ({"batch": "0"}, ("batch must be at least 1, got `0`", "--batch 1")),
        ({"context": "-1"}, ("context must be at least 1, got `-1`",)),
        ({"steps": "0"}, ("steps must be at least 1, got `0`",)),
        ({"warmup": "-1"}, ("warmup must be at least 0, got `-1`",)),
        ({"context": "12x"}, ("--context", "12x")),
        ({"context": "128,,256"}, ("empty value", "--context")),
        ({"precision": "fp33"}, ("fp33", "fp32")),
        ({"mode": "trian"}, ("trian", "did you mean `train`")),
        ({"device": "gpu"}, ("gpu", "cuda")),
        ({"device": "cpu", "precision": "tf32"}, ("tf32", "--precision fp32")),
        ({"mode": "inference", "checkpoint": "block"}, ("checkpoint `block`", "--mode forward-backward")),
        ({"mode": "inference", "grad_accumulation": "2"}, ("grad_accumulation `2`", "--mode train")),
        ({"mode": "forward-backward", "grad_accumulation": "2"}, ("mode `forward-backward`", "--mode train")),
        ({"batch": "6", "grad_accumulation": "4"}, ("batch `6`", "`4` micro-batches", "--batch 8")),
        ({"batch": "2", "grad_accumulation": "4"}, ("batch `2`", "--batch 4")),
        ({"grad_accumulation": "0"}, ("grad_accumulation must be at least 1, got `0`", "--grad-accumulation 1")),
        ({"mode": "forward", "graph": "yes"}, ("graph cannot be used with mode `forward`", "--mode train")),
        ({"precision": "fp16", "graph": "yes"}, ("graph cannot be used with precision `fp16`", "--precision bf16")),
        ({"precision": "fp16", "fuse": "yes"}, ("fuse cannot be used with precision `fp16`", "--precision bf16")),
        ({"working_weights": "yes"}, ("working_weights cannot be used with precision `fp32`", "--precision bf16")),
        (
            {"precision": "bf16", "working_weights": "yes"},
            ("working_weights cannot be used with optimizer `adamw`", "--optimizer adamw-onelaunch"),
        ),
        (
            {"precision": "bf16", "merge": "yes"},
            ("merge requires working_weights", "--merge --working-weights"),
        ),
        ({"memory_limit": "lots"}, ("lots", "24GB")),
        ({"memory_limit": "0"}, ("memory_limit must be at least 1, got `0`",)),
        ({"compile": "maybe"}, ("maybe", "--compile")),
        ({"seed": "-1"}, ("seed `-1`",)),
        ({"model": "mine"}, ("mine", "package.module:function")),
        ({"model": "here/mine.py"}, ("--model here/mine.py:build",)),
        ({"model": "here/mine:build"}, ("--model here/mine.py:build",)),
        ({"model": "here/:build"}, ("--model here/FILE.py:build",)),
        ({"hf": "vit", "context": "0"}, ("context must be at least 1, got `0`",)),
        ({"model": "a:b", "size": "small"}, ("`--model` cannot be used with `--size`", "--set")),
        ({"model": "a:b", "hf": "gpt2"}, ("`--model` cannot be used with `--hf`",)),
        ({"precison": "fp32"}, ("precison", "did you mean `precision`")),
    ],
)
def test_invalid_settings_are_rejected_with_a_hint(flags: dict[str, str], said: tuple[str, ...]) -> None:
    with pytest.raises(SpecError) as raised:
        grid_from_flags(flags).cases()
    for part in said:
        assert part in str(raised.value)


@pytest.mark.parametrize("target", ["a/b.py:build", "/a/my-model.py:build", "~/b c.py:make.it", "b.py:build"])
def test_a_factory_may_be_in_a_file(target: str) -> None:
    assert Factory(target=target).file == target.rpartition(":")[0]
    assert Factory(target="package.module:build").file is None


@pytest.mark.parametrize(
    ("settings", "optimizer", "context"),
    [({}, "adamw", 128), ({"hf": "gpt2"}, "adamw-torch", 0), ({"model": "mine:build"}, None, 0)],
)
def test_defaults_follow_from_the_kind_of_model(
    settings: dict[str, Scalar], optimizer: str | None, context: int
) -> None:
    workload = build_case(settings).workload
    assert (workload.optimizer, workload.context) == (optimizer, context)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("contxt = 128", "did you mean `context`"),
        ("context = []", "no values"),
        ("context = [[1]]", "invalid value for `context`"),
        ('batch = "four"', "not an integer"),
        ("batch = 1.5", "invalid setting"),
        ("set = 3", "not a table"),
        ("context = ", "not a valid TOML file"),
        ("[set]\ndepth = 2", "`--set` requires `--model`"),
    ],
)
def test_invalid_file_is_rejected_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(text)
    with pytest.raises(SpecError, match=said):
        grid_from_toml(file).cases()


def test_a_missing_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read"):
        grid_from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "bytes_"), [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5 mib", 1572864), ("512", 512)]
)
def test_units_of_memory(text: str, bytes_: int) -> None:
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize(
    "field",
    [
        {"precision": "fp8"},
        {"attention": "flashy"},
        {"mode": "trian"},
        {"batch": 2.5},
        {"context": True},
        {"optimizer": 1},
    ],
)
def test_workload_built_in_python_is_checked_too(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(field.values())))):
        Workload(model=SIZES["nano"], **field)  # type: ignore[arg-type]


def test_no_limit_is_a_value_of_the_axis() -> None:
    cases = grid_from_flags({"memory_limit": "24GB,none"}).cases()
    assert [case.timing.memory_limit for case in cases] == [24 * 10**9, None]


def test_duplicate_argument_is_rejected() -> None:
    with pytest.raises(SpecError, match="twice"):
        grid_from_flags({"model": "a:b"}, ["depth=2", "depth=4"])


def test_two_arguments_in_one_flag_are_two_flags() -> None:
    with pytest.raises(SpecError) as raised:
        grid_from_flags({"model": "a:b"}, ["depth=2,4,name=a"])
    assert raised.value.hint == "--set depth=2,4 --set name=a"


def test_named_size_keeps_its_name_with_any_vocabulary() -> None:
    shape = msgspec.structs.replace(SIZES["xl"], vocab=50_257)
    assert shape.name == "xl"
    assert msgspec.structs.replace(shape, num_layers=2).name == "d1600-f6400-l2-h25"


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_the_hint_for_heads_always_works(d_model: int, num_heads: int) -> None:
    """Following the hints leads to an accepted shape, whatever was wrong with it."""
    flags = {"d_model": str(d_model), "num_heads": str(num_heads)}
    for _ in range(4):
        try:
            (case,) = grid_from_flags(flags).cases()
        except SpecError as error:
            flag, value = error.hint.split()
            flags[flag.removeprefix("--").replace("-", "_")] = value
        else:
            assert isinstance(case.workload.model, ModelShape)
            return
    pytest.fail(f"hints led nowhere: {flags}")


@pytest.mark.parametrize(
    ("struct", "settings"),
    [(Workload, {"model", *RUN_SETTINGS}), (Timing, set(TIMING_SETTINGS)), (ModelShape, {*SHAPE_SETTINGS} - {"size"})],
)
def test_every_field_is_declared_as_a_setting(struct: type[msgspec.Struct], settings: set[str]) -> None:
    assert set(struct.__struct_fields__) == settings
    assert all(setting.help and setting.metavar for setting in SETTINGS.values())


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of every kind, with minimal declarations."""

    tile_size: Annotated[int, Setting(help="Rows of a tile.")] = 64
    shape: Annotated[Literal["round", "square"] | None, Setting(help="Of a tile.", phrase="{} tiles")] = None
    swap: Annotated[bool, Setting(help="Swap tiles.", baseline=False)] = False
    room: Annotated[int | None, Setting(help="For tiles.", kind="bytes", metavar="SIZE")] = None
    rounds: Annotated[int, Setting(help="Rounds.", phrase="{} round{s}", absent=0)] = 0
    other: int = 0


def test_metavar_and_choices_come_from_the_type() -> None:
    settings = declared(Declared)
    size, shape, swap = settings["tile_size"], settings["shape"], settings["swap"]
    assert list(settings) == ["tile_size", "shape", "swap", "room", "rounds"]
    assert [one.metavar for one in settings.values()] == ["N", "round|square", "yes|no", "SIZE", "N"]
    assert [one.kind for one in settings.values()] == ["count", "text", "text", "bytes", "count"]
    assert (size.label, size.default, size.parse("1_024")) == ("tile size", 64, 1024)
    assert (shape.parse("round"), swap.parse("off"), swap.is_switch) == ("round", False, True)
    with pytest.raises(SpecError, match="unknown shape: `squar`"):
        shape.parse("squar")


def test_declared_setting_has_a_cell_and_a_phrase() -> None:
    settings = declared(Declared)
    given = Declared(shape="round", swap=True, room=24 * 10**9, rounds=1)
    assert [one.read(given) for one in settings.values()] == [64, "round", "yes", 24 * 10**9, 1]
    assert [one.read(Declared()) for one in settings.values()] == [64, None, "no", None, None]
    assert [one.say(one.read(given)) for one in settings.values()] == [
        "tile size 64",
        "round tiles",
        "swap yes",
        "room 24 GB",
        "1 round",
    ]
    assert settings["rounds"].say(2) == "2 rounds"


def test_another_precision_drops_what_it_does_not_support() -> None:
    fast: dict[str, Scalar] = {
        "precision": "bf16",
        "optimizer": "adamw-onelaunch",
        "working_weights": True,
        "merge": True,
        "graph": True,
    }
    workload = build_case(fast).workload
    assert with_precision(workload, "bf16") == workload
    wide = with_precision(workload, "fp32")
    assert (wide.precision, wide.graph, wide.working_weights, wide.merge) == ("fp32", True, False, False)
    assert not with_precision(workload, "fp16").graph


def test_accumulation_splits_the_batch_and_keeps_the_step_size() -> None:
    (whole, split) = (case.workload for case in grid_from_flags({"batch": "8", "grad_accumulation": "1,4"}).cases())
    assert (split.passes, split.micro_batch) == (4, 2)
    assert split.tokens == whole.tokens
