"use strict";
// Budgets and temperatures for any error and context, computed in the page.

const CONTEXT_STEPS = 13; // 256 to 1,048,576 by doubling, and one step more for an endless one

const contextAt = (step) => (step >= CONTEXT_STEPS ? Infinity : 256 * 2 ** step);

function budgetsOf(curves, error, context) {
  return curves.map((curve) => (curve.error.every(known) && curve.n.length >= LINE_SIZES ? budgetRange(curve, error, context) : null));
}

// Every KV head keeps as many keys as its neediest query head asks for.
function keptShare(curves, budgets, context) {
  const groups = new Map();
  curves.forEach((curve, i) => {
    const own = Math.min(context, curve.sliding ?? Infinity), need = budgets[i]?.tokens ?? own;
    const [kept] = groups.get(curve.group) ?? [0];
    groups.set(curve.group, [Math.max(kept, need), own]);
  });
  const sum = (k) => [...groups.values()].reduce((total, pair) => total + pair[k], 0);
  return sum(0) / sum(1);
}

function mountBudgets(host, page, state, changed) {
  const { curves } = page.budget;
  const slider = (id, label, attributes) => {
    const input = node("input", { type: "range", id, ...attributes }), output = node("output", { for: id, id: `${id}-value` });
    host.append(node("div", { class: "slider" }, node("label", { for: id }, label), input, output));
    return { input, output };
  };
  // 60 steps from half a percent to a half, evenly in the logarithm.
  const errorAt = (step) => Number((0.005 * 100 ** (step / 60)).toPrecision(2));
  const error = slider("error", "Relative output error", { min: 0, max: 60, step: 1, value: 30 });
  const context = slider("context", "Context length", { min: 0, max: CONTEXT_STEPS, step: 1, value: 7 });
  const tiles = node("div", { class: "tiles" });
  const own = node("p", { class: "own-budget", id: "own-budget" });
  host.append(tiles, own);
  const figure = node("figure");
  host.append(figure);
  state.error = errorAt(30);
  state.context = contextAt(7);
  let budgets = [];
  const draw = mountFigure(figure, () => (curves.length > 1 ? budgetFigure : crossingFigure)(page, state, budgets));
  const table = dataBlock(`budget of every ${page.budget.unit}`, () => budgetTable(curves, budgets, state), () => `budgets at ${100 * state.error} percent`);
  host.append(table.element);
  const read = () => {
    state.error = errorAt(Number(error.input.value));
    state.context = contextAt(Number(context.input.value));
    changed();
  };
  error.input.addEventListener("input", read);
  context.input.addEventListener("input", read);
  return () => {
    const length = Number.isFinite(state.context) ? `${short(state.context)} tokens` : "endless";
    error.output.textContent = `${short(100 * state.error)}%`;
    context.output.textContent = length;
    error.input.setAttribute("aria-valuetext", error.output.textContent);
    context.input.setAttribute("aria-valuetext", length);
    budgets = budgetsOf(curves, state.error, state.context);
    tiles.replaceChildren(...budgetTiles(curves, budgets, state, page));
    const chosen = budgets[state.head], name = curves[state.head].label;
    own.textContent = chosen ? `${name[0].toUpperCase()}${name.slice(1)} ${budgetSentence(chosen, state)}.` : `${name} has no whole error curve, so no budget.`;
    draw();
    table.refresh();
  };
}

function budgetSentence(budget, state) {
  if (budget.beyond) return Number.isFinite(state.context) ? `needs every one of the ${short(state.context)} tokens: its budget lies beyond what was measured` : "needs more than ten times the largest n measured";
  const range = `(${short(budget.low)} to ${budget.high === null ? "more" : short(budget.high)} within its 95% band)`;
  return `needs ${short(budget.tokens)} random tokens ${range}${budget.extrapolated ? ", extrapolated by its power law" : ""}`;
}

function budgetTiles(curves, budgets, state, page) {
  const tile = (value, label) => node("div", { class: "tile" }, node("b", {}, value), node("span", {}, label));
  const known_ = budgets.filter(Boolean), tokens = known_.map((b) => b.tokens ?? Infinity).sort((a, b) => a - b);
  const unit = page.budget.unit, found = [];
  if (Number.isFinite(state.context) && page.budget.cache) {
    const share = keptShare(curves, budgets, state.context);
    found.push(tile(`${short(100 * share, 2)}%`, "of all KV entries, each KV head keeping what its neediest head asks for"));
  }
  if (tokens.length > 1) found.push(tile(short(tokens[Math.floor((tokens.length - 1) / 2)]), `random tokens suffice for half of the ${unit}s`));
  const outside = known_.filter((b) => b.extrapolated && !b.beyond).length, beyond = known_.filter((b) => b.beyond).length;
  if (curves.length > 1) found.push(tile(`${outside} of ${curves.length}`, `${unit}s are extrapolated outside the sizes measured${beyond ? `; ${beyond} more lie beyond what these can tell` : ""}`));
  return found;
}

function budgetFigure(page, state, budgets) {
  const { curves, axis, unit } = page.budget;
  const groups = new Map();
  curves.forEach((curve, i) => {
    const budget = budgets[i];
    if (!budget || budget.tokens === null) return;
    const colour = REGIMES[curve.regime] ?? "blue", name = curve.regime ?? `budget of each ${unit}`;
    const group = groups.get(name) ?? { name, kind: "points", colour, x: [], y: [], ids: [], labels: [] };
    group.x.push(curve.x);
    group.y.push(budget.tokens);
    group.ids.push(i);
    group.labels.push(`${curve.label}\n${short(budget.tokens)} tokens${budget.beyond ? ", every one" : budget.extrapolated ? ", extrapolated" : ""}`);
    groups.set(name, group);
  });
  const guides = [{ y: page.n[page.n.length - 1], label: "largest n measured" }];
  if (Number.isFinite(state.context)) guides.push({ y: state.context, label: "whole context" });
  return { title: `Tokens each ${unit} needs`, series: [...groups.values()], x: axis, y: { label: "random tokens needed", log: true }, guides, chosen: state.head, height: 300 };
}

// With one curve there is nothing to set side by side: the curve itself, and where it meets the wanted error.
function crossingFigure(page, state, [budget]) {
  const [curve] = page.budget.curves, [low, high] = [-1, 1].map((side) => curve.error.map((e, i) => Math.max(e + side * 1.96 * curve.stderr[i], 0.05 * e)));
  const guides = [{ y: state.error, label: `${short(100 * state.error)}% wanted` }];
  if (budget && !budget.beyond) guides.push({ x: budget.tokens, label: `${short(budget.tokens)} tokens` });
  return {
    title: "Relative output error", height: 300, guides, x: { label: "number of tokens n", log: true }, y: { label: "relative output error", log: true },
    series: [{ name: "measured", kind: "points", colour: "green", joined: true, x: curve.n, y: curve.error, low, high }],
  };
}

function budgetTable(curves, budgets, state) {
  const rows = curves.map((curve, i) => {
    const budget = budgets[i] ?? {};
    return [curve.label, curve.regime ?? "", budget.tokens ?? null, budget.low ?? null, budget.high ?? null, budget.beyond ? "beyond" : budget.extrapolated ? "extrapolated" : "measured"];
  });
  return { columns: [curves.length ? "curve" : "", "regime", `tokens for ${short(100 * state.error)}%`, "low", "high", "known from"], rows };
}

// Factors on the scores relative to windows of n₀ tokens, as limitlens.theory.schedules has them.
const SCHEDULES = {
  constant: () => 1,
  "log n": (s, first) => Math.log(s * first) / Math.log(first),
  YaRN: (s) => (0.1 * Math.log(s) + 1) ** 2,
};

function mountSchedules(host, page, state) {
  const figure = node("figure"), rows = node("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "temperature factors" });
  host.append(figure, rows);
  const first = page.window, lengths = Array.from({ length: 25 }, (_, k) => first * 2 ** (k / 2)).filter((n) => n <= 1048576 * 1.01);
  const lines = () => {
    const own = page.heads.local_dimension?.[state.head], half = page.middle_dimension;
    const found = Object.entries(SCHEDULES).map(([name, factor]) => [name, (n) => factor(n / first, first)]);
    if (known(half)) found.push([`critical, median head (α = ${short(half)})`, (n) => (n / first) ** (2 / half)]);
    if (known(own)) found.push([`critical, ${headName(page.heads, state.head)} (α = ${short(own)})`, (n) => (n / first) ** (2 / own)]);
    return found;
  };
  const colours = ["grey", "orange", "green", "blue", "red"], dashes = ["dashed", "", "", "", "dotted"];
  const draw = mountFigure(figure, () => ({
    title: "Factor on the scores as the context grows", height: 280,
    series: lines().map(([name, factor], k) => ({ name, kind: "line", colour: colours[k], dash: dashes[k], x: lengths, y: lengths.map(factor) })),
    x: { label: "context length", log: true }, y: { label: `factor, 1 at ${short(first)} tokens`, log: true },
    guides: Number.isFinite(state.context) ? [{ x: state.context, label: "chosen context" }] : [],
  }));
  return () => {
    draw();
    const length = Number.isFinite(state.context) ? state.context : lengths[lengths.length - 1];
    rows.replaceChildren(tableElement({ columns: ["schedule", `factor at ${short(length)} tokens`], rows: lines().map(([name, factor]) => [name, length < first ? null : Number(factor(length).toFixed(4))]) }));
  };
}
