"""Kernels are attributed to operator, module, layer, phase and step, including backward."""

from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.attribution import attribute_kernels
from stepscope.explain.trace.attribution.modules import number_layers
from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording.readers import kineto
from tests.unit.kineto_files import AUTOGRAD, event, kernel, launch, op, training_step, write_trace


def attribute(tmp_path: Path, events: list[str]) -> pl.DataFrame:
    """All kernels of a file. A profile has those of the steps that count."""
    return attribute_kernels(kineto.read(write_trace(tmp_path / "t.json", events)))


def profile(tmp_path: Path, events: list[str]) -> Profile:
    return make_profile(kineto.read(write_trace(tmp_path / "t.json", events)))


def facts(of: Profile, *columns: str) -> dict[str, tuple[object, ...]]:
    return {row[0]: row[1:] for row in of.kernels.select("name", *columns).iter_rows()}


@pytest.fixture
def step(tmp_path: Path) -> Profile:
    return profile(tmp_path, training_step())


def test_phases(step: Profile) -> None:
    found = {name: phase for name, (phase,) in facts(step, "phase").items()}
    assert found.pop("ampere_sgemm_128x64_nt") is None  # launched before the window
    assert list(found.values()) == ["forward", "forward", "loss", "backward", "backward", "optimizer"]


def test_backward_belongs_to_the_module_of_its_forward(step: Profile) -> None:
    found = facts(step, "module")
    assert found["ampere_sgemm_128x64_tn"] == found["ampere_sgemm_128x64_nn"] == ("Block_0.Linear_0",)
    assert found["vectorized_relu_kernel"] == ("Block_0",)


def test_gradient_accumulation_belongs_to_the_module_that_produced_it(step: Profile) -> None:
    added = step.kernels.filter(pl.col("class") == "elementwise", pl.col("phase") == "backward")
    assert added["module"].to_list() == ["Block_0.Linear_0"]


def test_work_outside_modules_is_named_and_unknown_work_is_null(step: Profile) -> None:
    found = facts(step, "module", "launched")
    assert found["void at::native::multi_tensor_apply_kernel<x>"] == ("(optimizer)", "op")
    assert found["nll_loss_forward_reduce_cuda_kernel_2d"] == ("(loss)", "op")
    assert found["ampere_sgemm_128x64_nt"] == (None, "before")


def test_launch_time_decides_the_step(step: Profile) -> None:
    found = facts(step, "step")
    assert found["ampere_sgemm_128x64_nn"] == (5,)
    assert found["ampere_sgemm_128x64_nt"] == (None,)


def test_kernel_belongs_to_the_innermost_operator(step: Profile) -> None:
    found = facts(step, "op")
    assert found["ampere_sgemm_128x64_tn"] == ("aten::mm",)
    shapes = step.ops["shapes"].gather(step.kernels["op_row"])
    assert shapes.drop_nulls().to_list() == ["[[4, 8], [8, 16]]"]


def test_sequence_numbers_suffice_without_flow_arrows(tmp_path: Path) -> None:
    found = facts(profile(tmp_path, [one for one in training_step() if '"fwdbwd"' not in one]), "module")
    assert found["ampere_sgemm_128x64_nn"] == ("Block_0.Linear_0",)


def test_modules_are_not_invented(tmp_path: Path) -> None:
    without = profile(tmp_path, [one for one in training_step() if "nn.Module" not in one])
    assert without.kernels["module"].null_count() == without.kernels.height
    assert without.coverage()["module"] == 0


def test_coverage_counts_time_not_kernels(step: Profile) -> None:
    unknown = 7_000 / step.gpu_time_ns
    assert step.coverage()["phase"] == pytest.approx(1 - unknown)


def test_module_called_inside_backward_is_recomputed(tmp_path: Path) -> None:
    """Activation checkpointing: the forward of a block inside the evaluation of a node."""
    evaluate = "autograd::engine::evaluate_function: "
    events = [
        event("user_annotation", "ProfilerStep#1", "0.000", "900.000"),
        event("python_function", "nn.Module: Block_0", "10.000", "50.000"),
        op("aten::mm", "20.000", "10.000", **{"Sequence number": 3}),
        launch("22.000", "1.000", 1),
        op(
            evaluate + "MmBackward0",
            "300.000",
            "200.000",
            thread=AUTOGRAD,
            **{"Sequence number": 3, "Fwd thread id": 1},
        ),
        event("python_function", "nn.Module: Block_0", "310.000", "50.000", tid=AUTOGRAD),
        op("aten::mm", "320.000", "10.000", thread=AUTOGRAD, **{"Sequence number": 1}),
        launch("322.000", "1.000", 2, thread=AUTOGRAD),
        op("aten::mm", "400.000", "10.000", thread=AUTOGRAD),
        launch("402.000", "1.000", 3, thread=AUTOGRAD),
        *(kernel(f"gemm_{i}", f"{600 + 10 * i}.000", "5.000", i) for i in (1, 2, 3)),
    ]
    found = facts(profile(tmp_path, events), "phase", "module", "recomputed")
    assert found == {
        "gemm_1": ("forward", "Block_0", False),
        "gemm_2": ("backward", "Block_0", True),
        "gemm_3": ("backward", "Block_0", False),
    }


def test_gradient_reduction_belongs_to_no_module(tmp_path: Path) -> None:
    events = training_step()
    events[events.index(launch("1362.000", "5.000", 5, thread=AUTOGRAD))] = launch(
        "1362.000", "5.000", 55, thread=AUTOGRAD
    )
    events.append(
        kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "1490.000",
            "9.000",
            55,
            stream=20,
        )
    )
    found = profile(tmp_path, events).kernels.filter(pl.col("class") == "communication")
    assert found.select("module", "phase").rows() == [("(communication)", "backward")]


def test_graph_replay_is_marked(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "forward", "0.000", "50.000"),
        launch("10.000", "5.000", 1, name="cudaGraphLaunch"),
        kernel("a", "20.000", "5.000", 1),
        kernel("b", "26.000", "5.000", 1),
    ]
    found = facts(profile(tmp_path, events), "launched", "phase")
    assert found == {"a": ("graph", "forward"), "b": ("graph", "forward")}


def test_everything_is_forward_without_backward(tmp_path: Path) -> None:
    events = [op("aten::mm", "0.000", "9.000"), launch("1.000", "1.000", 1), kernel("a", "5.000", "1.000", 1)]
    assert facts(profile(tmp_path, events), "phase") == {"a": ("forward",)}


def test_annotation_names_everything(tmp_path: Path) -> None:
    ranges = [
        ("step:0", "0.000", "500.000"),
        ("phase:forward", "1.000", "200.000"),
        ("module:(TransformerLM)", "2.000", "150.000"),
        ("module:blocks.3.attention", "10.000", "50.000"),
        ("part:softmax", "20.000", "10.000"),
        ("phase:loss", "160.000", "30.000"),
    ]
    events = [event("user_annotation", *one) for one in ranges]
    events += [op("aten::exp", "21.000", "5.000"), launch("22.000", "1.000", 1), kernel("exp", "100.000", "1.000", 1)]
    events += [op("aten::log", "165.000", "5.000"), launch("166.000", "1.000", 2), kernel("log", "170.000", "1.000", 2)]
    found = facts(profile(tmp_path, events), "phase", "module", "layer", "part", "step")
    assert found == {
        "exp": ("forward", "blocks.3.attention", 3, "softmax", 0),
        "log": ("loss", "(loss)", None, None, 0),
    }


def test_operators_inside_a_custom_autograd_function_are_forward(tmp_path: Path) -> None:
    """`CompiledFunction` runs without gradients: only the function itself has a sequence number."""
    node = {"Sequence number": 4, "Fwd thread id": 1}
    events = [
        op("Torch-Compiled Region: 0/0", "10.000", "80.000"),
        op("CompiledFunction", "11.000", "70.000", **{"Sequence number": 4}),
        op("aten::mm", "20.000", "10.000"),
        launch("22.000", "1.000", 1),
        op("triton_poi_fused_relu_0", "40.000", "10.000"),
        launch("42.000", "1.000", 2),
        op("autograd::engine::evaluate_function: CompiledFunctionBackward", "300.000", "90.000", thread=AUTOGRAD),
        op("CompiledFunctionBackward", "301.000", "80.000", thread=AUTOGRAD, **node),
        op("aten::mm", "320.000", "10.000", thread=AUTOGRAD),
        launch("322.000", "1.000", 3, thread=AUTOGRAD),
        op("aten::mm", "500.000", "10.000"),  # without gradients, and outside everything
        launch("502.000", "1.000", 4),
        *(kernel(f"k{i}", f"{600 + 10 * i}.000", "5.000", i) for i in (1, 2, 3, 4)),
    ]
    found = facts(profile(tmp_path, events), "phase")
    assert found == {"k1": ("forward",), "k2": ("forward",), "k3": ("backward",), "k4": (None,)}


def layers_of(*calls: str, by_class: bool = True) -> dict[str, int | None]:
    """`calls` are the paths of modules, in the order of their first calls."""
    prefix = "nn.Module: " if by_class else "module:"
    names = [prefix + path for path in calls]
    modules = pl.DataFrame({"path": calls, "name": names, "start_ns": range(len(calls))})
    return dict(number_layers(pl.DataFrame({"module": calls}), modules).rows())


def test_embeddings_and_single_linears_are_not_layers() -> None:
    blocks = [f"GPT_0.Block_{i}{part}" for i in range(3) for part in ("", ".LayerNorm_0", ".MLP_0", ".MLP_0.Linear_0")]
    others = ["GPT_0", "GPT_0.Embedding_0", "GPT_0.Embedding_1", "GPT_0.Dropout_0", "GPT_0.Linear_9", "GPT_0.Linear_10"]
    found = layers_of(*others, *blocks)
    assert {found[path] for path in others} == {None}
    assert [found[f"GPT_0.Block_{i}.MLP_0.Linear_0"] for i in range(3)] == [0, 1, 2]


def test_wrapped_embeddings_are_not_layers() -> None:
    def wrapped(number: int, inside: str) -> list[str]:
        outer = f"GPT_0.FullyShardedDataParallel_{number}"
        return [outer, f"{outer}.{inside}", *([f"{outer}.{inside}.Linear_{number}"] if "Block" in inside else [])]

    found = layers_of("GPT_0", *wrapped(1, "Embedding_0"), *wrapped(2, "Block_0"), *wrapped(3, "Block_1"))
    assert [found[path] for path in found if path.endswith(("Embedding_0", "Block_0", "Block_1"))] == [None, 0, 1]


def test_the_layers_of_a_plain_network_are_its_linears() -> None:
    found = layers_of("Net_0", "Net_0.Linear_0", "Net_0.ReLU_0", "Net_0.Linear_1", "Net_0.ReLU_1")
    assert list(found.values()) == [None, 0, None, 1, None]


def test_numbers_in_names_are_layers_where_blocks_repeat() -> None:
    calls = ("embeddings.0", "h.0", "h.0.attn", "h.1", "h.1.mlp.0", "classifier.0", "classifier.2")
    assert list(layers_of(*calls, by_class=False).values()) == [None, 0, 0, 1, 1, None, None]
    assert list(layers_of("net.0", "net.2", by_class=False).values()) == [0, 2]


def repeated_steps(*, first_launch: int = 0, first_name: str = "gemm") -> list[str]:
    """Four steps of 12 kernels: GEMMs in forward and backward and the optimizer's kernels, each followed by a
    collective. Launches before number `first_launch` were not recorded."""
    events = []
    for number in range(48):
        step, place = divmod(number, 12)
        start = 10_000 + 1_000 * step + 80 * place
        phase = ("forward", "backward", "Optimizer.step#SGD.step")[place // 4]
        compute = ("gemm" if number else first_name, "gemm", "adam")[place // 4]
        name, stream = ("ncclDevKernel_Generic(x)", 20) if place % 2 else (compute, 7)
        events.append(event("user_annotation", phase, f"{start}.000", "70.000"))
        if not place:
            events.append(event("user_annotation", f"ProfilerStep#{step}", f"{start}.000", "990.000"))
        if number >= first_launch:
            events.append(launch(f"{start + 10}.000", "5.000", number))
        events.append(kernel(name, f"{start + 20}.000", "50.000", number, stream=stream))
    return events


def test_kernels_launched_before_the_recording_are_those_of_later_steps(tmp_path: Path) -> None:
    whole = attribute(tmp_path, repeated_steps())
    cut = attribute(tmp_path, repeated_steps(first_launch=7))
    assert cut["launched"].to_list() == ["before"] * 7 + ["op"] * 41
    assert cut["phase"].to_list() == whole["phase"].to_list()
    assert cut["step"].head(7).null_count() == 7


def test_steps_that_launch_something_else_say_nothing_about_earlier_kernels(tmp_path: Path) -> None:
    cut = attribute(tmp_path, repeated_steps(first_launch=7, first_name="convolution"))
    assert cut["phase"].head(7).null_count() == 7


def test_places_that_disagree_leave_the_phase_unknown(tmp_path: Path) -> None:
    """All kernels have the same name, so any place in a step looks like any other."""
    events = [
        one.replace('"adam"', '"gemm"').replace("ncclDevKernel_Generic(x)", "gemm")
        for one in repeated_steps(first_launch=7)
    ]
    same_stream = [one.replace('"stream": 20', '"stream": 7') for one in events]
    cut = attribute(tmp_path, same_stream)
    assert cut["phase"].head(7).null_count() == 7


def test_backward_on_the_calling_thread_says_nothing_about_the_rest_of_it(tmp_path: Path) -> None:
    """On a CPU, autograd runs backward on the thread that calls it. Checkpointing recomputes inside a node."""
    numbered = {"Sequence number": 3}
    events = [
        op("aten::addmm", "10.000", "10.000", **numbered),
        op("autograd::engine::evaluate_function: AddmmBackward0", "30.000", "40.000", **numbered),
        op("aten::mm", "40.000", "10.000"),
        op("aten::sum", "55.000", "10.000", **{"Sequence number": 4}),
        op("torch.distributed.ddp.reducer::copy_bucket_to_grad", "80.000", "10.000"),
        op("aten::copy_", "81.000", "8.000"),
        op("aten::bmm", "100.000", "10.000"),  # validation, without gradients
    ]
    found = facts(profile(tmp_path, events), "phase")
    assert found["aten::addmm"] == ("forward",)
    assert found["aten::mm"] == found["aten::sum"] == found["aten::copy_"] == ("backward",)
    assert found["aten::bmm"] == (None,)


def test_the_engine_thread_runs_only_backward_even_if_it_recomputes(tmp_path: Path) -> None:
    numbered = {"Sequence number": 3}
    events = [
        op("autograd::engine::evaluate_function: MmBackward0", "30.000", "40.000", thread=AUTOGRAD, **numbered),
        op("aten::mm", "40.000", "10.000", thread=AUTOGRAD, **{"Sequence number": 4}),
        op("aten::add_", "100.000", "10.000", thread=AUTOGRAD),  # the engine's final callback
    ]
    assert facts(profile(tmp_path, events), "phase") == {"aten::mm": ("backward",), "aten::add_": ("backward",)}


def closure(*, backward: bool) -> list[str]:
    """Operators inside `Optimizer.step`, with or without backward between them."""
    numbered = {"Sequence number": 3}
    node = op("autograd::engine::evaluate_function: MmBackward0", "60.000", "20.000", thread=AUTOGRAD, **numbered)
    return [
        event("user_annotation", "Optimizer.step#LBFGS.step", "0.000", "200.000"),
        op("aten::addmm", "10.000", "10.000", **numbered),
        op("aten::nll_loss", "30.000", "10.000", **numbered),
        *([node, op("aten::mm", "65.000", "10.000", thread=AUTOGRAD)] if backward else []),
        op("aten::lerp_", "120.000", "10.000"),
    ]


def test_the_closure_of_an_optimizer_runs_forward_and_backward(tmp_path: Path) -> None:
    found = facts(profile(tmp_path, closure(backward=True)), "phase")
    assert found == {
        "aten::addmm": ("forward",),
        "aten::nll_loss": ("loss",),
        "aten::mm": ("backward",),
        "aten::lerp_": ("optimizer",),
    }


def test_an_optimizer_may_leave_gradients_enabled(tmp_path: Path) -> None:
    found = facts(profile(tmp_path, closure(backward=False)), "phase")
    assert set(found.values()) == {("optimizer",)}
