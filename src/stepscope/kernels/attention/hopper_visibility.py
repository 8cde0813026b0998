"""Which keys a row sees, for the kernels of Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def find_last_keys(rows, num_queries, num_keys, CAUSAL: gl.constexpr):
    """The last key that each row sees. A causal mask is aligned at the end: the last row sees all keys."""
    if CAUSAL:
        return gl.minimum(rows + (num_keys - num_queries), num_keys - 1)
    else:
        return gl.where(rows >= 0, num_keys - 1, 0)
