"""Kernels are attributed to operator, module, layer, phase and step, including backward."""

from pathlib import Path

import polars as pl
import pytest

from stepscope.explain.trace.profile import Profile, make_profile
from stepscope.recording.readers import kineto
from tests.unit.kineto_files import AUTOGRAD, event, kernel, launch, op, training_step, write_trace


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
