"use strict";
// Map of all heads, and the panel with the numbers and figures of the selected head.

const BEYOND_ALL = "beyond"; // value used if a head needs more tokens than the run can predict

const regimeColour = (page, name) => page.regimes?.find((regime) => regime.name === name)?.colour ?? "grey";

// Number of heads in each regime, as a bar and as a list with the meaning of each regime.
function mountRegimes(bar, meanings, page) {
  const found = page.regimes.filter((regime) => regime.count);
  bar.append(...found.map(({ colour, count }) => {
    const part = node("i", { class: `c-${colour}` });
    part.style.flex = String(count);
    return part;
  }));
  meanings.append(...found.map(({ name, colour, count, meaning }) => node("li", {}, node("i", { class: `swatch fill c-${colour}` }), node("b", {}, `${count} ${name}`), `: ${meaning}`)));
}

function headName(heads, i) {
  return `layer ${heads.layer[i]}, head ${heads.head[i]}`;
}

function quantityText(quantity, value, farthest) {
  if (value === BEYOND_ALL) return `${BEYOND_ALL} ${short(farthest)}`;
  return typeof value === "string" ? value : short(value, 3);
}

// Text of a map cell: two digits, thousands as k.
function cellText(value) {
  if (value === BEYOND_ALL) return ">";
  if (!known(value)) return "–";
  if (Math.abs(value) >= 1000) return `${Number((value / 1000).toPrecision(2))}k`;
  const text = Math.abs(value) >= 10 ? String(Math.round(value)) : Math.abs(value) >= 1 ? value.toFixed(1) : value.toFixed(2);
  return text.replace(/^(-?)0\./, "$1.");
}

// Position of each value on the colour scale, 0 to 1. With 50 heads or more the ends of the scale are the 2% and 98%
// quantiles, so that outliers do not give all other heads one colour; `clipped` is whether values lie below or above them.
function shading(quantity, values) {
  const numbers = values.filter(known).sort((a, b) => a - b), count = numbers.length;
  const move = quantity.log ? (v) => Math.log(Math.max(v, 1e-12)) : (v) => v;
  const cut = count >= 50 ? Math.floor(0.02 * count) : 0;
  const low = numbers[cut], high = numbers[count - 1 - cut];
  const span = move(high) - move(low);
  const share = (v) => (v === BEYOND_ALL ? 1 : span > 0 ? (move(v) - move(low)) / span : 0.5);
  return { low, high, share, any: count > 0, clipped: [numbers[0] < low, numbers[count - 1] > high] };
}

function mountMap(host, legendHost, page, choose) {
  const { heads } = page;
  const layers = [...new Set(heads.layer)], columns = Math.max(...heads.head) + 1;
  const cells = heads.layer.map((layer, i) => {
    const cell = node("button", { type: "button", role: "gridcell", class: "cell", tabindex: "-1", "data-head": i });
    cell.addEventListener("click", () => choose(i));
    return cell;
  });
  host.style.setProperty("--columns", columns);
  host.style.setProperty("--rows", layers.length);
  host.append(node("div", { class: "map-row labels", role: "row" }, node("span", { class: "map-corner", role: "columnheader" }, "layer"),
    ...Array.from({ length: columns }, (_, c) => node("span", { class: "map-label", role: "columnheader", "aria-label": `head ${c}` }, c % (columns > 16 ? 4 : 1) ? "" : String(c)))));
  for (const layer of layers) {
    const row = node("div", { class: "map-row", role: "row" }, node("span", { class: "map-label", role: "rowheader", "aria-label": `layer ${layer}` }, String(layer)));
    heads.layer.forEach((own, i) => {
      if (own !== layer) return;
      cells[i].style.gridColumn = String(heads.head[i] + 2);
      row.append(cells[i]);
    });
    host.append(row);
  }
  new ResizeObserver(([entry]) => host.classList.toggle("wordless", entry.contentRect.width / (columns + 1) < 34)).observe(host);
  const place = new Map(heads.layer.map((layer, i) => [`${layer}/${heads.head[i]}`, i]));
  host.addEventListener("keydown", (event) => {
    const i = Number(event.target.dataset?.head);
    if (!Number.isInteger(i) || event.ctrlKey || event.altKey || event.metaKey) return;
    const row = layers.indexOf(heads.layer[i]);
    const to = {
      ArrowLeft: [row, heads.head[i] - 1], ArrowRight: [row, heads.head[i] + 1],
      ArrowUp: [row - 1, heads.head[i]], ArrowDown: [row + 1, heads.head[i]],
      Home: [row, 0], End: [row, columns - 1], PageUp: [0, heads.head[i]], PageDown: [layers.length - 1, heads.head[i]],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    const next = place.get(`${layers[to[0]]}/${to[1]}`);
    if (next !== undefined) { choose(next); cells[next].focus(); }
  });
  return (state) => {
    const quantity = page.quantities.find((q) => q.key === state.quantity), values = heads[quantity.key];
    const shade = shading(quantity, values);
    cells.forEach((cell, i) => {
      const value = values[i], text = quantityText(quantity, value, heads.farthest[i]);
      const missing = value === null || value === undefined;
      cell.className = `cell${missing ? " missing" : value === BEYOND_ALL ? " beyond" : ""}${quantity.kind === "regime" ? ` fill c-${regimeColour(page, value)}` : ""}`;
      const colour = quantity.kind === "regime" || missing ? { fill: "", ink: "" } : viridis(shade.share(value));
      cell.style.backgroundColor = colour.fill;
      cell.style.color = colour.ink;
      cell.replaceChildren(node("span", {}, quantity.kind === "regime" ? value[0].toUpperCase() : cellText(value)));
      cell.setAttribute("aria-label", `${headName(heads, i)}: ${quantity.label} ${text}`);
      cell.dataset.tip = `${headName(heads, i)}\n${quantity.label}: ${text}`;
      cell.setAttribute("aria-selected", String(i === state.head));
      cell.tabIndex = i === state.head ? 0 : -1;
    });
    legendHost.replaceChildren(...mapLegend(quantity, shade, values, page));
  };
}

function mapLegend(quantity, shade, values, page) {
  if (quantity.kind === "regime") {
    return page.regimes.map(({ name, colour, count }) => node("span", { class: "key" }, node("i", { class: `swatch fill c-${colour}` }), `${name} (${count})`));
  }
  const bar = node("i", { class: "ramp" });
  const ends = shade.any ? [(shade.clipped[0] ? "≤ " : "") + short(shade.low), (shade.clipped[1] ? "≥ " : "") + short(shade.high)] : ["–", "–"];
  const extra = [];
  if (values.includes(BEYOND_ALL)) extra.push(node("span", { class: "key" }, node("i", { class: "swatch beyond" }), "beyond what the run can predict"));
  if (values.some((v) => v === null)) extra.push(node("span", { class: "key" }, node("i", { class: "swatch missing" }), "not known"));
  return [node("span", { class: "key" }, ends[0], bar, ends[1]), ...extra];
}

// Figure of a head's error curve with its fitted rate; for a measured head also the predicted curves.
function curveFigure(page, state) {
  const { heads } = page, i = state.head, n = page.n, error = heads.error[i], spread = heads.error_stderr[i];
  const low = heads.error_low[i] ?? error.map((e, j) => Math.max(e - 1.96 * spread[j], 0.05 * e));
  const high = heads.error_high[i] ?? error.map((e, j) => e + 1.96 * spread[j]);
  const source = page.predicted ? "predicted from the pilot" : "measured";
  const series = [
    { name: "95% band", kind: "band", colour: "blue", x: n, y: error, low, high, listed: false },
    { name: `${source}, with 95% intervals`, kind: "points", colour: "blue", x: n, y: error, low, high },
  ];
  const fit = heads.rate[i];
  if (known(fit) && known(heads.rate_constant[i])) {
    series.push({ name: `${page.predicted ? "rate" : "fitted"} ${falling(fit)}`, kind: "line", colour: "blue", x: n, y: n.map((v) => heads.rate_constant[i] * v ** -fit) });
  }
  const predicted = heads.pilot_error?.[i];
  if (predicted) series.push({ name: "predicted from its tokens (exact bootstrap)", kind: "line", dash: "dotted", colour: "ink", x: n, y: predicted });
  const slope = heads.rate_predicted?.[i];
  if (known(slope)) {
    const middle = Math.floor(n.length / 2);
    series.push({ name: `rate predicted from the horizon, ${falling(slope)}`, kind: "line", dash: "dashed", colour: "grey", x: n, y: n.map((v) => error[middle] * (v / n[middle]) ** -slope) });
  }
  if (heads.bare_error?.[i]) series.push({ name: "without the sink", kind: "line", colour: "sky", x: n, y: heads.bare_error[i] });
  if (heads.hardmax_error?.[i]) series.push({ name: "argmax in place of softmax", kind: "line", dash: "dashed", colour: "orange", x: n, y: heads.hardmax_error[i] });
  const note = heads.lower_bound?.[i] ? "The reference sample is too small for this head: its errors are mostly lower bounds." : "";
  return {
    title: `Error of ${headName(heads, i)}`, height: 300, series, note,
    x: { label: "number of tokens n", log: true }, y: { label: "relative output error", log: true },
    guides: known(state.error) ? [{ y: state.error, label: `${short(100 * state.error)}% target` }] : [],
  };
}

function tokensFigure(page, state) {
  const { heads } = page, i = state.head;
  return {
    title: "Effective number of tokens", height: 210,
    series: [
      { name: "effective tokens 1/Σw²", kind: "points", colour: regimeColour(page, heads.regime[i]), x: page.n, y: heads.effective_tokens[i] },
      { name: "if all weights were equal", kind: "line", dash: "dashed", colour: "grey", x: page.n, y: page.n },
    ],
    x: { label: "number of tokens n", log: true }, y: { label: "effective tokens", log: true, low: 1 },
  };
}

function sinkFigure(page, state) {
  const share = page.heads.sink_share[state.head] ?? [];
  return {
    title: "Attention mass of the sink", height: 210,
    series: [{ name: "share of the attention mass", kind: "points", colour: "orange", x: page.n.slice(0, share.length), y: share }],
    x: { label: "number of other tokens n", log: true }, y: { label: "share of the attention mass", low: 0, high: 1 },
  };
}

function mountPanel(host, facts, page) {
  const { heads } = page;
  const title = node("h3", { id: "panel-title", "aria-live": "polite" }), badge = node("span", { class: "badge" });
  const reason = node("p", { class: "reason" });
  host.append(node("div", { class: "panel-head" }, title, badge), reason);
  const updates = [];
  const add = (parent, describe, state) => {
    const figure = node("figure");
    parent.append(figure);
    updates.push(mountFigure(figure, () => describe(page, state)));
  };
  return (state) => {
    const i = state.head;
    title.textContent = `Layer ${heads.layer[i]}, head ${heads.head[i]}`;
    badge.textContent = heads.regime[i] ?? "predicted";
    badge.className = `badge fill c-${regimeColour(page, heads.regime[i])}`;
    reason.textContent = [heads.regime_reason?.[i], page.remedies[heads.regime[i]]].filter(Boolean).map((text) => `${text[0].toUpperCase()}${text.slice(1)}.`).join(" ");
    if (!updates.length) {
      add(host, curveFigure, state);
      const pair = node("div", { class: "pair" });
      host.append(pair);
      if (heads.effective_tokens?.some(Boolean)) add(pair, tokensFigure, state);
      if (heads.sink_share?.some(Boolean)) add(pair, sinkFigure, state);
    } else updates.forEach((update) => update());
    facts.replaceChildren(...page.facts.flatMap(({ key, label, help }) => {
      const value = heads[key][i];
      if (value === null || value === undefined) return [];
      const text = value === BEYOND_ALL ? `${BEYOND_ALL} ${short(heads.farthest[i])}` : typeof value === "string" ? value : short(value);
      return [node("div", { title: help ?? "" }, node("dt", {}, label), node("dd", {}, text))];
    }));
  };
}
