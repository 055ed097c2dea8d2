# mypy: ignore-errors
"""Triton programs for CUDA devices: attention in split half precision (see `split.py`), copies and sums of tokens."""

import triton
import triton.language as tl


@triton.jit
def largest(X, SIZE, n, sb, sn, sd, d, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Raise SIZE (B,) to the largest absolute entry of the vectors X (B, n, d) of each batch."""
    b = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    at = b * sb + row[:, None] * sn + column[None, :] * sd
    x = tl.load(X + at, mask=(row[:, None] < n) & (column[None, :] < d), other=0.0).to(tl.float32)
    tl.atomic_max(SIZE + b, tl.max(tl.max(tl.abs(x), 1), 0))


@triton.jit
def split(
    X, HI, LO, SIZE, UNIT, factor, n, sb, sn, sd, d, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write factor · X (B, n, d) as UNIT · (HI + LO), in float16 of at most 2^LARGEST; UNIT (B,) are powers of two."""
    b = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = row[:, None] < n
    at = b * sb + row[:, None] * sn + column[None, :] * sd
    x = tl.load(X + at, mask=inside & (column[None, :] < d), other=0.0).to(tl.float32)
    unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.load(SIZE + b) * factor, 1e-30))) - LARGEST)
    tl.store(UNIT + b, unit)
    x = x * (factor / unit)
    hi = x.to(tl.float16)
    to = b * n * WIDTH + row[:, None] * WIDTH + column[None, :]
    tl.store(HI + to, hi, mask=inside)
    if not WHOLE:
        tl.store(LO + to, (x - hi.to(tl.float32)).to(tl.float16), mask=inside)


@triton.jit
def _block(
    n, length, m, mass, acc, best, qh, ql, KH, KL, VH, VL, B, unit, rk, rv,
    DK: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, PEAKS: tl.constexpr,
    SHIFT: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Add keys n .. n + BN − 1 to the running softmax sums of a block of queries; scores are in units of log 2."""
    rn = n + tl.arange(0, BN)
    ko, vo = rn[None, :] * DK + rk[:, None], rn[:, None] * DV + rv[None, :]
    there = rn < length
    kh = tl.load(KH + ko, mask=there[None, :], other=0.0) if TAIL else tl.load(KH + ko)
    if WIDE == 3:
        kl = tl.load(KL + ko, mask=there[None, :], other=0.0) if TAIL else tl.load(KL + ko)
        s = tl.dot(qh, kl)
        s = tl.dot(ql, kh, s)
        s = tl.dot(qh, kh, s)
    elif WIDE == 2:
        s = tl.dot(ql, kh)
        s = tl.dot(qh, kh, s)
    else:
        s = tl.dot(qh, kh)
    if BIAS:
        bias = tl.load(B + rn[None, :], mask=there[None, :], other=0.0) if TAIL else tl.load(B + rn[None, :])
        s = s * unit + bias.to(tl.float32) * 1.4426950408889634
        unit = 1.0
    if TAIL:
        s = tl.where(there[None, :], s, -float("inf"))
    if PEAKS:
        top, at = tl.max(s, 1, return_indices=True)
        top = top * unit
        best = tl.where(top > m, n + at, best)
    else:
        top = tl.max(s, 1) * unit
    new = tl.maximum(m, top)
    level = tl.where(new == -float("inf"), 0.0, new) - SHIFT if BIAS else new - SHIFT
    a = tl.exp2(m - SHIFT - level)
    p = tl.exp2(s * unit - level[:, None])
    mass = mass * a + tl.sum(p, 1)
    ph = p.to(tl.float16)
    vh = tl.load(VH + vo, mask=there[:, None], other=0.0) if TAIL else tl.load(VH + vo)
    o = tl.zeros_like(acc)
    if WIDE == 3:
        vl = tl.load(VL + vo, mask=there[:, None], other=0.0) if TAIL else tl.load(VL + vo)
        o = tl.dot(ph, vl, o)
    if WIDE > 1:
        o = tl.dot((p - ph.to(tl.float32)).to(tl.float16), vh, o)
    o = tl.dot(ph, vh, o)
    acc = acc * a[:, None] + o
    return new, mass, acc, best


@triton.jit
def forward(
    QH, QL, KH, KL, VH, VL, QUNIT, KUNIT, VUNIT, BIAS_AT, WORK, OUT, ROWS, WHERE, m_all, n_all, count, bias_job,
    bias_row, parts, DK: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr, PEAKS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries over keys start .. stop − 1, for a job (query batch, key batch, start, stop)."""
    blocks = tl.cdiv(m_all, BM)
    job = (tl.program_id(0) // blocks).to(tl.int64)
    q, k = tl.load(WORK + 4 * job), tl.load(WORK + 4 * job + 1)
    start, stop = tl.load(WORK + 4 * job + 2), tl.load(WORK + 4 * job + 3)
    length = tl.maximum(stop - start, 0).to(tl.int32)
    rm = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    rk, rv = tl.arange(0, DK), tl.arange(0, DV)
    mine = rm < m_all
    qo = q * m_all * DK + rm[:, None] * DK + rk[None, :]
    qh = tl.load(QH + qo, mask=mine[:, None], other=0.0)
    ql = tl.load(QL + qo, mask=mine[:, None], other=0.0)
    unit = tl.load(QUNIT + q) * tl.load(KUNIT + k)
    first = k * n_all + start  # so that offsets within a job are small numbers
    KH, KL = KH + first * DK, KL + first * DK
    VH, VL = VH + first * DV, VL + first * DV
    B = BIAS_AT
    if BIAS:
        B = BIAS_AT + start + (job // parts) * bias_job + tl.where(mine, rm, 0)[:, None].to(tl.int64) * bias_row
    m, mass = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    best, acc = tl.full([BM], -1, tl.int32), tl.zeros([BM, DV], tl.float32)
    whole = length // BN * BN
    for n in range(0, whole, BN):
        m, mass, acc, best = _block(
            n, length, m, mass, acc, best, qh, ql, KH, KL, VH, VL, B, unit, rk, rv,
            DK, DV, BN, WIDE, BIAS, PEAKS, SHIFT, False,
        )  # fmt: skip
    if whole < length:
        m, mass, acc, best = _block(
            whole, length, m, mass, acc, best, qh, ql, KH, KL, VH, VL, B, unit, rk, rv,
            DK, DV, BN, WIDE, BIAS, PEAKS, SHIFT, True,
        )  # fmt: skip
    some = mass > 0
    safe = tl.where(some, mass, 1.0)
    to = job * m_all + rm
    scale = tl.load(VUNIT + k) / safe
    tl.store(OUT + to[:, None] * DV + rv[None, :], acc * scale[:, None], mask=mine[:, None])
    tl.store(ROWS + to, tl.where(some, m - SHIFT + tl.log2(safe), -float("inf")), mask=mine)
    if PEAKS:
        tl.store(ROWS + count.to(tl.int64) * m_all + to, m, mask=mine)
        tl.store(WHERE + to, tl.where(best < 0, -1, start + best), mask=mine)


@triton.jit
def put(X, STORE, SIZE, ROWS, MARKS, n, marks, base, heads, d, sx, D: tl.constexpr, BLOCK: tl.constexpr):
    """Copy tokens X (n, heads, d) to rows ROWS of STORE, and those at MARKS again from row `base` on; SIZE: max |X|."""
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
    """Sums (chunks, heads, d) and sums of outer products (chunks, heads, d, d) of rows X (n, heads, d) − SHIFT."""
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
    ABOVE, PLACES, TOKENS, VALUES, LIMITS, BEGIN, COUNT, TABLE, rise, rows, queries, tokens, nodes, v,
    PARTS: tl.constexpr, NODES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bin tokens by softmax weight W: each token is shared between the two nodes (weights of a grid) next to its W.

    For each node, COUNT gets the number of tokens. TABLE gets sums of W d, W and W |d|², divided by the node's weight,
    with d = value − limit. PLACES (rows, tokens) is the node below each token, ABOVE is log(W / node), and TOKENS are
    indices in VALUES (heads, tokens, v). Tokens are sorted by W within each of PARTS subsets. BEGIN (rows, PARTS,
    nodes + 1) is the first token at or above each node.
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
        weight = times.to(tl.float32)
        upper = (tl.maximum(times - 1.0, 0.0) / rise).to(tl.float32)
        share = tl.where(node[:, None] == place[None, :], 1.0 - upper[None, :], 0.0)
        share = tl.where(node[:, None] == place[None, :] + 1, upper[None, :], share)
        count += tl.sum(share, 1)
        share = tl.where(node[:, None] == place[None, :] + 1, share / (1.0 + rise), share)
        inside = there[:, None] & wide[None, :]
        d = tl.load(VALUES + ((row // queries) * tokens + token)[:, None] * v + column[None, :], mask=inside, other=0.0)
        d = tl.where(inside, d - limit[None, :], 0.0).to(tl.float32)  # float32 from here on: nothing cancels any more
        pull += tl.dot(share, weight[:, None] * d, input_precision="ieee")
        share = share * weight[None, :]
        mass += tl.sum(share, 1)
        square += tl.sum(share * tl.sum(d * d, 1)[None, :], 1)
    known = node < nodes
    to = (part * nodes + node) * rows + row
    tl.store(COUNT + to, count, mask=known)
    tl.store(TABLE + to[:, None] * (v + 2) + column[None, :], pull, mask=known[:, None] & wide[None, :])
    tl.store(TABLE + to * (v + 2) + v, mass, mask=known)
    tl.store(TABLE + to * (v + 2) + v + 1, square, mask=known)


@triton.jit(do_not_specialize=["new", "batch"])
def ragged(
    Q, K, V, W, SEEN, START, KEPT, ROW, FROM, OUT, LSE, scale, softcap, new, batch, queries, part, qb, qh, ql, sb, sl,
    LENGTH: tl.constexpr, GROUPS: tl.constexpr, dk: tl.constexpr, dv: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WEIGHTS: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries over one part of the keys of a row (see `ragged.attend`)."""
    job = tl.program_id(0)
    row, begin = tl.load(ROW + job), tl.load(FROM + job)
    start, kept = tl.load(START + row), tl.load(KEPT + row).to(tl.int32)
    total = kept + new
    i = tl.program_id(1) * BM + tl.arange(0, BM)
    rk, rv = tl.arange(0, DK), tl.arange(0, DV)
    mine = i < queries
    b, token = (row % batch).to(tl.int64), i % LENGTH
    qo = b * qb + (row // batch * GROUPS + i // LENGTH)[:, None] * qh + token[:, None] * ql + rk[None, :]
    q = tl.load(Q + qo, mask=mine[:, None] & (rk[None, :] < dk), other=0.0)
    last = total - LENGTH + token  # last key that each query sees
    stop = tl.minimum(begin + part, total)
    K, V, W = K + start * dk, V + start * dv, W + start
    m, mass = tl.full([BM], -float("inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    for n in range(begin, stop, BN):
        rn = n + tl.arange(0, BN)
        there = rn < stop
        k = tl.load(K + rn[None, :] * dk + rk[:, None], mask=there[None, :] & (rk[:, None] < dk), other=0.0)
        v = tl.load(V + rn[:, None] * dv + rv[None, :], mask=there[:, None] & (rv[None, :] < dv), other=0.0)
        if WIDEN:
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        s = tl.dot(q, k, input_precision="tf32x3") * scale
        if SOFTCAP:
            s = softcap * (1 - 2 / (tl.exp(2 * s / softcap) + 1))
        if WEIGHTS:
            s += tl.load(W + rn, mask=there, other=0.0)[None, :]
        some = there[None, :] & (rn[None, :] <= last[:, None])
        if MASKED:
            own = (rn[None, :] >= kept) & there[None, :] & mine[:, None]
            so = b * sb + token[:, None] * sl + (rn - kept)[None, :]
            some = some & (tl.load(SEEN + so, mask=own, other=1) != 0)
        s = tl.where(some, s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        level = tl.where(top == -float("inf"), 0.0, top)
        a = tl.exp(m - level)
        p = tl.exp(s - level[:, None])
        mass = mass * a + tl.sum(p, 1)
        acc = acc * a[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        m = top
    safe = tl.where(mass > 0, mass, 1.0)
    to = job.to(tl.int64) * queries + i
    tl.store(OUT + to[:, None] * dv + rv[None, :], acc / safe[:, None], mask=mine[:, None] & (rv[None, :] < dv))
    tl.store(LSE + to, tl.where(mass > 0, m + tl.log(safe), -float("inf")), mask=mine)


@triton.jit(do_not_specialize=["batch"])
def merge(
    PARTS, LSE, FIRST, SINKS, OUT, batch, queries, ob, oh, ol, LENGTH: tl.constexpr, GROUPS: tl.constexpr,
    dv: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, SUNK: tl.constexpr,
):  # fmt: skip
    """Merge the outputs of the parts of a row by their log-sum-exps, and apply learned sinks, for one query."""
    row, i, rv = tl.program_id(0), tl.program_id(1), tl.arange(0, DV)
    head = row // batch * GROUPS + i // LENGTH
    first, last = tl.load(FIRST + row), tl.load(FIRST + row + 1)
    m, mass = -float("inf"), 0.0
    if SUNK:
        m, mass = tl.load(SINKS + head).to(tl.float32), 1.0
    acc = tl.zeros([DV], tl.float32)
    for n in range(first, last, BLOCK):
        at = n + tl.arange(0, BLOCK)
        there, place = at < last, at.to(tl.int64) * queries + i
        lse = tl.load(LSE + place, mask=there, other=-float("inf"))
        part = tl.load(PARTS + place[:, None] * dv + rv[None, :], mask=there[:, None] & (rv[None, :] < dv), other=0.0)
        top = tl.maximum(m, tl.max(lse, 0))
        level = tl.where(top == -float("inf"), 0.0, top)
        a, weight = tl.exp(m - level), tl.exp(lse - level)
        mass = mass * a + tl.sum(weight, 0)
        acc = acc * a + tl.sum(weight[:, None] * part, 0)
        m = top
    acc = acc / tl.where(mass > 0, mass, 1.0)
    to = (row % batch).to(tl.int64) * ob + head * oh + i % LENGTH * ol + rv
    tl.store(OUT + to, acc.to(OUT.dtype.element_ty), mask=rv < dv)


@triton.jit(do_not_specialize=["new", "batch"])
def append(
    KEY, VALUE, K, V, START, KEPT, new, batch, kb, kh, kl, vb, vh, vl, dk: tl.constexpr, dv: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Copy the key and value of one new token of one head to the end of its row."""
    row, token = tl.program_id(0), tl.program_id(1)
    head, b = row // batch, (row % batch).to(tl.int64)
    to = tl.load(START + row) + tl.load(KEPT + row) + new + token
    rk, rv = tl.arange(0, DK), tl.arange(0, DV)
    key = tl.load(KEY + b * kb + head * kh + token * kl + rk, mask=rk < dk)
    value = tl.load(VALUE + b * vb + head * vh + token * vl + rv, mask=rv < dv)
    tl.store(K + to * dk + rk, key, mask=rk < dk)
    tl.store(V + to * dv + rv, value, mask=rv < dv)
