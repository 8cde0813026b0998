"""Which type an elementwise kernel writes, as far as the functor in its name says.

The bytes that a kernel stored are the number of its elements times the size of one. The size is known where the functor
names its result (`BinaryFunctor<float, float, bool, …>`), where it is one of those that return what they take, and
where it compares. Any other leaves it open.

Counts of additions and multiplications were tried and lost: the last block computes past the end of the data, so they
are the elements only where every block is full.
"""

import re

from stepscope.recover.families.grids import type_bytes

ANY_SIZE = (1, 2, 4, 8, 16)
_SCOPES = re.compile(
    r"\b(?:void |(?:at|native|c10|binary_internal|detail|std)::)|\(anonymous namespace\)::|<unnamed>::"
)
_NAMED_RESULT = re.compile(r"(?:Binary|AUnary|BUnary)Functor<([^<>,]+), ([^<>,]+), ([^<>,]+),")
_OWN_TYPE = re.compile(r"(?:CUDAFunctor_add|CUDAFunctorOnSelf_add|FillFunctor)<([^<>,]+)>")
_COMPARISON = re.compile(r"(?:Compare\w*Functor|is(?:neg|pos)inf_kernel|isnan_kernel|isinf_kernel|logical_\w+_kernel)")
_HALF_COPY = re.compile(r"b?float16_copy_kernel_cuda")
# They return the type of their first argument that is no condition.
_SAME_TYPE = re.compile(
    r"(?:direct_copy|neg|tanh|tanh_backward|sigmoid|sigmoid_backward|exp|rsqrt|sqrt|cos|sin|silu|silu_backward|masked_fill"
    r"|where|log|reciprocal|pow_tensor_scalar|GeluCUDA|GeluBackwardCUDA|launch_clamp)_?(?:kernel|scalar|Kernel)"
)
_PARAMETERS = re.compile(r"lambda\(([^()]+)\)")


def result_sizes(functor: str, *, is_cast: bool) -> tuple[int, ...]:
    """Bytes of one result: one size where it is known. A kernel that casts on its way out may write any type."""
    if is_cast:
        return ANY_SIZE
    plain = _SCOPES.sub("", functor)
    if _HALF_COPY.match(plain):
        return (2,)
    if _COMPARISON.match(plain):
        return (1,)
    spelled = _spell_result(plain)
    size = type_bytes(spelled) if spelled else None
    return (size,) if size else ANY_SIZE


def _spell_result(plain: str) -> str | None:
    if match := _NAMED_RESULT.match(plain):
        return match[3]
    if match := _OWN_TYPE.match(plain):
        return match[1]
    if _SAME_TYPE.match(plain):
        written = [one.strip() for group in _PARAMETERS.findall(plain)[-1:] for one in group.split(",")]
        return next((one for one in written if one != "bool"), "bool" if written else None)
    return None
