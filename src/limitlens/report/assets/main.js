"use strict";
// Build the page: turn the JSON data written by Python into figures, and link the map, the panel and the figures of a probe.

function ratesFigure(page, state) {
  const { heads } = page, axis = page.rate_axes.find((a) => a.key === state.axis);
  const groups = page.regimes.map(({ name, colour }) => ({ name, kind: "points", colour, x: [], y: [], ids: [], labels: [], radius: heads.layer.length > 200 ? 2.6 : 3.6 }));
  heads.regime.forEach((regime, i) => {
    const group = groups.find((g) => g.name === regime), x = heads[axis.key][i], y = heads.rate_pooled[i];
    if (!group || !known(x) || !known(y) || x <= 0) return;
    group.x.push(x);
    group.y.push(y);
    group.ids.push(i);
    group.labels.push(`${headName(heads, i)}, ${regime}\nrate ${short(y)} ± ${short(heads.rate_pooled_stderr[i], 1)}\n${axis.label} ${short(x)}`);
  });
  const rates = groups.flatMap((g) => g.y), lines = (axis.lines || []).map((line) => ({ ...line, kind: "line" }));
  return {
    title: `Fitted rates against the ${axis.label.toLowerCase()}`, height: 380, chosen: state.head,
    series: [...lines, ...groups.filter((g) => g.x.length)],
    x: { label: axis.axis, log: true }, y: { label: "rate β: error falls like n to the −β", low: Math.min(0, ...rates), high: 1.05 * Math.max(0.55, ...rates) },
    guides: [{ y: 0.5, label: "½: plain averaging" }, ...(axis.guides ?? [])],
    note: axis.note,
  };
}

function headTable(page) {
  const { heads } = page, keys = [...page.quantities, ...page.facts].filter((item, i, all) => all.findIndex((o) => o.key === item.key) === i);
  return {
    columns: ["layer", "head", ...keys.map((k) => k.label)],
    rows: heads.layer.map((layer, i) => [layer, heads.head[i], ...keys.map((k) => (heads[k.key][i] === BEYOND_ALL ? `${BEYOND_ALL} ${heads.farthest[i]}` : heads[k.key][i]))]),
  };
}

function curvesTable(page) {
  const { heads } = page;
  const names = ["error", "error_stderr", "bare_error", "hardmax_error", "effective_tokens", "sink_share"].filter((name) => heads[name]?.some(Boolean));
  const rows = heads.layer.flatMap((layer, i) => page.n.map((n, j) => [layer, heads.head[i], n, ...names.map((name) => heads[name][i]?.[j] ?? null)]));
  return { columns: ["layer", "head", "n", ...names], rows };
}

function mountProbe(page, state) {
  const at = (id) => document.getElementById(id), { heads } = page;
  const updates = [];
  const refresh = () => updates.forEach((update) => update(state));
  const choose = (i) => { state.head = i; refresh(); };
  if (at("regime-share")) mountRegimes(at("regime-share"), at("regime-meanings"), page);
  const select = at("quantity");
  select.append(...page.quantities.map((q) => node("option", { value: q.key }, q.label)));
  select.addEventListener("change", () => { state.quantity = select.value; refresh(); });
  state.quantity = page.quantities[0].key;
  state.head = page.first;
  updates.push(() => { at("quantity-help").textContent = page.quantities.find((q) => q.key === state.quantity).help; });
  updates.push(mountMap(at("map"), at("map-legend"), page, choose));
  at("map-data").append(dataBlock("numbers of every head", () => headTable(page), () => "heads").element, dataBlock("curves of every head", () => curvesTable(page), () => "curves").element);
  const budgets = at("budgets") ? mountBudgets(at("budgets"), page, state, refresh) : null;
  updates.push(mountPanel(at("panel"), at("facts"), page));
  if (at("rates")) {
    const axes = at("rate-axis");
    axes.append(...page.rate_axes.map((a) => node("option", { value: a.key }, a.label)));
    axes.addEventListener("change", () => { state.axis = axes.value; refresh(); });
    state.axis = page.rate_axes[0].key;
    updates.push(mountFigure(at("rates"), () => ratesFigure(page, state)));
  }
  if (budgets) updates.push(budgets);
  document.addEventListener("click", (event) => {
    const chosen = event.target.closest?.("[data-head]");
    if (!chosen || chosen.classList.contains("cell")) return;
    choose(Number(chosen.dataset.head));
  });
  refresh();
}

function mountTheme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();
}

(function main() {
  const page = JSON.parse(document.getElementById("data").textContent);
  mountTheme();
  mountTips();
  for (const host of document.querySelectorAll("figure[data-figure]")) mountFigure(host, () => page.figures[Number(host.dataset.figure)]);
  for (const table of document.querySelectorAll("table[data-csv]")) {
    const read = () => {
      const [head, ...rows] = [...table.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent));
      return { columns: head, rows };
    };
    const button = node("button", { type: "button", class: "quiet" }, "Download CSV");
    button.addEventListener("click", () => download(fileName(table.dataset.csv), csv(read())));
    table.closest(".scroll").after(button);
  }
  const state = { head: 0 };
  if (page.heads) mountProbe(page, state);
  else if (page.budget && document.getElementById("budgets")) {
    let update = () => {};
    update = mountBudgets(document.getElementById("budgets"), page, state, () => update());
    update();
    document.addEventListener("click", (event) => {
      const chosen = event.target.closest?.("[data-head]");
      if (chosen) { state.head = Number(chosen.dataset.head); update(); }
    });
  }
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => {
      const range = document.createRange();
      range.selectNodeContents(document.getElementById(button.dataset.copy));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      navigator.clipboard?.writeText(range.toString()).then(() => { button.textContent = "Copied"; }, () => {});
    });
  }
})();
