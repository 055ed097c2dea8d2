"use strict";
// One chart from a plain description: axes, guides and series as SVG, drawn in real pixels so that text never shrinks.
//
// spec = {x: {label, log, min, max}, y: {...}, series: [...], guides: [{x or y, label}], height}
// series = {name, kind: "line" | "points" | "band", colour, dash, x, y, low, high, labels, ids, chosen}

const SVG_SPACE = "http://www.w3.org/2000/svg";

function node(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG_SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// A number for people: three digits, thousands apart, powers of ten where it is very large or small.
function short(value, digits = 3) {
  if (value === Infinity) return "∞";
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) {
    const power = Math.floor(Math.log10(size) + 1e-12);
    const front = Number((value / 10 ** power).toPrecision(2));
    return (front === 1 ? "" : front + "·") + "10" + superscript(power);
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function superscript(number) {
  return String(number).replace(/[-.0-9]/g, (c) => ({ "-": "⁻", ".": "·" })[c] ?? "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]);
}

// n to the power −rate.
const falling = (rate) => `n${superscript((-rate).toFixed(2))}`;

function axisScale(axis, values, from, to) {
  const usable = values.filter((v) => known(v) && (!axis.log || v > 0));
  let low = axis.min ?? Math.min(...usable), high = axis.max ?? Math.max(...usable);
  if (!usable.length) [low, high] = axis.log ? [1, 10] : [0, 1];
  if (axis.log) {
    if (low === high) [low, high] = [low / 2, high * 2];
    const pad = Math.pow(high / low, 0.04);
    if (axis.min === undefined) low /= pad;
    if (axis.max === undefined) high *= pad;
    const a = Math.log(low), b = Math.log(high);
    return { low, high, at: (v) => from + ((Math.log(Math.max(v, low * 1e-3)) - a) / (b - a)) * (to - from) };
  }
  if (low === high) [low, high] = [low - 1, high + 1];
  const pad = 0.05 * (high - low);
  if (axis.min === undefined) low -= pad;
  if (axis.max === undefined) high += pad;
  return { low, high, at: (v) => from + ((v - low) / (high - low)) * (to - from) };
}

function ticksOf(axis, scale, room) {
  const most = Math.max(2, Math.floor(room));
  if (!axis.log) {
    const rough = (scale.high - scale.low) / most, ten = 10 ** Math.floor(Math.log10(rough));
    let step = ten * ([1, 2, 5, 10].find((s) => s * ten >= rough) ?? 10);
    if (axis.whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let k = Math.ceil(scale.low / step - 1e-9); k * step <= scale.high + 1e-9 * step; k++) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  }
  const first = Math.floor(Math.log10(scale.low)), last = Math.ceil(Math.log10(scale.high));
  const inside = (list) => list.filter((v) => v >= scale.low * 0.9999 && v <= scale.high * 1.0001);
  for (const fronts of [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let p = first; p <= last; p++) for (const front of fronts) ticks.push(Number((front * 10 ** p).toPrecision(3)));
    if (inside(ticks).length <= most && (inside(ticks).length > 1 || fronts.length === 1)) return inside(ticks);
  }
  const every = Math.ceil((last - first) / most);
  const ticks = [];
  for (let p = first; p <= last; p++) if ((p - first) % every === 0) ticks.push(10 ** p);
  return inside(ticks);
}

function drawChart(spec, width) {
  const height = spec.height ?? 290;
  const margin = { left: 0, right: 14, top: 12, bottom: 42 };
  const all = (names) => spec.series.flatMap((s) => names.flatMap((name) => s[name] ?? []));
  const y = axisScale(spec.y, all(["y", "low", "high"]), height - margin.bottom, margin.top);
  const rungs = ticksOf(spec.y, y, (height - margin.top - margin.bottom) / 34);
  margin.left = 34 + 7 * Math.max(2, ...rungs.map((tick) => short(tick).length));
  const x = axisScale(spec.x, all(["x"]), margin.left, width - margin.right);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "chart" });
  svg.setAttribute("aria-label", `${spec.title ?? "chart"}: ${spec.y.label} against ${spec.x.label}; the numbers are in the table below`);
  const clip = `clip${drawChart.count++}`;
  const box = shape("clipPath", { id: clip });
  box.append(shape("rect", { x: margin.left - 6, y: margin.top - 6, width: width - margin.left - margin.right + 12, height: height - margin.top - margin.bottom + 12 }));
  svg.append(box);
  for (const tick of ticksOf(spec.x, x, (width - margin.left - margin.right) / 62)) {
    svg.append(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: margin.top, y2: height - margin.bottom }));
    svg.append(shape("text", { class: "tick", x: x.at(tick), y: height - margin.bottom + 15, "text-anchor": "middle" }, short(tick)));
  }
  for (const tick of rungs) {
    svg.append(shape("line", { class: "grid", y1: y.at(tick), y2: y.at(tick), x1: margin.left, x2: width - margin.right }));
    svg.append(shape("text", { class: "tick", x: margin.left - 7, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  svg.append(shape("text", { class: "axis", x: (margin.left + width - margin.right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label));
  const middle = (height - margin.bottom + margin.top) / 2;
  svg.append(shape("text", { class: "axis", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})` }, spec.y.label));
  const plot = shape("g", { "clip-path": `url(#${clip})` });
  svg.append(plot);
  for (const guide of spec.guides ?? []) drawGuide(plot, guide, x, y, margin, width, height);
  for (const series of spec.series) if (series.kind === "band") drawBand(plot, series, x, y);
  for (const series of spec.series) if (series.kind === "line") drawLine(plot, series, x, y);
  for (const series of spec.series) if (series.kind === "points") drawPoints(plot, series, x, y, spec);
  return svg;
}
drawChart.count = 0;

const drawable = (series) => series.x.map((v, i) => i).filter((i) => known(series.x[i]) && known(series.y[i]));

function drawGuide(plot, guide, x, y, margin, width, height) {
  if (guide.x !== undefined) {
    if (guide.x < x.low || guide.x > x.high) return;
    const at = x.at(guide.x), late = at + 6.5 * guide.label.length > width - margin.right;
    plot.append(shape("line", { class: "guide", x1: at, x2: at, y1: margin.top, y2: height - margin.bottom }));
    plot.append(shape("text", { class: "guide-label", x: at + (late ? -5 : 5), y: margin.top + 10 + 14 * (guide.row ?? 0), "text-anchor": late ? "end" : "start" }, guide.label));
  } else {
    if (guide.y < y.low || guide.y > y.high) return;
    plot.append(shape("line", { class: "guide", x1: margin.left, x2: width - margin.right, y1: y.at(guide.y), y2: y.at(guide.y) }));
    const below = y.at(guide.y) < margin.top + 12 ? 14 : -5;
    plot.append(shape("text", { class: "guide-label", x: width - margin.right - 4, y: y.at(guide.y) + below, "text-anchor": "end" }, guide.label));
  }
}

function drawBand(plot, series, x, y) {
  const places = series.x.map((v, i) => i).filter((i) => known(series.low[i]) && known(series.high[i]));
  const path = [...places.map((i) => [x.at(series.x[i]), y.at(series.high[i])]), ...places.reverse().map((i) => [x.at(series.x[i]), y.at(series.low[i])])];
  plot.append(shape("path", { class: `band c-${series.colour}`, d: `M${path.map((p) => p.map((v) => v.toFixed(1)).join(",")).join("L")}Z` }));
}

function drawLine(plot, series, x, y) {
  const path = drawable(series).map((i) => `${x.at(series.x[i]).toFixed(1)},${y.at(series.y[i]).toFixed(1)}`);
  if (path.length) plot.append(shape("path", { class: `line c-${series.colour}${series.dash ? " " + series.dash : ""}`, d: `M${path.join("L")}` }));
}

function drawPoints(plot, series, x, y, spec) {
  if (series.joined) drawLine(plot, { ...series, dash: "thin" }, x, y);
  for (const i of drawable(series)) {
    const cx = x.at(series.x[i]), cy = y.at(series.y[i]);
    if (series.low && known(series.low[i]) && known(series.high[i])) {
      plot.append(shape("line", { class: `bar c-${series.colour}`, x1: cx, x2: cx, y1: y.at(series.low[i]), y2: y.at(series.high[i]) }));
    }
    const dot = shape("circle", { class: `dot c-${series.colour}`, cx: cx.toFixed(1), cy: cy.toFixed(1), r: series.radius ?? 3.6 });
    const range = series.low && known(series.low[i]) ? ` (95%: ${short(series.low[i])} to ${short(series.high[i])})` : "";
    dot.dataset.tip = series.labels?.[i] ?? `${series.name}\n${spec.x.label}: ${short(series.x[i])}\n${spec.y.label}: ${short(series.y[i])}${range}`;
    if (series.ids) {
      dot.classList.add("pick");
      dot.dataset.head = series.ids[i];
      if (series.ids[i] === spec.chosen) plot.append(shape("circle", { class: "ring", cx: cx.toFixed(1), cy: cy.toFixed(1), r: 8 }));
    }
    plot.append(dot);
  }
}
