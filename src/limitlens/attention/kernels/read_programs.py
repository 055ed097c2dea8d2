# mypy: ignore-errors
"""Triton programs of certified reads for one decoded token (see `reads.py`): predict scores, sample keys, attend."""

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
def predict(
    Q, CODES, STEP, LOW, SCORES, PEAK, MASS, scale, n, groups, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Scores (pairs · G, n) of queries Q (pairs · G, D) by 4-bit keys, and sums of e^score over PART groups.

    CODES (pairs, groups, GROUP, D/4) hold the codes of channels c, c + D/4, c + D/2 and c + 3D/4 in one 16-bit word.
    Bits 0x6400 | code are the float16 number 1024 + code. The first and last keys have no part in PEAK and MASS.
    """
    W: tl.constexpr = D // 4
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w, g, j = tl.arange(0, W), tl.arange(0, GP), tl.arange(0, GROUP)
    mine = g < G
    peak, mass = tl.full([GP], -float("inf"), tl.float32), tl.zeros([GP], tl.float32)
    for block in range(part * PART, tl.minimum((part + 1) * PART, groups)):
        at = pair * groups + block
        word = tl.load(CODES + (at * GROUP + j[:, None]) * W + w[None, :])
        s, shift = tl.zeros([GROUP, GP], tl.float32), tl.zeros([GP], tl.float32)
        for quarter in tl.static_range(4):
            c = quarter * W + w
            q = tl.load(Q + (pair * G + g[None, :]) * D + c[:, None], mask=mine[None, :], other=0.0).to(tl.float32)
            step, low = tl.load(STEP + at * D + c).to(tl.float32), tl.load(LOW + at * D + c).to(tl.float32)
            scaled = (q * (scale * step)[:, None]).to(tl.float16)
            code = (((word >> (4 * quarter)) & 15) | 0x6400).to(tl.float16, bitcast=True)
            s = tl.dot(code, scaled, s)
            shift += tl.sum(q * (scale * low)[:, None] - 1024 * scaled.to(tl.float32), 0)
        s = (s + shift[None, :]).to(tl.float16)
        key = block * GROUP + j
        tl.store(SCORES + (pair * G + g[None, :]) * n + key[:, None], s, mask=mine[None, :] & (key[:, None] < n))
        inner = (key >= SINKS) & (key < n - WINDOW)
        s = tl.where(inner[:, None], s.to(tl.float32), -float("inf"))
        new = tl.maximum(peak, tl.max(s, 0))
        level = tl.where(new == -float("inf"), 0.0, new)
        mass = mass * tl.exp(peak - level) + tl.sum(tl.exp(s - level[None, :]), 0)
        peak = new
    to = (pair * G + g) * tl.num_programs(1) + part
    tl.store(PEAK + to, peak, mask=mine)
    tl.store(MASS + to, mass, mask=mine)


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
    p = tl.arange(0, PARTS)
    peaks = tl.load(PEAK + row * parts + p, mask=p < parts, other=-float("inf"))
    top = tl.max(peaks, 0)
    log_norm = top + tl.log(tl.sum(tl.load(MASS + row * parts + p, mask=p < parts, other=0.0) * tl.exp(peaks - top), 0))
    even = DEFENSIVE / (n - FIXED)
    key = stream(seed, pair.to(tl.uint32))
    fixed = tl.arange(0, 128)
    tl.store(LIST + fixed, tl.where(fixed < SINKS, fixed, n - FIXED + fixed), mask=fixed < FIXED)
    growth = LEAST * tl.exp(tl.arange(0, LEVELS).to(tl.float32) * (tl.log(MOST / LEAST) / (LEVELS - 1)))
    level, before = first, first * 0
    total, done, state, stage = FIXED + tl.program_id(0) * 0, tl.program_id(0) * 0, tl.program_id(0) * 0, 0
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
    tl.store(COUNT + row, tl.where(state == 1, total, n))
    tl.store(WHOLE + row, (state != 1).to(tl.int32))


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
