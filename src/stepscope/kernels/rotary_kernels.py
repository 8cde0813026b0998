"""The Triton kernel of rotary embeddings, for every GPU since Ampere. It does not import torch, so that it can be
compiled without it; `rotary.py` launches it.

One launch rotates q and k, and may copy v next to them. Each element is read once and written once. A row is one head
at one position; a program takes ROWS of them, in the order of (B, L, H, D) memory, which is the order of what a product
writes. The tables of cos and sin are read again for each head, from the L1 cache.
"""

# B batch, H query heads, G key/value heads, L length, D head dim, P = D/2 rotated pairs.

from typing import NamedTuple

import triton
import triton.language as tl

ELEMENTS = 2048  # of a program


class RotaryTile(NamedTuple):
    block: int  # the head dim, rounded up to a power of two
    rows: int
    num_warps: int


def choose_tile(head_dim: int) -> RotaryTile:
    """16 elements per thread."""
    block = triton.next_power_of_2(head_dim)
    return RotaryTile(block=block, rows=max(1, ELEMENTS // block), num_warps=4)


@triton.jit
def rotate_heads(
    q,
    k,
    v,  # None if there is none, as `v_out`
    q_out,
    k_out,
    v_out,
    cos,
    sin,
    batch_length,  # B · L
    length,
    q_strides,  # of (B, H, L, D), as all of them
    k_strides,
    v_strides,
    q_out_strides,
    k_out_strides,
    v_out_strides,
    table_strides,  # of (B, L, P), the same for both tables
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,  # rotate back
):
    """Programs for q come first, then those for k, then those for v."""
    program = tl.program_id(0)
    tables = (cos, sin, table_strides)
    num_q_programs = tl.cdiv(batch_length * HEADS, ROWS)
    num_k_programs = tl.cdiv(batch_length * GROUPS, ROWS)
    if program < num_q_programs:
        _rotate_rows(
            q, q_out, q_strides, q_out_strides, tables, program, batch_length, length,
            HEADS, HEAD_DIM, BLOCK, ROWS, INTERLEAVED, INVERSE,
        )  # fmt: skip
    elif program < num_q_programs + num_k_programs:
        _rotate_rows(
            k, k_out, k_strides, k_out_strides, tables, program - num_q_programs, batch_length, length,
            GROUPS, HEAD_DIM, BLOCK, ROWS, INTERLEAVED, INVERSE,
        )  # fmt: skip
    elif v is not None:
        program -= num_q_programs + num_k_programs
        row, batch, head, position = _locate(program, length, GROUPS, ROWS)
        column = tl.arange(0, BLOCK)[None, :]
        inside = (row < batch_length * GROUPS) & (column < HEAD_DIM)
        values = tl.load(v + _offset(batch, head, position, column, v_strides), inside, 0)
        tl.store(v_out + _offset(batch, head, position, column, v_out_strides), values, inside)


@triton.jit
def _rotate_rows(
    x,
    out,
    strides,
    out_strides,
    tables,
    program,
    batch_length,
    length,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
):
    cos, sin, table_strides = tables
    row, batch, head, position = _locate(program, length, HEADS, ROWS)
    is_row = row < batch_length * HEADS
    pair = tl.arange(0, BLOCK // 2)[None, :]
    is_pair = is_row & (pair < HEAD_DIM // 2)
    place = batch * table_strides[0] + position * table_strides[1] + pair * table_strides[2]
    c = tl.load(cos + place, is_pair, 0).to(tl.float32)
    s = tl.load(sin + place, is_pair, 0).to(tl.float32)
    if INVERSE:
        s = -s
    if INTERLEAVED:
        column = tl.arange(0, BLOCK)[None, :]
        inside = is_row & (column < HEAD_DIM)
        values = tl.load(x + _offset(batch, head, position, column, strides), inside, 0).to(tl.float32)
        first, second = tl.split(values.reshape(ROWS, BLOCK // 2, 2))
        rotated = tl.join(first * c - second * s, first * s + second * c).reshape(ROWS, BLOCK)
        tl.store(out + _offset(batch, head, position, column, out_strides), rotated.to(out.dtype.element_ty), inside)
    else:
        source = x + _offset(batch, head, position, pair, strides)
        target = out + _offset(batch, head, position, pair, out_strides)
        first = tl.load(source, is_pair, 0).to(tl.float32)
        second = tl.load(source + HEAD_DIM // 2 * strides[3], is_pair, 0).to(tl.float32)
        tl.store(target, (first * c - second * s).to(out.dtype.element_ty), is_pair)
        second = first * s + second * c
        tl.store(target + HEAD_DIM // 2 * out_strides[3], second.to(out.dtype.element_ty), is_pair)


@triton.jit
def _locate(program, length, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The rows of a program, as a column, and where they are."""
    row = program * ROWS + tl.arange(0, ROWS)[:, None]
    batch_position = row // HEADS
    batch = (batch_position // length).to(tl.int64)
    return row, batch, row % HEADS, (batch_position % length).to(tl.int64)


@triton.jit
def _offset(batch, head, position, column, strides):
    return batch * strides[0] + head * strides[1] + position * strides[2] + column * strides[3]
