"use strict";
// How many random keys bring a head within an error: the rule of limitlens.diagnose.budgets, for one curve.
//
// Keeping n of the C tokens of a context has the error e(n) √(1 − n/C). Between measured sizes log e is a straight line in
// log n; outside them it is the line through the three nearest sizes, up to ten times the largest.

const BEYOND = 10, LINE_SIZES = 3, HALVINGS = 45, TINY = 2.3e-308;

// {tokens, extrapolated, beyond}: tokens is null where no context bounds what cannot be known.
function budgetFor(sizes, errors, wanted, context = Infinity) {
  const found = needed(sizes.map(Math.log), errors.map((e) => Math.log(Math.max(e, TINY))), Math.log(wanted), Math.log(context));
  const bounded = Math.min(found, context);
  return {
    tokens: Number.isFinite(bounded) ? Math.ceil(Number(bounded.toFixed(6))) : null,
    extrapolated: !(sizes[0] <= found && found <= sizes[sizes.length - 1]),
    beyond: !Number.isFinite(found),
  };
}

const unseen = (x, end) => 0.5 * Math.log1p(-Math.exp(Math.min(x - end, 0)));

function needed(x, y, goal, end) {
  const last = x.length - 1;
  let i = last;
  while (i >= 0 && !(x[i] < end && y[i] + unseen(x[i], end) > goal)) i--;
  let slope, level, low, high;
  if (i < 0 || i === last) {
    [slope, level] = lineThrough(x, y, i < 0 ? 0 : x.length - LINE_SIZES);
    low = i < 0 ? 0 : x[last];
    high = i < 0 ? x[0] : x[last] + Math.log(BEYOND);
  } else {
    slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i]);
    level = y[i] - slope * x[i];
    [low, high] = [x[i], x[i + 1]];
  }
  high = Math.min(high, end);
  const short = (at) => level + slope * at + unseen(at, end) > goal;
  if (short(high)) return i < 0 ? Math.exp(x[0]) : Infinity;
  for (let k = 0; k < HALVINGS; k++) {
    const middle = (low + high) / 2;
    if (short(middle)) low = middle; else high = middle;
  }
  return Math.exp(high);
}

function lineThrough(x, y, start) {
  const xs = x.slice(start, start + LINE_SIZES), ys = y.slice(start, start + LINE_SIZES);
  const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const centre = mean(xs), middle = mean(ys);
  const spread = xs.reduce((sum, v) => sum + (v - centre) ** 2, 0);
  const slope = Math.min(xs.reduce((sum, v, i) => sum + (v - centre) * (ys[i] - middle), 0) / spread, 0);
  return [slope, middle - slope * centre];
}

// The error curve of a head in a context of so many tokens besides its sink (limitlens.diagnose.head_plan): the curve of the
// rest, scaled by what the sink leaves to it there.
function curveIn(curve, context) {
  if (!curve.bare) return curve;
  const { n, error, bare } = curve, ratio = error.map((e, j) => e / bare[j]), last = n.length - 1;
  let factor;
  if (context <= n[last]) {
    const j = Math.max(1, n.findIndex((size) => size >= context)), t = Math.log(context / n[j - 1]) / Math.log(n[j] / n[j - 1]);
    factor = context <= n[0] ? ratio[0] : ratio[j - 1] + t * (ratio[j] - ratio[j - 1]);
  } else {
    const dilution = curve.dilution ? 1 / curve.dilution : 0;
    factor = 1 - (1 - ratio[last]) * (dilution ? (1 + dilution * n[last]) / (1 + dilution * context) : 1);
  }
  return { n, error: bare.map((e) => e * factor), stderr: curve.bareStderr.map((e) => e * factor) };
}

// Keys a head keeps of a context, its sink included, with the range it has when the whole curve sits at either edge of its
// 95% band. An edge has a slope of its own, so beyond the sizes measured the lower edge may ask for more than the upper one.
function budgetRange(curve, wanted, context) {
  const atoms = curve.sinkKeys ?? 0, own = Math.min(context, curve.sliding ?? Infinity), rest = Math.max(own - atoms, 1);
  const { n, error, stderr } = curveIn(curve, rest);
  const shifted = (side) => error.map((e, i) => Math.max(e + side * 1.96 * stderr[i], e * 1e-3));
  const bounds = (side) => budgetFor(n, shifted(side), wanted, rest).tokens;
  const plus = (tokens) => (tokens === null ? null : tokens + atoms);
  const found = budgetFor(n, error, wanted, rest);
  const all = [found.tokens, bounds(-1), bounds(1)].map((tokens) => tokens ?? Infinity).sort((a, b) => a - b);
  const low = all[0], high = Number.isFinite(all[2]) ? all[2] : null;
  return { ...found, tokens: plus(found.tokens), low: plus(low), high: plus(high), context: own };
}
