# mypy: ignore-errors
"""What runs on the chip beside attention: `put` tokens where they go, `products` of them, `gather` them on nodes."""

import triton
import triton.language as tl


@triton.jit
def put(X, STORE, SIZE, ROWS, MARKS, n, marks, base, heads, d, sx, D: tl.constexpr, BLOCK: tl.constexpr):
    """Rows X (n, heads, d) to places ROWS of a store alike, those at MARKS once more to places from base on.

    SIZE (heads,) grows to the largest |number| of each head: a maximum is the same in whatever order it is taken.
    """
    i, head, column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.arange(0, D)
    own, twice = i < n, (i >= n) & (i < n + marks)
    source = tl.load(MARKS + i - n, mask=twice, other=0)
    source = tl.where(own, i, source)
    to = tl.where(own, tl.load(ROWS + i, mask=own, other=0), base + i - n)
    inside = (i[:, None] < n + marks) & (column[None, :] < d)
    at = head * d + column[None, :]
    x = tl.load(X + source[:, None] * sx + at, mask=inside, other=0.0)
    tl.store(STORE + to[:, None] * (heads * d) + at, x, mask=inside)
    tl.atomic_max(SIZE + head, tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0))


@triton.jit
def products(X, SHIFT, FIRST, SECOND, n, heads, d, sx, sh, CHUNK: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Sums (chunks, heads, d) and sums of products (chunks, heads, d, d) of rows X (n, heads, d) less SHIFT (heads, d).

    Every block has an accumulator of its own, since tensor cores truncate.
    """
    chunk, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    wide = column < d
    shift = tl.load(SHIFT + head * d + column, mask=wide, other=0.0)
    first, second = tl.zeros([D], tl.float32), tl.zeros([D, D], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        row = chunk * CHUNK + start + tl.arange(0, BLOCK)
        inside = (row[:, None] < n) & wide[None, :]
        x = tl.load(X + row[:, None] * sx + head * sh + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - shift[None, :], 0.0)
        first += tl.sum(x, 0)
        second += tl.dot(tl.trans(x), x, input_precision="tf32x3")
    to = chunk * heads + head
    tl.store(FIRST + to * d + column, first, mask=wide)
    both = wide[:, None] & wide[None, :]
    tl.store(SECOND + (to * d + column[:, None]) * d + column[None, :], second, mask=both)


@triton.jit
def gather(
    ABOVE, PLACES, TOKENS, WEIGHTS, VALUES, LIMITS, BEGIN, COUNT, TABLE, rise, rows, queries, tokens, nodes, v,
    PARTS: tl.constexpr, NODES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Split tokens between the nodes around their weights: tokens, W d, W and W |d|² on some nodes.

    In each row tokens are in the order of their weights within a part: PLACES (rows, tokens) are the nodes below them,
    with WEIGHTS (nodes,), ABOVE how far above in logarithms they are, TOKENS which of VALUES (heads, tokens, v) they
    have. BEGIN (rows, parts, nodes + 1) is where tokens on a node or above begin.
    """
    row, part, below = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * NODES
    node, column = below + tl.arange(0, NODES), tl.arange(0, D)
    wide = column < v
    at = BEGIN + (row * PARTS + part) * (nodes + 1)
    begin, end = tl.load(at + tl.maximum(below - 1, 0)), tl.load(at + tl.minimum(below + NODES, nodes))
    limit = tl.load(LIMITS + row * v + column, mask=wide, other=0.0)
    count, mass, square = tl.zeros([NODES], tl.float32), tl.zeros([NODES], tl.float32), tl.zeros([NODES], tl.float32)
    pull = tl.zeros([NODES, D], tl.float32)
    for start in range(begin, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        there, from_row = t < end, row * tokens + t
        place = tl.load(PLACES + from_row, mask=there, other=-2)
        token = tl.load(TOKENS + from_row, mask=there, other=0)
        times = tl.exp(tl.load(ABOVE + from_row, mask=there, other=0.0))
        weight = (times * tl.load(WEIGHTS + place, mask=there, other=0.0)).to(tl.float32)
        upper = (tl.maximum(times - 1.0, 0.0) / rise).to(tl.float32)
        share = tl.where(node[:, None] == place[None, :], 1.0 - upper[None, :], 0.0)
        share = tl.where(node[:, None] == place[None, :] + 1, upper[None, :], share)
        inside = there[:, None] & wide[None, :]
        d = tl.load(VALUES + ((row // queries) * tokens + token)[:, None] * v + column[None, :], mask=inside, other=0.0)
        d = tl.where(inside, d - limit[None, :], 0.0).to(tl.float32)  # single from here on: nothing cancels any more
        pull += tl.dot(share, weight[:, None] * d, input_precision="ieee")
        count += tl.sum(share, 1)
        share = share * weight[None, :]
        mass += tl.sum(share, 1)
        square += tl.sum(share * tl.sum(d * d, 1)[None, :], 1)
    known = node < nodes
    to = (part * nodes + node) * rows + row
    tl.store(COUNT + to, count, mask=known)
    tl.store(TABLE + to[:, None] * (v + 2) + column[None, :], pull, mask=known[:, None] & wide[None, :])
    tl.store(TABLE + to * (v + 2) + v, mass, mask=known)
    tl.store(TABLE + to * (v + 2) + v + 1, square, mask=known)
