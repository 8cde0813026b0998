"""What the launchers of the Hopper kernels pass, by the names of the kernels' parameters, without a GPU."""

# B batch, H query heads, G key/value heads, L queries, K keys, D head dim.

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels.attention.hopper import backward_kernel, forward_kernel, launch
from stepscope.kernels.attention.problem import NO_EXTRAS, Extras
from stepscope.recover.families import fused_attention

B, H, G, L, K, D = 2, 4, 2, 300, 500, 64
SCALE = 0.25
OPTIONS = {"num_warps", "maxnreg"}
Arguments = dict[str, Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Arguments]:
    """The arguments of each kernel that a plan launches, by name."""
    found: dict[str, Arguments] = {}

    class Recorded:
        def __init__(
            self, kernel: Any, num_programs: int, _: torch.device, *, constants: Arguments, **rest: Sequence[Any]
        ) -> None:
            self.kernel, self.constants, self.num_programs = kernel, constants, num_programs
            self.tiles, self.numbers = rest.get("tiles", ()), rest.get("numbers", ())

        def __call__(self, described: Sequence[Tensor], pointers: Sequence[Tensor | None]) -> None:
            assert len(described) == len(self.tiles)
            given = (*described, *pointers, *self.numbers)
            names = self.kernel.arg_names
            assert set(names[len(given) :]) == set(self.constants) - OPTIONS
            found[self.kernel.fn.__name__] = dict(zip(names, given, strict=False)) | {"programs": self.num_programs}

    monkeypatch.setattr(launch, "Launch", Recorded)
    monkeypatch.setattr(launch, "_count_multiprocessors", lambda _: 132)
    return found


def make_tensors() -> list[Tensor]:
    """do, q, k, v, o and the log-sum-exp."""
    query, key = (B, H, L, D), (B, G, K, D)
    shapes = [query, query, key, key, query]
    return [*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), torch.zeros(B, H, L)]


def run_backward(*, deterministic: bool, extras: Extras = NO_EXTRAS) -> list[Tensor]:
    do, q, k, v, o, lse = make_tensors()
    plan = launch.ForwardPlan(q, k, v, causal=True, scale=SCALE, extras=extras)
    plan.backward(do, q, k, v, o, lse, extras.documents, deterministic=deterministic)
    return [do, q, k, v, o, lse]


def has(arguments: Arguments, **expected: Any) -> bool:
    return all(arguments[name] is value or arguments[name] == value for name, value in expected.items())


def test_forward(launched: dict[str, Arguments]) -> None:
    _, q, k, v, *_ = make_tensors()
    o, lse = launch.ForwardPlan(q, k, v, causal=True, scale=SCALE, extras=NO_EXTRAS)(q, k, v)
    (found,) = launched.values()
    tensors = {"q_desc": q, "k_desc": k, "v_desc": v, "o_desc": o, "lse_ptr": lse, "starts": None, "ends": None}
    assert all(found[name] is tensor for name, tensor in tensors.items())
    assert has(found, scale=SCALE, H=H, G=G, num_queries=L, num_keys=K, num_tiles=3, heads=B * H)
    assert found["left"] == found["right"] > K
    assert found["programs"] == 2 * B * H  # two for three tiles: a long one and a short one, and the one between them
    assert 1 <= found["group"] <= B * H


def test_backward(launched: dict[str, Arguments]) -> None:
    do, q, k, v, o, lse = run_backward(deterministic=False)
    prepare, main, finish = (launched[f"attention_hopper_{name}"] for name in ("prepare", "backward", "finish"))
    assert len(launched) == 3
    nothing: Arguments = dict.fromkeys(("bounds_ptr", "starts", "ends"))
    assert all(prepare[name] is x for name, x in {"o_ptr": o, "do_ptr": do, "lse_ptr": lse, **nothing}.items())
    assert has(prepare, H=H, G=G, num_queries=L, num_keys=K, padded=384, heads=B * H, D=D, groups=B * G, do_d=1)
    assert [prepare[name] for name in ("o_z", "o_h", "o_l")] == list(o.stride()[:3])
    assert [prepare[name] for name in ("do_z", "do_h", "do_l")] == list(do.stride()[:3])
    assert all(main[name] is x for name, x in {"q_desc": q, "k_desc": k, "v_desc": v, "do_desc": do}.items())
    assert main["rows_desc"] is prepare["rows_ptr"] is finish["rows_ptr"]
    assert main["dq_desc"] is prepare["dq_ptr"] is finish["sum_ptr"]
    assert has(main, scale=SCALE, H=H, G=G, heads=B * H, num_queries=L, num_keys=K, programs=4 * B * G)
    assert has(finish, scale=SCALE, H=H, num_queries=L, padded=384, heads=B * H, D=D)
    assert prepare["rows_ptr"].shape == (2 * B * H, 384)
    assert prepare["dq_ptr"].dtype == torch.float32


def test_deterministic_backward_with_documents_and_a_window(launched: dict[str, Arguments]) -> None:
    documents = torch.zeros(2, B, L, dtype=torch.int32)
    _, _, k, v, *_ = run_backward(deterministic=True, extras=NO_EXTRAS._replace(left=7, documents=documents))
    bound, prepare, main = (launched[f"attention_hopper_{name}"] for name in ("bound", "prepare", "backward"))
    assert bound["k_ptr"] is k
    assert bound["v_ptr"] is v
    assert has(bound, G=G, num_keys=K, D=D, programs=4 * B * G)
    assert [bound[name] for name in ("v_z", "v_g", "v_l")] == list(v.stride()[:3])
    assert bound["bounds_ptr"] is prepare["bounds_ptr"]
    assert bound["bounds_ptr"].shape == (2, 4 * B * G)
    for found in (prepare, main):
        assert found["left"] == 7
        assert found["right"] > K
        assert [found[name].data_ptr() for name in ("starts", "ends")] == [x.data_ptr() for x in documents]
    assert prepare["rows_ptr"].shape == (3 * B * H, 384)
    assert prepare["dq_ptr"].dtype == torch.int32


def test_recover_knows_the_tiles() -> None:
    """It reads sizes from grids, and does not import kernels."""
    assert fused_attention._HOPPER_LONG == forward_kernel.LONG
    assert fused_attention._HOPPER_ROWS == forward_kernel.ROWS_OF_CONSUMER
    assert fused_attention._HOPPER_KEYS == forward_kernel.KEYS_OF_TILE == backward_kernel.KEYS_OF_PROGRAM
