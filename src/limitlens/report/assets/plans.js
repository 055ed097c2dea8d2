"use strict";
// Sliders that show the number of tokens each head needs for a target error and a context length. Python computes the numbers.

const MARKS = ["measured", "extrapolated", "beyond", "not known"];

// Budget of every curve at the selected error and context length.
function answersAt({ curves, answers }, error, context) {
  return curves.map((_, i) => {
    const at = (name) => answers[name][i][error][context] ?? null;
    return { n: at("n"), low: at("low"), high: at("high"), mark: MARKS[at("mark") ?? 3] };
  });
}

function mountBudgets(host, page, state, changed) {
  const { budget } = page, { curves, errors, contexts } = budget;
  const slider = (id, label, steps, value) => {
    const input = node("input", { type: "range", id, min: 0, max: steps - 1, step: 1, value }), output = node("output", { for: id, id: `${id}-value` });
    host.append(node("div", { class: "slider" }, node("label", { for: id }, label), input, output));
    input.addEventListener("input", () => { read(); changed(); });
    return { input, output, at: () => Number(input.value) };
  };
  const error = slider("error", "Relative output error", errors.length, budget.wanted);
  const context = slider("context", "Context length", contexts.length, budget.length);
  const tiles = node("div", { class: "tiles" }), own = node("p", { class: "own-budget", id: "own-budget" }), figure = node("figure");
  host.append(tiles, own, figure);
  let answers = [];
  const read = () => {
    state.error = errors[error.at()];
    state.context = contexts[context.at()] ?? Infinity;
    answers = answersAt(budget, error.at(), context.at());
  };
  read();
  const draw = mountFigure(figure, () => (curves.length > 1 ? budgetFigure : crossingFigure)(page, state, answers));
  const table = dataBlock(`budget of every ${budget.unit}`, () => budgetTable(curves, answers, state), () => `budgets at ${100 * state.error} percent`);
  host.append(table.element);
  return () => {
    const length = Number.isFinite(state.context) ? `${short(state.context)} tokens` : "unlimited";
    error.output.textContent = `${short(100 * state.error)}%`;
    context.output.textContent = length;
    error.input.setAttribute("aria-valuetext", error.output.textContent);
    context.input.setAttribute("aria-valuetext", length);
    tiles.replaceChildren(...budgetTiles(budget, answers, budget.share?.[error.at()][context.at()]));
    const name = curves[state.head].label;
    own.textContent = `${name[0].toUpperCase()}${name.slice(1)} ${budgetSentence(answers[state.head], state)}.`;
    draw();
    table.refresh();
  };
}

function budgetSentence({ n, low, high, mark }, state) {
  if (mark === "not known") return "has no budget: its error is known at too few sizes";
  if (mark === "beyond") return Number.isFinite(state.context) ? `needs the whole context of ${short(state.context)} tokens: its budget is larger than this run can predict` : "needs more tokens than this run can predict";
  const range = known(low) ? ` (95%: ${short(low)} to ${known(high) ? short(high) : "more"})` : "";
  return `needs ${short(n)} random tokens${range}${mark === "extrapolated" ? ", extrapolated" : ""}`;
}

function budgetTiles({ curves, unit }, answers, share) {
  const tile = (value, label) => node("div", { class: "tile" }, node("b", {}, value), node("span", {}, label));
  const count = (mark) => answers.filter((answer) => answer.mark === mark).length, found = [];
  const told = answers.filter((answer) => answer.mark !== "not known").map((answer) => answer.n ?? Infinity).sort((a, b) => a - b);
  if (known(share)) found.push(tile(`${short(100 * share, 2)}%`, "of all KV entries; each KV head keeps as many as its most demanding query head needs"));
  if (told.length > 1) found.push(tile(short(told[Math.floor((told.length - 1) / 2)]), `random tokens are enough for half of the ${unit}s`));
  if (curves.length > 1) found.push(tile(`${count("extrapolated")} of ${curves.length}`, `${unit}s are extrapolated beyond the sizes of the curves${count("beyond") ? `; ${count("beyond")} more need more tokens than can be predicted` : ""}`));
  return found;
}

function budgetFigure(page, state, answers) {
  const { curves, axis, unit } = page.budget, groups = new Map();
  curves.forEach((curve, i) => {
    const { n, mark } = answers[i];
    if (!known(n)) return;
    const name = curve.regime ?? `budget of each ${unit}`, colour = curve.regime ? regimeColour(page, curve.regime) : "blue";
    const group = groups.get(name) ?? { name, kind: "points", colour, x: [], y: [], ids: [], labels: [] };
    group.x.push(curve.x);
    group.y.push(n);
    group.ids.push(i);
    group.labels.push(`${curve.label}\n${short(n)} tokens${{ beyond: ", the whole context", extrapolated: ", extrapolated" }[mark] ?? ""}`);
    groups.set(name, group);
  });
  const sizes = curves[0].n ?? page.n, guides = [{ y: sizes[sizes.length - 1], label: page.predicted ? "largest n" : "largest n measured" }];
  if (Number.isFinite(state.context)) guides.push({ y: state.context, label: "whole context" });
  return { title: `Tokens each ${unit} needs`, series: [...groups.values()], x: axis, y: { label: "random tokens needed", log: true }, guides, chosen: state.head, height: 300 };
}

// Figure for a single curve: the curve, and the n at which it reaches the target error.
function crossingFigure(page, state, [answer]) {
  const [curve] = page.budget.curves, [low, high] = [-1, 1].map((side) => curve.error.map((e, i) => Math.max(e + side * 1.96 * curve.stderr[i], 0.05 * e)));
  const guides = [{ y: state.error, label: `${short(100 * state.error)}% target` }];
  if (known(answer.n) && answer.mark !== "beyond") guides.push({ x: answer.n, label: `${short(answer.n)} tokens` });
  return {
    title: "Relative output error", height: 300, guides, x: { label: "number of tokens n", log: true }, y: { label: "relative output error", log: true },
    series: [{ name: "measured", kind: "points", colour: "green", joined: true, x: curve.n, y: curve.error, low, high }],
  };
}

function budgetTable(curves, answers, state) {
  const rows = curves.map((curve, i) => [curve.label, curve.regime ?? "", answers[i].n, answers[i].low, answers[i].high, answers[i].mark]);
  return { columns: ["curve", "regime", `tokens for ${short(100 * state.error)}%`, "low", "high", "source"], rows };
}
