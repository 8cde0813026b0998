"""The arguments that add to plain attention: each invalid one is named before anything runs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stepscope.kernels import flash_attention

X = torch.zeros(2, 4, 6, 8)
ONE = X[:1]
BAD: dict[str, tuple[Tensor, dict[str, Any], type[Exception], str]] = {
    "window without causal": (X, {"window": 4}, ValueError, "`window` of one number requires `causal=True`"),
    "empty window": (X, {"window": 0, "causal": True}, ValueError, "`window` must be at least 1.*got 0"),
    "window of a flag": (X, {"window": True, "causal": True}, TypeError, "`window` must be a number.*got bool"),
    "window of text": (X, {"window": "4", "causal": True}, TypeError, "`window` must be a number.*got str"),
    "window of three": (X, {"window": (1, 2, 3)}, ValueError, "`window` must be .*got 3 numbers"),
    "negative window": (X, {"window": (-1, 2)}, ValueError, "`window` must consist of non-negative.*got -1"),
    "window of floats": (X, {"window": (1.0, 2)}, TypeError, "`window` must consist of integers.*got float"),
    "causal window ahead": (X, {"window": (1, 2), "causal": True}, ValueError, "`window` allows 2 keys after"),
    "zero softcap": (X, {"softcap": 0}, ValueError, "`softcap` must be finite and positive.*got 0"),
    "endless softcap": (X, {"softcap": math.inf}, ValueError, "`softcap` must be finite.*got inf"),
    "softcap of text": (X, {"softcap": "30"}, TypeError, "`softcap` must be a number, but got str"),
    "bias of no tensor": (X, {"bias": 1.0}, TypeError, "`bias` must be a tensor, but got float"),
    "bias of flags": (X, {"bias": X[..., :6] == 0}, TypeError, "`bias` to be float32, but got torch.bool"),
    "bias in half": (X, {"bias": X[..., :6].half()}, TypeError, "`bias` to be float32, but got torch.float16"),
    "bias elsewhere": (X, {"bias": X[..., :6].to("meta")}, ValueError, "same device.*`bias` is on meta"),
    "bias of heads": (
        X,
        {"bias": X[:, :3, :, :6]},
        ValueError,
        r"`bias` .*broadcasts to \(2, 4, 6, 6\).*got \(2, 3, 6, 6\)",
    ),
    "bias of dimensions": (X, {"bias": X[None, ..., :6]}, ValueError, "`bias` to have a shape that broadcasts"),
    "slopes of no tensor": (X, {"alibi_slopes": [1.0]}, TypeError, "`alibi_slopes` must be a tensor, but got list"),
    "slopes": (X, {"alibi_slopes": torch.ones(3)}, ValueError, r"`alibi_slopes` .*\(4,\) or \(2, 4\).*got \(3,\)"),
    "slopes to learn": (
        X,
        {"alibi_slopes": torch.ones(4, requires_grad=True)},
        ValueError,
        "`alibi_slopes` get no gradient",
    ),
    "integer sinks": (X, {"sinks": torch.ones(4).long()}, TypeError, "`sinks` to be .*but got torch.int64"),
    "sinks": (X, {"sinks": torch.ones(1, 4)}, ValueError, r"`sinks` to have shape \(4,\).*got \(1, 4\)"),
    "documents of int64": (X, {"documents": torch.zeros(2, 2, 6).long()}, TypeError, "`documents` to be int32"),
    "documents": (X, {"documents": torch.zeros(2, 6).int()}, ValueError, r"`documents` .*\(2, 2, 6\).*got \(2, 6\)"),
    "cu_seqlens and documents": (
        ONE,
        {"documents": torch.zeros(2, 1, 6).int(), "cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "`cu_seqlens` and `documents` are mutually exclusive",
    ),
    "cu_seqlens of a batch": (
        X,
        {"cu_seqlens": torch.tensor([0, 6])},
        ValueError,
        "`cu_seqlens` requires a batch of one",
    ),
    "cu_seqlens of floats": (ONE, {"cu_seqlens": torch.ones(2)}, TypeError, "`cu_seqlens` to be int32 or int64"),
    "cu_seqlens of lengths": (
        ONE,
        {"cu_seqlens": torch.tensor([2, 4])},
        ValueError,
        r"`cu_seqlens` must start.*\[2, 4\]",
    ),
    "short cu_seqlens": (ONE, {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "`cu_seqlens` .*end at the length 6"),
    "falling cu_seqlens": (
        ONE,
        {"cu_seqlens": torch.tensor([0, 5, 4, 6])},
        ValueError,
        "`cu_seqlens` .*never decrease",
    ),
    "one cu_seqlen": (ONE, {"cu_seqlens": torch.tensor([6])}, ValueError, r"`cu_seqlens` to have shape .*got \(1,\)"),
}


@pytest.mark.parametrize("backend", ["auto", "tiled", "naive"])
@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case: str, backend: str) -> None:
    x, options, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        flash_attention(x, x, x, backend=backend, **options)


@pytest.mark.parametrize("name", ["documents", "cu_seqlens"])
def test_documents_require_as_many_queries_as_keys(name: str) -> None:
    value: Any = {"documents": torch.zeros(2, 1, 6).int(), "cu_seqlens": torch.tensor([0, 6])}[name]
    with pytest.raises(ValueError, match=f"`{name}` requires as many queries as keys, but got 6 and 3"):
        flash_attention(ONE, ONE[:, :, :3], ONE[:, :, :3], **{name: value})
