# mypy: ignore-errors
"""Triton programs of certified reads for one decoded token (see `certify_kernels.py`)."""

import triton
import triton.language as tl


@triton.jit
def uniform(key, j):
    """Uniform numbers in [0, 1) of keys j, from an integer hash; `key` (uint32) is that of the sequence and head."""
    x = key + j.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) >> 8).to(tl.float32) * 5.9604644775390625e-8


@triton.jit
def stream(seed, pair):
    """Start of the hash of one sequence and key/value head."""
    x = pair * 0x9E3779B9 + seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    return (x ^ (x >> 15)) * 0x846CA68B


@triton.jit
def _quantile(
    TABLE, f, nu, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr
):
    """Quantile from a table of its logarithm over log f and log ν, interpolated."""
    x = tl.minimum(tl.maximum(tl.log(f), 0.0) / ROW_STEP, ROWS - 1.001)
    y = tl.minimum(tl.maximum(tl.log(nu), 0.0) / COLUMN_STEP, COLUMNS - 1.001)
    i, k = x.to(tl.int32), y.to(tl.int32)
    x, y = x - i, y - k
    at = TABLE + i * COLUMNS + k
    first = tl.load(at) * (1 - y) + tl.load(at + 1) * y
    return tl.exp(first * (1 - x) + (tl.load(at + COLUMNS) * (1 - y) + tl.load(at + COLUMNS + 1) * y) * x)


@triton.jit
def _unpacked(word, QUARTER: tl.constexpr, FAST: tl.constexpr):
    """Numbers 16 + code in float16, of the codes in bits 4 · QUARTER of 16-bit words: bits 0x4C00 | code << 6."""
    if FAST:  # two at a time
        SHIFT: tl.constexpr = ("shl.b32 t, $1, 6;", "shl.b32 t, $1, 2;", "shr.b32 t, $1, 2;", "shr.b32 t, $1, 6;")
        ASM: tl.constexpr = "{.reg .b32 t; " + SHIFT[QUARTER] + " lop3.b32 $0, t, 0x03C003C0, 0x4C004C00, 0xEA;}"
        return tl.inline_asm_elementwise(ASM, "=r,r", [word], dtype=tl.float16, is_pure=True, pack=2)
    word = word << (6 - 4 * QUARTER) if QUARTER < 2 else word >> (4 * QUARTER - 6)
    return ((word & 0x3C0) | 0x4C00).to(tl.float16, bitcast=True)


@triton.jit
def predict(
    Q, CODES, STEP, LOW, SHIFT, SCORES, PEAK, MASS, scale, n, groups, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Scores (pairs · G, n) of queries Q (pairs · G, D) by 4-bit keys, and sums of e^score over PART groups.

    CODES (pairs, groups, GROUP, D/4) hold the codes of channels c, c + D/4, c + D/2 and c + 3D/4 in one 16-bit word. A
    number is LOW + STEP · (16 + code). The first and last keys have no part in PEAK and MASS.
    """
    W: tl.constexpr = D // 4
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w, g, j = tl.arange(0, W), tl.arange(0, GP), tl.arange(0, GROUP)
    mine = g < G
    at = Q + (pair * G + g[None, :]) * D + w[:, None]
    q0 = (tl.load(at, mask=mine[None, :], other=0.0).to(tl.float32) * scale).to(tl.float16)
    q1 = (tl.load(at + W, mask=mine[None, :], other=0.0).to(tl.float32) * scale).to(tl.float16)
    q2 = (tl.load(at + 2 * W, mask=mine[None, :], other=0.0).to(tl.float32) * scale).to(tl.float16)
    q3 = (tl.load(at + 3 * W, mask=mine[None, :], other=0.0).to(tl.float32) * scale).to(tl.float16)
    blocks = part * PART + tl.arange(0, PART)
    there = blocks[:, None] < groups
    at = LOW + (pair * groups + blocks[:, None]) * D + w[None, :]
    shift = tl.dot(tl.load(at, mask=there, other=0.0), q0)
    shift = tl.dot(tl.load(at + W, mask=there, other=0.0), q1, shift)
    shift = tl.dot(tl.load(at + 2 * W, mask=there, other=0.0), q2, shift)
    shift = tl.dot(tl.load(at + 3 * W, mask=there, other=0.0), q3, shift)
    tl.store(SHIFT + (pair * groups + blocks[:, None]) * GP + g[None, :], shift, mask=there)
    tl.debug_barrier()  # other threads read what these wrote
    for block in range(part * PART, tl.minimum((part + 1) * PART, groups)):
        here = pair * groups + block
        word = tl.load(CODES + (here * GROUP + j[:, None]) * W + w[None, :])
        step = STEP + here * D + w
        s = tl.dot(_unpacked(word, 0, FAST), q0 * tl.load(step)[:, None])
        s = tl.dot(_unpacked(word, 1, FAST), q1 * tl.load(step + W)[:, None], s)
        s = tl.dot(_unpacked(word, 2, FAST), q2 * tl.load(step + 2 * W)[:, None], s)
        s = tl.dot(_unpacked(word, 3, FAST), q3 * tl.load(step + 3 * W)[:, None], s)
        s += tl.load(SHIFT + here * GP + g)[None, :]
        key = block * GROUP + j
        rows = (pair * G + g[None, :]) * n + key[:, None]
        tl.store(SCORES + rows, s.to(tl.float16), mask=mine[None, :] & (key[:, None] < n))
    tl.debug_barrier()
    h, keys = tl.arange(0, GS), part * PART * GROUP + tl.arange(0, PART * GROUP)
    inner = (h[:, None] < G) & ((keys >= SINKS) & (keys < n - WINDOW))[None, :]
    own = tl.load(SCORES + (pair * G + h[:, None]) * n + keys[None, :], mask=inner, other=-float("inf")).to(tl.float32)
    peak = tl.max(own, 1)
    mass = tl.sum(tl.exp(own - tl.where(peak == -float("inf"), 0.0, peak)[:, None]), 1)
    to = (pair * G + h) * tl.num_programs(1) + part
    tl.store(PEAK + to, peak, mask=h < G)
    tl.store(MASS + to, mass, mask=h < G)


@triton.jit
def _log_norm(PEAK, MASS, row, parts, PARTS: tl.constexpr):
    """Logarithm of the sum of e^score over the inner keys of a query."""
    p = tl.arange(0, PARTS)
    peaks = tl.load(PEAK + row * parts + p, mask=p < parts, other=-float("inf"))
    top = tl.max(peaks, 0)
    mass = tl.load(MASS + row * parts + p, mask=p < parts, other=0.0)
    return top + tl.log(tl.sum(mass * tl.exp(peaks - top), 0))


@triton.jit
def draw(
    Q, K, V, SCORES, PEAK, MASS, LIST, EXACT, TOP, SUM, SUMS, FOUND, MISSED, seed, scale, level, n, parts, length,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, DEFENSIVE: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PARTS: tl.constexpr, SCAN: tl.constexpr, BN: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """First sample of a query in one part of its keys: LIST and EXACT (rows, parts, ROOM), and its softmax sums."""
    FIXED: tl.constexpr = SINKS + WINDOW
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, to = row // G, row * tl.num_programs(1) + at
    SCORES, LIST, EXACT = SCORES + row * n, LIST + to * ROOM, EXACT + to * ROOM
    K, V = K + pair * n * D, V + pair * n * D
    c, e = tl.arange(0, D), tl.arange(0, BN)
    log_norm, even = _log_norm(PEAK, MASS, row, parts, PARTS), DEFENSIVE / (n - FIXED)
    key = stream(seed, pair.to(tl.uint32))
    always = tl.where(at == 0, FIXED, 0)
    fixed = tl.arange(0, 128)
    tl.store(LIST + fixed, tl.where(fixed < SINKS, fixed, n - FIXED + fixed), mask=fixed < always)
    total, missed = always, tl.zeros([SCAN], tl.int32)
    for start in range(at * length, tl.minimum((at + 1) * length, n), SCAN):
        j = start + tl.arange(0, SCAN)
        inner = (j >= SINKS) & (j < n - WINDOW) & (j < (at + 1) * length)
        s = tl.load(SCORES + j, mask=inner, other=-float("inf")).to(tl.float32)
        chance = level * tl.where(inner, (1 - DEFENSIVE) * tl.exp(s - log_norm) + even, 0.0)
        new = inner & (uniform(key, j) < chance)
        missed += (inner & (chance < 1)).to(tl.int32)
        there = new.to(tl.int32)
        place = total + tl.cumsum(there, 0) - 1
        tl.store(LIST + place, j, mask=new & (place < ROOM))
        total += tl.sum(there, 0)
    tl.debug_barrier()
    peak, mass = tl.full([BN], -float("inf"), tl.float32), tl.zeros([BN], tl.float32)
    acc = tl.zeros([BN, D], tl.float32)
    q = tl.load(Q + row * D + c).to(tl.float32) * scale
    for start in range(0, tl.minimum(total, ROOM), BN):
        i = start + e
        there = i < tl.minimum(total, ROOM)
        j = tl.load(LIST + i, mask=there, other=0)
        k = tl.load(K + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0)
        v = tl.load(V + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0)
        s = tl.sum(k.to(tl.float32) * q[None, :], 1)
        tl.store(EXACT + i, s, mask=there)
        share = (1 - DEFENSIVE) * tl.exp(tl.load(SCORES + j).to(tl.float32) - log_norm) + even
        s -= tl.where(i < always, 0.0, tl.log(tl.minimum(level * share, 1.0)))
        s = tl.where(there, s, -float("inf"))
        new = tl.maximum(peak, s)
        base = tl.where(new == -float("inf"), 0.0, new)
        a, w = tl.exp(peak - base), tl.exp(s - base)
        mass = mass * a + w
        acc = acc * a[:, None] + w[:, None] * v.to(tl.float32)
        peak = new
    top = tl.max(peak, 0)
    part = tl.exp(peak - tl.where(top == -float("inf"), 0.0, top))
    tl.store(TOP + to, top)
    tl.store(SUM + to, tl.sum(mass * part, 0))
    tl.store(SUMS + to * D + c, tl.sum(acc * part[:, None], 0))
    tl.store(FOUND + to, total)
    tl.store(MISSED + to, tl.sum(missed, 0))


@triton.jit
def check(
    V, SCORES, PEAK, MASS, CHECKED, LIST, EXACT, TOP, SUM, SUMS, FOUND, MISSED, OUT, COUNT, WHOLE, error, level, n,
    parts, SINKS: tl.constexpr, WINDOW: tl.constexpr, DEFENSIVE: tl.constexpr, UNSURE: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, ROOM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr,
):  # fmt: skip
    """Output of a query from its first sample if its check passes in one direction; else WHOLE is 2."""
    FIXED: tl.constexpr = SINKS + WINDOW
    row = tl.program_id(0).to(tl.int64)
    SCORES, V = SCORES + row * n, V + row // G * n * D
    c, e, p = tl.arange(0, D), tl.arange(0, BN), row * SPLITS + tl.arange(0, SPLITS)
    log_norm, even = _log_norm(PEAK, MASS, row, parts, PARTS), DEFENSIVE / (n - FIXED)
    tops, counts = tl.load(TOP + p), tl.load(FOUND + p)
    top = tl.max(tops, 0)
    parts_of = tl.exp(tops - top)
    sum_of = tl.sum(tl.load(SUM + p) * parts_of, 0)
    out = tl.sum(tl.load(SUMS + p[:, None] * D + c[None, :]) * parts_of[:, None], 0) / sum_of
    log_sum, norm = top + tl.log(sum_of), tl.sum(out * out, 0)
    fits = tl.max(counts, 0) <= ROOM
    traces, spreads = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    unsure = tl.zeros([BN], tl.int32)
    for at in range(0, SPLITS):
        to = row * SPLITS + at
        count = tl.where(fits, tl.load(FOUND + to), 0)
        for start in range(tl.where(at == 0, FIXED, 0), count, BN):
            i = start + e
            there = i < count
            j = tl.load(LIST + to * ROOM + i, mask=there, other=0)
            away = tl.load(V + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0).to(tl.float32)
            away -= out[None, :]
            s = tl.load(EXACT + to * ROOM + i, mask=there, other=-float("inf"))
            weight = tl.where(there, tl.exp(s - log_sum), 0.0)
            share = (1 - DEFENSIVE) * tl.exp(tl.load(SCORES + j).to(tl.float32) - log_norm) + even
            chance = tl.minimum(level * share, 1.0)
            term = weight * weight * tl.sum(away * away, 1) / chance * (1 / chance - 1)
            traces += term
            spreads += (1 - chance) * term * term
            unsure += (there & (chance < 1)).to(tl.int32)
    trace = tl.sum(traces, 0)
    nu = 2 * trace * trace / tl.maximum(tl.sum(spreads, 0), 1e-30)
    limit = error * error * tl.maximum(norm - trace, 0.1 * norm)
    sure = ((tl.sum(tl.load(MISSED + p), 0) == 0) | (tl.sum(unsure, 0) >= UNSURE)) & (norm > 0) & fits
    held = sure & (trace * _quantile(CHECKED, 1.0, nu, ROWS, COLUMNS, ROW_STEP, COLUMN_STEP) <= limit)
    tl.store(OUT + row * D + c, out, mask=held)
    tl.store(COUNT + row, tl.sum(counts, 0))
    tl.store(WHOLE + row, tl.where(held, 0, 2))


@triton.jit
def read(
    Q, K, V, SCORES, PEAK, MASS, CHECKED, PLANNED, LIST, EXACT, OUT, COUNT, WHOLE, seed, scale, error, first, n, room,
    parts, SINKS: tl.constexpr, WINDOW: tl.constexpr, DEFENSIVE: tl.constexpr, STAGES: tl.constexpr,
    UNSURE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, MUCH: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, PARTS: tl.constexpr,
    SCAN: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ROW_STEP: tl.constexpr, COLUMN_STEP: tl.constexpr,
):  # fmt: skip
    """Output (D,) of one query from its first and last keys and a sample of the others that passes its check.

    LIST and EXACT (rows, room) hold the keys read and their scores. WHOLE is 1 where a query must read everything.
    """
    FIXED: tl.constexpr = SINKS + WINDOW
    row = tl.program_id(0).to(tl.int64)
    pair = row // G
    SCORES, LIST, EXACT = SCORES + row * n, LIST + row * room, EXACT + row * room
    K, V = K + pair * n * D, V + pair * n * D
    c, e = tl.arange(0, D), tl.arange(0, BN)
    q = tl.load(Q + row * D + c).to(tl.float32) * scale
    log_norm, even = _log_norm(PEAK, MASS, row, parts, PARTS), DEFENSIVE / (n - FIXED)
    key = stream(seed, pair.to(tl.uint32))
    fixed = tl.arange(0, 128)
    tl.store(LIST + fixed, tl.where(fixed < SINKS, fixed, n - FIXED + fixed), mask=fixed < FIXED)
    growth = LEAST * tl.exp(tl.arange(0, LEVELS).to(tl.float32) * (tl.log(MOST / LEAST) / (LEVELS - 1)))
    level, before = first, first * 0
    total, done, stage = FIXED + tl.program_id(0) * 0, tl.program_id(0) * 0, 0
    open_ = tl.load(WHOLE + row) == 2
    state = tl.where(open_, 0, 3)
    while (state == 0) & (stage < STAGES):
        expected, missed = tl.zeros([SCAN], tl.float32), tl.zeros([SCAN], tl.int32)
        for start in range(0, n, SCAN):
            j = start + tl.arange(0, SCAN)
            inner = (j >= SINKS) & (j < n - WINDOW)
            s = tl.load(SCORES + j, mask=inner, other=-float("inf")).to(tl.float32)
            share = tl.where(inner, (1 - DEFENSIVE) * tl.exp(s - log_norm) + even, 0.0)
            chance = level * share
            u = uniform(key, j)
            new = inner & (u < chance) & (u >= before * share)
            expected += tl.minimum(chance, 1.0)
            missed += (inner & (chance < 1)).to(tl.int32)
            there = new.to(tl.int32)
            place = total + tl.cumsum(there, 0) - 1
            tl.store(LIST + place, j, mask=new & (place < room))
            total += tl.sum(there, 0)
        if ((stage > 0) & (tl.sum(expected, 0) > MUCH * n)) | (total > room):
            state += 2
        else:
            tl.debug_barrier()  # the list is read by other threads than wrote it
            peak, mass = tl.full([BN], -float("inf"), tl.float32), tl.zeros([BN], tl.float32)
            acc = tl.zeros([BN, D], tl.float32)
            for start in range(0, total, BN):
                i = start + e
                there = i < total
                j = tl.load(LIST + i, mask=there, other=0)
                fresh = there & (i >= done)
                v = tl.load(V + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0)
                k = tl.load(K + j[:, None] * D + c[None, :], mask=fresh[:, None], other=0.0).to(tl.float32)
                s = tl.load(EXACT + i, mask=i < done, other=0.0)
                s = tl.where(fresh, tl.sum(k * q[None, :], 1), s)
                tl.store(EXACT + i, s, mask=fresh)
                share = (1 - DEFENSIVE) * tl.exp(tl.load(SCORES + j).to(tl.float32) - log_norm) + even
                chance = tl.where(i < FIXED, 1.0, tl.minimum(level * share, 1.0))
                s = tl.where(there, s - tl.log(chance), -float("inf"))
                new = tl.maximum(peak, s)
                at = tl.where(new == -float("inf"), 0.0, new)
                a, w = tl.exp(peak - at), tl.exp(s - at)
                mass = mass * a + w
                acc = acc * a[:, None] + w[:, None] * v.to(tl.float32)
                peak = new
            top = tl.max(peak, 0)
            part = tl.exp(peak - top)
            sum_of = tl.sum(mass * part, 0)
            out = tl.sum(acc * part[:, None], 0) / sum_of
            log_sum, norm = top + tl.log(sum_of), tl.sum(out * out, 0)
            tl.debug_barrier()
            traces, spreads = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
            unsure = tl.zeros([BN], tl.int32)
            for start in range(FIXED, total, BN):
                i = start + e
                there = i < total
                j = tl.load(LIST + i, mask=there, other=0)
                away = tl.load(V + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0).to(tl.float32)
                away -= out[None, :]
                weight = tl.where(there, tl.exp(tl.load(EXACT + i, mask=there, other=0.0) - log_sum), 0.0)
                share = (1 - DEFENSIVE) * tl.exp(tl.load(SCORES + j).to(tl.float32) - log_norm) + even
                chance = tl.minimum(level * share, 1.0)
                term = weight * weight * tl.sum(away * away, 1) / chance * (1 / chance - 1)
                traces += term
                spreads += (1 - chance) * term * term
                unsure += (there & (chance < 1)).to(tl.int32)
            trace = tl.sum(traces, 0)
            nu = 2 * trace * trace / tl.maximum(tl.sum(spreads, 0), 1e-30)
            limit = error * error * tl.maximum(norm - trace, 0.1 * norm)
            sure = ((tl.sum(missed, 0) == 0) | (tl.sum(unsure, 0) >= UNSURE)) & (norm > 0)
            held = trace * _quantile(CHECKED, 1.0, nu, ROWS, COLUMNS, ROW_STEP, COLUMN_STEP) <= limit
            grow = first * 0 + MOST
            if sure & ~held:  # the check passes for fewer directions with less error; count them, and plan
                unit = 16 / tl.sqrt(tl.maximum(trace, 1e-30))  # so that the covariance has the trace 256
                later, covariance = tl.zeros([BN, LEVELS], tl.float32), tl.zeros([D, D], tl.float32)
                for start in range(FIXED, total, BN):
                    i = start + e
                    there = i < total
                    j = tl.load(LIST + i, mask=there, other=0)
                    away = tl.load(V + j[:, None] * D + c[None, :], mask=there[:, None], other=0.0).to(tl.float32)
                    away -= out[None, :]
                    weight = tl.where(there, tl.exp(tl.load(EXACT + i, mask=there, other=0.0) - log_sum), 0.0)
                    share = (1 - DEFENSIVE) * tl.exp(tl.load(SCORES + j).to(tl.float32) - log_norm) + even
                    chance = tl.minimum(level * share, 1.0)
                    base = weight * weight * tl.sum(away * away, 1) / chance
                    later += base[:, None] * (1 / tl.minimum((level * share)[:, None] * growth[None, :], 1.0) - 1)
                    x = (away * (unit * weight * tl.sqrt((1 / chance - 1) / chance))[:, None]).to(tl.float16)
                    covariance = tl.dot(tl.trans(x), x, covariance)
                f = 65536.0 / tl.maximum(tl.sum(tl.sum(covariance * covariance, 1), 0), 1e-30)
                held = trace * _quantile(CHECKED, f, nu, ROWS, COLUMNS, ROW_STEP, COLUMN_STEP) <= limit
                planned = limit / _quantile(PLANNED, f, nu, ROWS, COLUMNS, ROW_STEP, COLUMN_STEP)
                grow = tl.min(tl.where(tl.sum(later, 0) <= planned, growth, MOST), 0)
            if sure & held:
                state += 1
                tl.store(OUT + row * D + c, out)
            before = level
            level = level * grow
            done = total
            stage += 1
            tl.debug_barrier()
    tl.store(COUNT + row, tl.where(state == 1, total, n), mask=open_)
    tl.store(WHOLE + row, (state != 1).to(tl.int32), mask=open_)


@triton.jit
def whole(
    Q,
    K,
    V,
    WHOLE,
    SUMS,
    PEAK,
    MASS,
    scale,
    n,
    part,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
):
    """Attention over one part of all keys for the queries of a pair, if any of them must read everything."""
    pair, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, c = tl.arange(0, GP), tl.arange(0, D)
    flag = tl.load(WHOLE + pair * G + g, mask=g < G, other=0)
    if tl.sum(flag, 0) > 0:
        q = tl.load(Q + (pair * G + g[:, None]) * D + c[None, :], mask=g[:, None] < G, other=0.0)
        peak, mass = tl.full([GP], -float("inf"), tl.float32), tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, D], tl.float32)
        for start in range(at * part, tl.minimum((at + 1) * part, n), BN):
            j = start + tl.arange(0, BN)
            there = (j < n) & (j < (at + 1) * part)
            k = tl.load(K + (pair * n + j[None, :]) * D + c[:, None], mask=there[None, :], other=0.0)
            v = tl.load(V + (pair * n + j[:, None]) * D + c[None, :], mask=there[:, None], other=0.0)
            s = tl.where(there[None, :], tl.dot(q, k) * scale, -float("inf"))
            new = tl.maximum(peak, tl.max(s, 1))
            a, w = tl.exp(peak - new), tl.exp(s - new[:, None])
            mass = mass * a + tl.sum(w, 1)
            acc = acc * a[:, None] + tl.dot(w.to(v.dtype), v)
            peak = new
        to = (pair * G + g) * tl.num_programs(1) + at
        tl.store(SUMS + to[:, None] * D + c[None, :], acc, mask=g[:, None] < G)
        tl.store(PEAK + to, peak, mask=g < G)
        tl.store(MASS + to, mass, mask=g < G)


@triton.jit
def merge(WHOLE, SUMS, PEAK, MASS, OUT, parts, D: tl.constexpr, PARTS: tl.constexpr):
    """Output of a query that reads everything, from the parts of its keys."""
    row, p, c = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS), tl.arange(0, D)
    if tl.load(WHOLE + row) > 0:
        there = p < parts
        peak = tl.load(PEAK + row * parts + p, mask=there, other=-float("inf"))
        share = tl.exp(peak - tl.max(peak, 0))
        mass = tl.sum(tl.load(MASS + row * parts + p, mask=there, other=0.0) * share, 0)
        sums = tl.load(SUMS + (row * parts + p[:, None]) * D + c[None, :], mask=there[:, None], other=0.0)
        tl.store(OUT + row * D + c, tl.sum(sums * share[:, None], 0) / mass)
