"""The last resort: kernels that nobody listed, by the whole words of their own name.

Only whole words count (`format` holds no `norm`), and only of the function's name, not of its template arguments. A
name that says nothing stays `other`: a wrong class is worse than none.
"""

import re

from stepscope.explain.kernel_names.anatomy import Anatomy
from stepscope.explain.kernel_names.libraries import find_direction
from stepscope.explain.kernel_names.types import KernelClass, KernelName
from stepscope.explain.kernel_names.vocabulary import build, find_dtype, join, part

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_MOST_WORDS = 40
# The first line with a word of the name counts. A line may ask for two words at once.
_RULES: tuple[tuple[KernelClass, str, tuple[str, ...]], ...] = (
    (
        "communication",
        "communication",
        ("allreduce", "allgather", "reducescatter", "alltoall", "nvshmem", "nccl", "rccl"),
    ),
    ("attention", "attention", ("attn", "attention", "fmha", "mha", "mla", "sdpa", "flash+fwd", "flash+bwd")),
    ("elementwise", "rotary embedding", ("rope", "rotary")),
    ("loss", "loss", ("cross+entropy", "crossentropy", "xentropy", "nll", "loss")),
    ("softmax", "softmax", ("softmax",)),
    ("norm", "norm", ("layernorm", "rmsnorm", "batchnorm", "groupnorm", "norm", "welford")),
    ("optimizer", "optimizer update", ("adam", "adamw", "adagrad", "lamb", "sgd", "muon", "lion", "optimizer")),
    ("convolution", "convolution", ("conv", "convolution", "wgrad", "dgrad", "fprop", "im+col")),
    ("gemm", "matrix product", ("gemm", "matmul", "bmm", "gemv", "mm", "sgemm", "hgemm", "wgmma")),
    ("embedding", "embedding", ("embedding", "embed")),
    ("random", "random numbers", ("dropout", "philox", "curand", "rand", "random", "bernoulli", "sampling")),
    ("sort", "sort or top-k", ("sort", "topk", "argsort", "radix")),
    ("index", "gather or scatter", ("gather", "scatter", "index", "indexing", "permute+tokens")),
    ("copy", "copy", ("copy", "transpose", "memcpy", "concat", "cat", "permute", "pad")),
    (
        "elementwise",
        "activation",
        ("gelu", "silu", "swiglu", "geglu", "relu", "sigmoid", "tanh", "activation", "softplus"),
    ),
    ("elementwise", "quantize", ("quant", "quantize", "dequant", "dequantize")),
    (
        "reduction",
        "reduction",
        ("reduce", "reduction", "sum", "mean", "scan", "cumsum", "argmax", "argmin", "pool", "pooling"),
    ),
    (
        "elementwise",
        "elementwise",
        ("elementwise", "pointwise", "add", "mul", "fill", "cast", "bias", "scale", "clamp", "exp"),
    ),
)


def recognise(anatomy: Anatomy) -> KernelName | None:
    words = [word.lower() for word in _WORD.findall(anatomy.base[:400])][:_MOST_WORDS]
    held = set(words)
    for kernel_class, operation, wanted in _RULES:
        told = next((want for want in wanted if all(word in held for word in want.split("+"))), None)
        if told is None:
            continue
        plain = not (anatomy.mangled or anatomy.scope or anatomy.template or anatomy.arguments)
        library = "Triton" if plain and anatomy.base.startswith("_") else "unknown"
        direction = find_direction(anatomy.base)
        return build(
            anatomy,
            library,
            kernel_class,
            operation,
            anatomy.base.strip("_") or operation,
            direction=direction,
            dtype=find_dtype(anatomy.template),
            parts=(part(told.replace("+", " … "), join("taken for its meaning from the name alone:", operation)),),
        )
    return None
