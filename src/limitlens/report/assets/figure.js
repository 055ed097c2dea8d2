"use strict";
// A figure with legend, chart and note, and its numbers as a table and as a CSV download.

function mountFigure(host, describe) {
  const holder = node("div", { class: "holder" });
  const legend = node("ul", { class: "legend" });
  const note = node("p", { class: "note" });
  const title = node("figcaption");
  const data = dataBlock("numbers of this figure", () => figureTable(describe()), () => (describe().title ?? "figure"));
  host.append(title, legend, holder, note, data.element);
  let width = 0;
  const render = () => {
    const spec = describe();
    title.textContent = spec.title ?? "";
    note.textContent = spec.note ?? "";
    note.hidden = !spec.note;
    const map = spec.series.find((s) => s.kind === "map");
    legend.replaceChildren(...(map ? mapKey(map) : spec.series.filter((s) => s.name && s.listed !== false).map(legendItem)));
    legend.hidden = !map && legend.children.length < 2;
    if (width > 0) holder.replaceChildren(drawChart(spec, width));
    data.refresh();
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now > 0 && now !== width) { width = now; render(); }
  }).observe(holder);
  width = Math.floor(holder.clientWidth);
  render();
  return render;
}

function legendItem(series) {
  const sign = shape("svg", { width: 26, height: 12, "aria-hidden": "true" });
  if (series.kind === "points") sign.append(mark(series, 13, 6, 4));
  else if (series.kind === "band") sign.append(shape("rect", { class: `band c-${series.colour}`, x: 1, y: 1, width: 24, height: 10 }));
  else sign.append(shape("path", { class: `line c-${series.colour}${series.dash ? " " + series.dash : ""}`, d: "M1,6H25" }));
  return node("li", {}, sign, node("span", {}, series.name));
}

function mapKey(map) {
  if (map.words) return map.words.map((word, k) => node("li", {}, node("i", { class: `swatch fill c-${WORD_COLOURS[k % WORD_COLOURS.length]}` }), word));
  const [low, high] = mapEnds(map);
  return [node("li", { class: "key" }, `${map.name}: ${short(low)}`, node("i", { class: "ramp" }), short(high))];
}

// Series of a figure in long form: one row per point or per map cell.
function figureTable(spec) {
  const map = spec.series.find((s) => s.kind === "map");
  if (map) {
    const cells = map.values.flatMap((row, r) => row.map((value, c) => [map.y[r], map.x[c], map.words ? (map.words[value] ?? null) : value]));
    return { columns: [spec.y.label, spec.x.label, map.name], rows: cells };
  }
  const ranged = spec.series.some((s) => s.low);
  const rows = spec.series.flatMap((s) => s.x.map((x, i) => {
    const row = [s.name ?? "", x, s.y?.[i] ?? null];
    return ranged ? [...row, s.low?.[i] ?? null, s.high?.[i] ?? null] : row;
  }));
  return { columns: ["series", spec.x.label, spec.y.label, ...(ranged ? ["95% low", "95% high"] : [])], rows };
}

// Numbers of a figure: a table that is built when it is opened, and a CSV download.
function dataBlock(title, table, name) {
  const body = node("div", { class: "scroll long", tabindex: "0", role: "region", "aria-label": title });
  const button = node("button", { type: "button", class: "quiet" }, "Download CSV");
  const details = node("details", { class: "data" }, node("summary", {}, title[0].toUpperCase() + title.slice(1)), body);
  const refresh = () => { if (details.open) body.replaceChildren(tableElement(table())); };
  details.addEventListener("toggle", refresh);
  button.addEventListener("click", () => download(fileName(name()), csv(table())));
  const element = node("div", { class: "data-block" }, details, button);
  return { element, refresh };
}

function tableElement({ columns, rows }) {
  const cell = (value) => {
    const number = typeof value === "number";
    return node("td", { class: number ? "number" : "" }, number ? short(value, 4) : String(value ?? "–"));
  };
  const head = node("tr", {}, ...columns.map((name) => node("th", { scope: "col" }, name)));
  return node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map(cell)))));
}

function csv({ columns, rows }) {
  const quote = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
}

const fileName = (title) => `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "data"}.csv`;

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = node("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// One tooltip for all marks; it follows the pointer and shows the text of the mark's data-tip.
function mountTips() {
  const tip = node("div", { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const text = event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const room = document.documentElement.clientWidth;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, event.clientY - tip.offsetHeight - 12)}px`;
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
}
