"""Recorded runs as if another GPU had recorded them: what was measured on an H200 is not certain there."""

from dataclasses import replace
from functools import cache

import pytest

from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.families import Platform, is_measured, read_fact
from stepscope.recover.solve.devices import foreign_devices
from stepscope.recover.solve.recovery import Recovery
from stepscope.recover.solve.variants import recover_any
from tests.unit.recover.claimed_runs import true_claim
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence, recovered, truth_of
from tests.unit.recover.families.launches import seen

A100, B200, H100 = ("NVIDIA A100-SXM4-80GB", 108), ("NVIDIA B200", 148), ("NVIDIA H100 80GB HBM3", 132)
FEW = ["gpt2_bf16_odd.csv.gz", "llama_bf16.train.json.gz", "held_gpt2.forward.json.gz", "gpt2_compiled.csv.gz"]


def run_on(file: str, device: tuple[str, int]) -> KernelEvidence:
    return replace(read_evidence(file), device=device[0], device_sms=device[1])


@cache
def recovered_on(file: str, device: tuple[str, int]) -> Recovery:
    return recover_any([run_on(file, device)])


def certain(answer: Recovery) -> set[str]:
    return {name for name, field in answer.fields.items() if field.certain}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H200 NVL", True),
        ("NVIDIA GH200 480GB", False),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA H20", False),
        ("", False),
    ],
)
def test_only_an_h200_was_measured(name: str, *, expected: bool) -> None:
    assert is_measured(name) is expected


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_an_h200_loses_nothing(file: str) -> None:
    assert read_evidence(file).device == "NVIDIA H200"
    assert recover_any([read_evidence(file)]) == recovered(file)


@pytest.mark.parametrize("device", [A100, B200])
@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_no_certain_value_is_wrong_on_another_gpu(file: str, device: tuple[str, int]) -> None:
    answer, truth = recovered_on(file, device), truth_of(file)
    found = certain(answer)
    assert {name: answer.fields[name].value for name in found} == {name: truth[name] for name in found}
    assert {"num_layers", "dtype"} <= found <= certain(recovered(file))
    # The LM head is only seen by its GEMM, and the key heads only by their projections.
    assert found.isdisjoint({"vocab_size", "num_kv_heads"})


@pytest.mark.parametrize("device", [A100, B200, H100])
def test_persistent_attention_says_nothing_for_certain(device: tuple[str, int]) -> None:
    """Of these two runs, the first uses cuDNN's attention, and the other FlashAttention, whose source has its grid."""
    heads = {"num_heads", "batch", "context", "d_head"}
    assert heads <= certain(recovered("llama_bf16.train.json.gz"))
    assert heads.isdisjoint(certain(recovered_on("llama_bf16.train.json.gz", device)))
    assert heads <= certain(recovered_on("held_gpt2.forward.json.gz", device))


def test_the_values_stay_and_the_gpu_is_named() -> None:
    answer = recovered_on("gpt2_bf16_odd.csv.gz", H100)
    assert {name: field.value for name, field in answer.fields.items()} == {
        name: field.value for name, field in recovered("gpt2_bf16_odd.csv.gz").fields.items()
    }
    assert answer.notes[0].startswith("NVIDIA H100 80GB HBM3: kernels of cuBLAS and cuDNN are read as on an H200")
    unnamed = recover_any([replace(read_evidence("gpt2_bf16_odd.csv.gz"), device="")])
    assert certain(unnamed) == certain(answer)
    assert foreign_devices([read_evidence("gpt2_bf16_odd.csv.gz")]) == ()


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_TNT", (2, 64)),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", (2, 64)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn", (8, 8)),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64x6_tn_align8>(x)", (8, 8)),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0",
            (96,),
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(x)", (4, 2, 8)),
    ],
)
def test_kernels_of_libraries_are_not_read_on_any_gpu(name: str, grid: tuple[int, ...]) -> None:
    launch = seen(name, grid, (384,))
    assert read_fact(launch, Platform()) is not None
    assert read_fact(launch, Platform(portable=True)) is None


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_sm100_tst_256x128_64x5_2x2_2cta_h_bz_TNT",
        "nvjet_tst_256x128_64x5_2x2_2cta_h_bz_TNT",
        "cutlass3x_sm100_tensorop_h256x256x16gemm_f16_f16_f16_f16_f16_256x256x64_0_nnn_align8_2sm",
        "cudnn_generated_fort_native_sdpa_sm100_flash_fprop_f16_knob_1_128x128x128_4x1x1_cga1x1x1_kernel0_0",
    ],
)
def test_grids_of_blackwell_kernels_say_nothing(name: str) -> None:
    launch = seen(name, (8, 16), (384,))
    assert launch.name.kernel_class in ("GEMM", "attention")
    assert read_fact(launch, Platform(processors=148)) is None


@pytest.mark.parametrize("file", FEW)
def test_an_honest_claim_is_not_refuted_by_what_was_measured_elsewhere(file: str) -> None:
    answer = verify([run_on(file, B200)], true_claim(file))
    assert answer.verdict is not ClaimVerdict.REFUTED, answer.why
    assert any("NVIDIA B200" in text for text in (*answer.notes, *answer.missing))


def test_a_persistent_grid_of_another_gpu_cannot_refute() -> None:
    """148 SMs: a grid of 132 blocks would not be full, and the LM head too small."""
    answer = verify([run_on("llama_bf16.train.json.gz", B200)], true_claim("llama_bf16.train.json.gz"))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "contradicts the claim on an H200, but was not measured on NVIDIA B200" in answer.why


@pytest.mark.parametrize("file", [file for file in FEW if "compiled" not in file])
def test_the_number_of_layers_is_refuted_on_any_gpu(file: str) -> None:
    layers = truth_of(file)["num_layers"]
    answer = verify([run_on(file, B200)], true_claim(file, num_layers=layers + 1))
    assert (answer.verdict, answer.refuted_by[0].what) == (ClaimVerdict.REFUTED, "num_layers")
