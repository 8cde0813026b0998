"""Backend selection and what each backend does not support: with tensors that claim to be on a GPU, as CI has none."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stepscope.kernels import flash_attention
from stepscope.kernels.attention import backends, chosen_backends, rankings
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras, Problem, is_tma_able
from stepscope.nn import functional


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """An H200 with the newest Triton, on which nothing can run. Its tensors have no addresses."""
    monkeypatch.setattr(backends, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(backends, "triton_version", lambda: (3, 6))
    monkeypatch.setattr(backends, "is_tma_able", lambda _: True)
    monkeypatch.setattr(backends, "_has_fa4", lambda: True)
    monkeypatch.setattr(rankings, "rank", lambda *_: ())  # nothing was measured
    monkeypatch.setattr(torch.version, "hip", None)
    with FakeTensorMode():
        yield monkeypatch


def problem(
    head_dim: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    lengths: tuple[int, int] = (8, 8),
    groups: int = 4,
    v_head_dim: int | None = None,
    causal: bool = False,
    extras: Extras = NO_EXTRAS,
) -> Problem:
    q = torch.empty(2, 4, lengths[0], head_dim, dtype=dtype, device=device)
    k, v = (
        torch.empty(2, groups, lengths[1], dim, dtype=dtype, device=device)
        for dim in (head_dim, v_head_dim or head_dim)
    )
    return Problem(q, k, v, causal, extras)


@pytest.mark.usefixtures("gpu")
def test_hopper_runs_what_it_supports() -> None:
    assert backends.refusal("hopper", problem()) is None
    assert backends.choose(problem()) == "hopper"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dim": 160}, "it requires a head dim of 40, 48, 56"),
        ({"head_dim": 32}, "it requires a head dim of 40"),
        ({"head_dim": 128, "v_head_dim": 64}, "it requires `v` to have the head dim of `q` (128), but got 64"),
        ({"dtype": torch.float32}, "it requires float16 or bfloat16, but the dtype is torch.float32"),
        ({"device": "cpu"}, "it requires an sm_90 GPU, but the tensors are on cpu"),
    ],
    ids=str,
)
def test_hopper_rejects_unsupported_problems(options: dict[str, Any], reason: str) -> None:
    assert (backends.refusal("hopper", problem(**options)) or "").startswith(reason)


# --- FlashAttention-4 ---


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_dim": 256},
        {"head_dim": 192, "v_head_dim": 128},
        {"groups": 2, "causal": True, "lengths": (8, 16)},
        {"lengths": (16, 8)},
        {"extras": Extras(left=3)},
    ],
    ids=str,
)
def test_fa4_runs_what_it_supports(options: dict[str, Any]) -> None:
    assert backends.refusal("fa4", problem(**options)) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, "it requires an sm_90 or sm_100 GPU, but the tensors are on cpu"),
        ({"dtype": torch.float32}, "it requires float16 or bfloat16, but the dtype is torch.float32"),
        ({"head_dim": 60}, "it requires head dims that are multiples of 8 up to 256, but got 60 and 60"),
        (
            {"head_dim": 192, "v_head_dim": 128, "groups": 2},
            "with grouped heads, it requires values of the same head dim as keys",
        ),
        ({"lengths": (16, 8), "causal": True}, "some queries see no key"),
        ({"lengths": (16, 8), "extras": Extras(left=3)}, "some queries see no key"),
        ({"lengths": (16, 0)}, "some queries see no key"),
        ({"lengths": (0, 16)}, "it requires queries"),
        ({"extras": Extras(left=3, softcap=30.0)}, "it does not support `softcap`"),
    ],
    ids=str,
)
def test_fa4_rejects_unsupported_problems(options: dict[str, Any], reason: str) -> None:
    assert backends.refusal("fa4", problem(**options)) == reason


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_capability", lambda _: (8, 0), "it requires sm_90 or sm_100, but the GPU is sm_80"),
        ("_has_fa4", lambda: False, "it is not installed: `pip install flash-attn-4`"),
        (
            "is_tma_able",
            lambda _: False,
            "the copy engine cannot read `q`: its strides and address must be multiples of 16 bytes",
        ),
    ],
)
def test_fa4_rejects_other_machines(gpu: pytest.MonkeyPatch, name: str, value: Any, reason: str) -> None:
    gpu.setattr(backends, name, value)
    assert backends.refusal("fa4", problem()) == reason


def test_fa4_supports_fewer_head_dims_on_blackwell(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(backends, "_capability", lambda _: (10, 0))
    assert backends.refusal("fa4", problem(192, v_head_dim=128)) is None
    assert backends.refusal("fa4", problem(256)) is None
    reason = "it requires head dims that are multiples of 8 up to 128, but got 160 and 160"
    assert backends.refusal("fa4", problem(160)) == reason


def test_nothing_imports_fa4_before_it_runs() -> None:
    code = "import sys, stepscope.kernels.attention.peers.fa4; sys.exit('flash_attn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- The measured order ---


def rank_as(order: Mapping[str, tuple[str, ...]]) -> Callable[[str, rankings.MeasuredShape], tuple[str, ...]]:
    return lambda architecture, shape: order.get(shape.direction, ()) if architecture == "sm_90" else ()


def test_each_pass_takes_the_fastest_that_can_run(gpu: pytest.MonkeyPatch) -> None:
    order = {"forward": ("fa4", "hopper", "sdpa-cudnn"), "backward": ("sdpa-cudnn", "fa4", "hopper")}
    gpu.setattr(rankings, "rank", rank_as(order))
    gpu.setattr(backends, "_ask_sdpa", lambda *_: None)
    square = problem(lengths=(256, 256))
    assert backends.decide(square, "forward") == ("fa4", "")
    assert backends.decide(square, "backward") == ("sdpa-cudnn", "")
    gpu.setattr(backends, "_has_fa4", lambda: False)
    assert backends.decide(square, "forward") == ("hopper", "fa4: it is not installed: `pip install flash-attn-4`")
    gpu.setattr(backends, "_ask_sdpa", lambda *_: "it is Sunday")
    reasons = "sdpa-cudnn: it is Sunday; fa4: it is not installed: `pip install flash-attn-4`"
    assert backends.decide(square, "backward") == ("hopper", reasons)


def test_a_deterministic_pass_takes_the_first_that_repeats(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(rankings, "rank", rank_as({"backward": ("sdpa-cudnn", "fa4", "hopper")}))
    gpu.setattr(backends, "_ask_sdpa", lambda *_: None)
    square = problem(lengths=(256, 256))
    backend, reasons = backends.decide(square, "backward", deterministic=True, among=backends.KERNELS)
    assert backend == "hopper"
    assert reasons.count("its backward pass is not deterministic") == 2


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (128, 256)},
        {"lengths": (0, 0)},
        {"dtype": torch.float32},
        {"extras": Extras(left=3)},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_the_measured_order_is_only_for_what_was_measured(gpu: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    gpu.setattr(rankings, "rank", lambda *_: ("fa4",))
    assert backends.preferences(problem(lengths=(256, 256)), "forward")[:2] == ("fa4", "hopper")
    found = backends.preferences(problem(**{"lengths": (256, 256)} | options), "forward")
    assert found == (("sdpa", "tiled", "triton") if "device" in options else ("hopper", "triton", "sdpa", "tiled"))


def test_auto_does_not_compile_cudnn_for_every_odd_length(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(rankings, "rank", lambda *_: ("sdpa-cudnn", "hopper"))
    assert backends.preferences(problem(lengths=(256, 256)), "forward")[0] == "sdpa-cudnn"
    assert "sdpa-cudnn" not in backends.preferences(problem(lengths=(257, 257)), "forward")


def test_the_measured_order_is_looked_up_by_shape(gpu: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def rank(*arguments: Any) -> tuple[str, ...]:
        asked.append(arguments)
        return ()

    gpu.setattr(rankings, "rank", rank)
    backends.preferences(problem(192, v_head_dim=128, groups=2, lengths=(256, 256), causal=True), "backward")
    shape = rankings.MeasuredShape(
        direction="backward", causal=True, head_dim=192, value_dim=128, length=256, programs=8, group=2
    )
    assert asked == [("sm_90", shape)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("head_dims", [(192, 128), (64, 128)], ids=str)
def test_auto_runs_another_head_dim_of_v_on_triton_and_says_why(head_dims: tuple[int, int]) -> None:
    before = dict(chosen_backends())
    assert backends.choose(problem(head_dims[0], v_head_dim=head_dims[1])) == "triton"
    (choice,) = (key for key, count in chosen_backends().items() if count != before.get(key))
    reason = f"hopper: it requires `v` to have the head dim of `q` ({head_dims[0]}), but got {head_dims[1]}"
    assert choice == ("triton", reason)


# --- What a call adds ---

TABLE = torch.zeros(2, 2, 8, dtype=torch.int32)
OTHERS = {
    "softcap": Extras(softcap=30.0),
    "bias": Extras(bias=torch.zeros(1, 1, 8, 8)),
    "alibi_slopes": Extras(slopes=torch.zeros(1, 4)),
    "sinks": Extras(sinks=torch.zeros(4)),
}


@pytest.mark.usefixtures("gpu")
def test_hopper_runs_windows_and_documents() -> None:
    assert backends.choose(problem(extras=Extras(left=3, right=0, documents=TABLE))) == "hopper"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", OTHERS)
def test_hopper_rejects_other_extras_by_name(name: str) -> None:
    extras = OTHERS[name]._replace(left=3)
    assert backends.refusal("hopper", problem(extras=extras)) == f"it does not support `{name}`"
    assert backends.refusal("triton", problem(extras=extras)) is None


def test_auto_warns_once_that_an_extra_is_slower(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(backends, "_warned", set())
    both = problem(extras=Extras(softcap=30.0, sinks=torch.zeros(4)))
    before = dict(chosen_backends())
    with pytest.warns(
        UserWarning, match="`hopper` does not support `softcap` or `sinks`, so attention runs on `triton`"
    ):
        assert backends.choose(both) == "triton"
    assert backends.choose(both) == "triton"  # another warning would be an error
    with pytest.warns(UserWarning, match="`hopper` does not support `softcap`, so .* Pass `backend='triton'`"):
        backends.choose(problem(extras=OTHERS["softcap"]))
    new = {key: count - before.get(key, 0) for key, count in chosen_backends().items() if before.get(key) != count}
    assert new == {
        ("triton", "hopper: it does not support `softcap` or `sinks`"): 2,
        ("triton", "hopper: it does not support `softcap`"): 1,
    }


def test_auto_does_not_warn_where_hopper_would_not_run_anyway(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(backends, "_warned", set())
    assert backends.choose(problem(160, extras=OTHERS["sinks"])) == "triton"
    gpu.setattr(backends, "_capability", lambda _: (8, 0))
    assert backends.choose(problem(extras=OTHERS["sinks"])) == "triton"


@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("name", OTHERS)
def test_sdpa_rejects_every_extra(backend: str, name: str) -> None:
    extended = problem(device="cpu", extras=OTHERS[name])
    assert backends.refusal(backend, extended) == f"it does not support `{name}`"
    assert backends.refusal(backend, extended._replace(extras=Extras(left=1))) == "it does not support `window`"
    assert (
        backends.refusal(backend, extended._replace(extras=Extras(documents=TABLE)))
        == "it does not support `documents`"
    )


def test_auto_runs_extras_in_tiles_on_a_cpu() -> None:
    x = torch.zeros(1, 1, 3, 4)
    before = dict(chosen_backends())
    flash_attention(x, x, x, causal=True, window=2)
    new = {key: count - before.get(key, 0) for key, count in chosen_backends().items() if before.get(key) != count}
    assert new == {("tiled", "sdpa: it does not support `window`"): 1}


# --- Other machines ---


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_capability", lambda _: (8, 0), "it requires sm_90, but the GPU is sm_80"),
        ("_capability", lambda _: (10, 0), "it requires sm_90, but the GPU is sm_100"),
        ("triton_version", lambda: (3, 5), "it requires triton 3.6 or later"),
        ("triton_version", lambda: None, "it requires triton 3.6 or later"),
        ("is_tma_able", lambda _: False, "the copy engine cannot read `q`"),
    ],
)
def test_hopper_rejects_other_machines(gpu: pytest.MonkeyPatch, name: str, value: Any, reason: str) -> None:
    gpu.setattr(backends, name, value)
    assert (backends.refusal("hopper", problem()) or "").startswith(reason)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_capability", lambda _: (7, 5), "it requires sm_80 or later, but the GPU is sm_75"),
        ("triton_version", lambda: None, "triton is not installed"),
    ],
)
def test_triton_rejects_other_machines(gpu: pytest.MonkeyPatch, name: str, value: Any, reason: str) -> None:
    assert backends.has_kernel(torch.device("cuda"), torch.float16)
    gpu.setattr(backends, name, value)
    assert backends.refusal("triton", problem()) == reason
    assert not backends.has_kernel(torch.device("cuda"), torch.float16)


@pytest.mark.usefixtures("gpu")
def test_triton_does_not_support_float64() -> None:
    assert backends.refusal("triton", problem(dtype=torch.float64)) == "float64 is not supported"
    assert backends.choose(problem(dtype=torch.float64)) == "sdpa"


def test_triton_runs_on_a_cpu_only_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends.refusal("triton", problem(device="cpu")) == "it requires a CUDA GPU, but the tensors are on cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    half = problem(device="cpu", dtype=torch.float16)
    assert backends.refusal("triton", half) is None
    assert backends.choose(half, among=backends.KERNELS) == "triton"
    assert (
        backends.refusal("triton", problem(device="cpu")) == "Triton's interpreter computes bf16 `tl.dot` incorrectly"
    )


@pytest.mark.usefixtures("gpu")
def test_deterministic_backward_runs_on_hopper() -> None:
    assert backends.choose(problem(), deterministic=True) == "hopper"


@pytest.mark.usefixtures("gpu")
def test_deterministic_backward_does_not_run_on_sdpa() -> None:
    wide = problem(dtype=torch.float64)
    assert backends.choose(wide, deterministic=True) == "tiled"
    with pytest.raises(ValueError, match="`sdpa` cannot run this: its backward pass is deterministic only under"):
        backends.require("sdpa", wide, deterministic=True)
    backends.require("sdpa-math", wide, deterministic=True)
    torch.use_deterministic_algorithms(mode=True)
    try:
        backends.require("sdpa", wide, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_record_has_the_choice_of_auto_and_the_reasons_against_others() -> None:
    x = torch.zeros(1, 1, 3, 4)
    before = dict(chosen_backends())
    flash_attention(x, x, x, causal=True)
    flash_attention(x, x, x, causal=True)
    flash_attention(x[:, :, :2], x, x, causal=True)
    flash_attention(x, x, x, causal=True, backend="tiled")
    new = {key: count - before.get(key, 0) for key, count in chosen_backends().items() if before.get(key) != count}
    reason = "sdpa: it aligns causal masks at the start, which requires as many queries as keys"
    assert new == {("sdpa", ""): 2, ("tiled", reason): 1}


def test_record_is_read_only() -> None:
    with pytest.raises(TypeError):
        chosen_backends()["hopper", ""] = 1  # type: ignore[index]


@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash", "sdpa-math"])
def test_sdpa_rejects_a_causal_mask_over_unequal_lengths(backend: str) -> None:
    reason = backends.refusal(backend, problem(device="cpu", lengths=(2, 3), causal=True))
    assert reason == "it aligns causal masks at the start, which requires as many queries as keys"
    assert backends.refusal(backend, problem(device="cpu", lengths=(2, 3))) is None


@pytest.mark.parametrize("backend", ["auto", "sdpa", "sdpa-flash", "sdpa-math", "naive", "tiled"])
def test_a_single_query_sees_every_key(backend: str) -> None:
    """As in decoding: the mask hides nothing then, and SDPA runs without it."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    plain = functional.attention(q, k, v, causal=False)
    assert (flash_attention(q, k, v, causal=True, backend=backend) - plain).abs().max() < 1e-5


@pytest.mark.parametrize("backend", ["sdpa", "sdpa-flash", "sdpa-math", "naive", "compiled"])
def test_without_keys_only_tiled_runs(backend: str) -> None:
    assert "without keys" in (backends.refusal(backend, problem(device="cpu", lengths=(2, 0))) or "")
    x = torch.ones(1, 1, 2, 4)
    assert not flash_attention(x, x[:, :, :0], x[:, :, :0]).any()


@pytest.mark.parametrize("backend", ["sdpa-efficient", "sdpa-cudnn"])
def test_some_kernels_exist_only_on_a_gpu(backend: str) -> None:
    assert backends.refusal(backend, problem(device="cpu")) == "PyTorch has no such kernel for cpu"


def test_reasons_of_pytorch_are_passed_on(gpu: pytest.MonkeyPatch) -> None:
    def refuse(_: object, debug: bool = False) -> bool:
        if debug:
            import warnings

            warnings.warn("it is Sunday (Triggered internally at somewhere.cpp:1.)", stacklevel=1)
        return False

    gpu.setattr(torch.backends.cuda, "can_use_flash_attention", refuse)
    gpu.setattr(torch.backends.cuda, "SDPAParams", lambda *_: None)
    assert backends.refusal("sdpa-flash", problem()) == "it is Sunday"


def blank(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "able"),
    [
        (blank(2, 4, 8, 64), True),
        (blank(2, 8, 4, 64).transpose(1, 2), True),
        (blank(2, 4, 8, 72)[..., :64], True),
        (blank(2, 4, 8, 68)[..., :64], False),  # rows of 136 bytes
        (blank(2, 4, 8, 72)[..., 4:68], False),  # starts at byte 8
        (blank(2, 4, 64, 8).mT, False),
        (blank(1, 1, 1, 64).as_strided((1, 1, 1, 64), (3, 3, 3, 1)), True),  # its stride is never used
        (blank(1, 1, 8, 64).expand(2, 4, 8, 64), False),
        (blank(1).expand(2, 4, 8, 64), False),
    ],
    ids=["dense", "BLHD", "padded", "odd rows", "shifted", "columns", "ones", "expanded", "one number"],
)
def test_which_tensors_the_copy_engine_can_read(x: Tensor, able: bool) -> None:
    assert is_tma_able(x) is able
