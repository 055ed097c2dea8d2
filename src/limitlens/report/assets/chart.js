"use strict";
// Draw one chart as SVG from a description of its axes, guide lines and series. Sizes are screen pixels, so text is never scaled.
//
// spec = {x: {label, log, low, high, whole}, y: {...}, series: [...], guides: [{x or y, label}], height, chosen}
// series = {name, kind: "line" | "points" | "band", colour, dash, x, y, low, high, joined, labels, named, ids, listed}
//       or {name, kind: "map", x: column labels, y: row labels, values, words}: a heat map of numbers, or of indices into `words`

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

// Format a number with three digits, thousands separators, and powers of ten for very large or small values.
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

// The text n^(−rate) with a superscript.
const falling = (rate) => `n${superscript((-rate).toFixed(2))}`;

function axisScale(axis, values, from, to) {
  const usable = values.filter((v) => known(v) && (!axis.log || v > 0));
  let low = axis.low ?? Math.min(...usable), high = axis.high ?? Math.max(...usable);
  if (!usable.length) [low, high] = axis.log ? [1, 10] : [0, 1];
  if (axis.log) {
    if (low === high) [low, high] = [low / 2, high * 2];
    const pad = Math.pow(high / low, 0.04);
    if (axis.low === undefined) low /= pad;
    if (axis.high === undefined) high *= pad;
    const a = Math.log(low), b = Math.log(high);
    return { low, high, at: (v) => from + ((Math.log(Math.max(v, low * 1e-3)) - a) / (b - a)) * (to - from) };
  }
  if (low === high) [low, high] = [low - 1, high + 1];
  const pad = 0.05 * (high - low);
  if (axis.low === undefined) low -= pad;
  if (axis.high === undefined) high += pad;
  return { low, high, at: (v) => from + ((v - low) / (high - low)) * (to - from) };
}

function ticksOf(axis, scale, room) {
  const most = Math.max(2, Math.floor(room));
  if (!axis.log) return evenTicks(scale, most, axis.whole);
  const first = Math.floor(Math.log10(scale.low)), last = Math.ceil(Math.log10(scale.high));
  const inside = (list) => list.filter((v) => v >= scale.low * 0.9999 && v <= scale.high * 1.0001);
  for (const fronts of [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let p = first; p <= last; p++) for (const front of fronts) ticks.push(Number((front * 10 ** p).toPrecision(3)));
    const found = inside(ticks);
    if (found.length > 1 && found.length <= most) return found;
  }
  const powers = inside(Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k)));
  const every = Math.ceil(powers.length / most);
  // A range of less than a decade may contain no number of one digit; use evenly spaced ticks then.
  return powers.length > 1 ? powers.filter((_, k) => k % every === 0) : evenTicks(scale, most, false);
}

// At least two ticks, in steps of 1, 2 or 5 times a power of ten.
function evenTicks(scale, most, whole) {
  for (let count = most; ; count++) {
    const rough = (scale.high - scale.low) / count, ten = 10 ** Math.floor(Math.log10(rough));
    let step = ten * ([1, 2, 5, 10].find((s) => s * ten >= rough) ?? 10);
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let k = Math.ceil(scale.low / step - 1e-9); k * step <= scale.high + 1e-9 * step; k++) ticks.push(Number((k * step).toPrecision(12)));
    if (ticks.length > 1 || count > most + 8) return ticks;
  }
}

// Tick labels with the fewest digits at which they differ.
function tickLabels(ticks) {
  for (let digits = 3; ; digits++) {
    const labels = ticks.map((tick) => (digits > 3 && Math.abs(tick) >= 1000 ? Number(tick.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 9 }) : short(tick, digits)));
    if (digits > 8 || new Set(labels).size === ticks.length) return labels;
  }
}

const LETTER = 6.9; // largest width of a letter of a label, in pixels

// Ticks whose labels do not overlap, each with the centre of its label, moved inwards if the label would leave the chart.
function spacedTicks(axis, scale, length, width) {
  for (let room = length / 62; ; room *= 0.8) {
    const ticks = ticksOf(axis, scale, room), labels = tickLabels(ticks);
    const places = ticks.map((tick, i) => {
      const half = (LETTER * labels[i].length) / 2;
      return { tick, label: labels[i], half, at: Math.min(scale.at(tick), width - half - 1) };
    });
    const apart = places.every((p, i) => i === 0 || p.at - p.half > places[i - 1].at + places[i - 1].half + 6);
    if (apart || room < 2) return places;
  }
}

function drawChart(spec, width) {
  const map = spec.series.find((s) => s.kind === "map");
  if (map) return drawMap(spec, map, width);
  const height = spec.height ?? 290;
  const margin = { left: 0, right: 14, top: 12, bottom: 42 };
  const all = (names) => spec.series.flatMap((s) => names.flatMap((name) => s[name] ?? []));
  const y = axisScale(spec.y, all(["y", "low", "high"]), height - margin.bottom, margin.top);
  const rungs = ticksOf(spec.y, y, (height - margin.top - margin.bottom) / 34), names = tickLabels(rungs);
  margin.left = 34 + 7 * Math.max(2, ...names.map((name) => name.length));
  const x = axisScale(spec.x, all(["x"]), margin.left, width - margin.right);
  const svg = canvas(spec, width, height);
  const clip = `clip${drawChart.count++}`;
  const box = shape("clipPath", { id: clip });
  box.append(shape("rect", { x: margin.left - 6, y: margin.top - 6, width: width - margin.left - margin.right + 12, height: height - margin.top - margin.bottom + 12 }));
  svg.append(box);
  for (const { tick, label, at } of spacedTicks(spec.x, x, width - margin.left - margin.right, width)) {
    svg.append(shape("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: margin.top, y2: height - margin.bottom }));
    svg.append(shape("text", { class: "tick", x: at, y: height - margin.bottom + 15, "text-anchor": "middle" }, label));
  }
  rungs.forEach((tick, i) => {
    svg.append(shape("line", { class: "grid", y1: y.at(tick), y2: y.at(tick), x1: margin.left, x2: width - margin.right }));
    svg.append(shape("text", { class: "tick", x: margin.left - 7, y: y.at(tick) + 4, "text-anchor": "end" }, names[i]));
  });
  axisNames(svg, spec, margin, width, height);
  const plot = shape("g", { "clip-path": `url(#${clip})` });
  svg.append(plot);
  const taken = [], above = shape("g", {}); // names of guide lines are drawn over points
  for (const guide of spec.guides ?? []) drawGuide(plot, above, guide, x, y, margin, width, height, taken);
  for (const series of spec.series) if (series.kind === "band") drawBand(plot, series, x, y);
  for (const series of spec.series) if (series.kind === "line") drawLine(plot, series, x, y);
  for (const series of spec.series) if (series.kind === "points") drawPoints(plot, series, x, y, spec);
  drawNames(above, spec.series.filter((s) => s.named), x, y, margin, width, height);
  plot.append(above);
  return svg;
}
drawChart.count = 0;

// Draw the labels of points beside them, right, left, above or below; one that would cover another or a point is left to its tooltip.
function drawNames(above, series, x, y, margin, width, height) {
  const places = series.flatMap((s) => drawable(s).map((i) => ({ cx: x.at(s.x[i]), cy: y.at(s.y[i]), name: s.labels[i], colour: s.colour })));
  const taken = places.map(({ cx, cy }) => ({ left: cx - 4, right: cx + 4, top: cy - 4, bottom: cy + 4 }));
  const drawn = new Set();
  for (const { cx, cy, name, colour } of places) {
    const long = 0.9 * LETTER * name.length, sides = [[cx + 7, cy - 6], [cx - 7 - long, cy - 6], [cx - long / 2, cy - 19], [cx - long / 2, cy + 7]];
    const boxes = sides.map(([left, top]) => ({ left, right: left + long, top, bottom: top + 12 }));
    const box = drawn.has(name) ? null : boxes.find((b) => b.left > margin.left && b.right < width - 2 && b.top > 0 && b.bottom < height - margin.bottom
      && !taken.some((other) => b.left < other.right && b.right > other.left && b.top < other.bottom && b.bottom > other.top));
    if (!box) continue;
    taken.push(box);
    drawn.add(name);
    above.append(shape("text", { class: `point-name c-${colour}`, x: box.left.toFixed(1), y: (box.top + 10).toFixed(1) }, name));
  }
}

function canvas(spec, width, height) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "chart" });
  svg.setAttribute("aria-label", `${spec.title ?? "chart"}: ${spec.y.label} against ${spec.x.label}; the numbers are in the table below`);
  return svg;
}

function axisNames(svg, spec, margin, width, height) {
  const middle = (height - margin.bottom + margin.top) / 2, centre = (margin.left + width - margin.right) / 2;
  // A label longer than its axis is compressed to the size of the chart.
  const fit = (text, room) => (LETTER * text.length > room ? { textLength: room, lengthAdjust: "spacingAndGlyphs" } : {});
  const reach = 2 * Math.min(centre, width - centre) - 4;
  svg.append(shape("text", { class: "axis", x: centre, y: height - 6, "text-anchor": "middle", ...fit(spec.x.label, reach) }, spec.x.label));
  svg.append(shape("text", { class: "axis", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})`, ...fit(spec.y.label, 2 * middle - 4) }, spec.y.label));
}

const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725"];
const WORD_COLOURS = ["blue", "green", "red", "orange", "pink", "sky", "grey"];

function viridis(share) {
  const at = Math.max(0, Math.min(1, share)) * (VIRIDIS.length - 1), i = Math.min(Math.floor(at), VIRIDIS.length - 2), t = at - i;
  const parts = [1, 3, 5].map((k) => Math.round((1 - t) * parseInt(VIRIDIS[i].slice(k, k + 2), 16) + t * parseInt(VIRIDIS[i + 1].slice(k, k + 2), 16)));
  const bright = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
  return { fill: `rgb(${parts.join(",")})`, ink: bright > 0.52 ? "#101010" : "#ffffff" };
}

const mapEnds = (map) => {
  const numbers = map.values.flat().filter(known);
  return numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : [0, 1];
};

const mapText = (map, value) => (map.words && known(value) ? map.words[value] : short(value));

// Draw a heat map: one rectangle per cell, coloured by its number or its word; the first row is at the top.
function drawMap(spec, map, width) {
  const height = spec.height ?? 290, [low, high] = mapEnds(map);
  const margin = { left: 30 + 7 * Math.max(...map.y.map((label) => String(label).length)), right: 4, top: 4, bottom: 42 };
  const wide = (width - margin.left - margin.right) / map.x.length, tall = (height - margin.top - margin.bottom) / map.y.length;
  const gap = Math.min(wide, tall) > 7 ? 1 : 0;
  const svg = canvas(spec, width, height);
  map.values.forEach((row, r) => row.forEach((value, c) => {
    const cell = shape("rect", { x: (margin.left + c * wide).toFixed(1), y: (margin.top + r * tall).toFixed(1), width: (wide - gap).toFixed(1), height: (tall - gap).toFixed(1) });
    if (!known(value)) cell.setAttribute("class", "no-value");
    else if (map.words) cell.setAttribute("class", `word c-${WORD_COLOURS[value % WORD_COLOURS.length]}`);
    else cell.setAttribute("fill", viridis(high > low ? (value - low) / (high - low) : 0.5).fill);
    cell.dataset.tip = `${spec.y.label} ${map.y[r]}, ${spec.x.label} ${map.x[c]}\n${map.name}: ${mapText(map, value)}`;
    svg.append(cell);
  }));
  const skip = (labels, size, room) => Math.max(1, Math.ceil(room(labels) / size));
  const across = skip(map.x, wide, (labels) => 8 + LETTER * Math.max(...labels.map((label) => String(label).length))), down = skip(map.y, tall, () => 14);
  map.x.forEach((label, c) => {
    if (c % across === 0) svg.append(shape("text", { class: "tick", x: margin.left + (c + 0.5) * wide, y: height - margin.bottom + 15, "text-anchor": "middle" }, String(label)));
  });
  map.y.forEach((label, r) => {
    if (r % down === 0) svg.append(shape("text", { class: "tick", x: margin.left - 7, y: margin.top + (r + 0.5) * tall + 4, "text-anchor": "end" }, String(label)));
  });
  axisNames(svg, spec, margin, width, height);
  return svg;
}

const drawable = (series) => series.x.map((v, i) => i).filter((i) => known(series.x[i]) && known(series.y[i]));

function drawGuide(plot, above, guide, x, y, margin, width, height, taken) {
  const words = guide.label ?? "", long = LETTER * words.length;
  if (known(guide.x)) {
    if (guide.x < x.low || guide.x > x.high) return;
    const at = x.at(guide.x), late = at + 5 + long > width - margin.right;
    const from = Math.max(late ? at - 5 - long : at + 5, margin.left + 2); // if neither side has room, the label covers the line
    let row = 0;
    while (taken.some((other) => other.row === row && from < other.to && from + long > other.from)) row++;
    taken.push({ row, from, to: from + long });
    plot.append(shape("line", { class: "guide", x1: at, x2: at, y1: margin.top, y2: height - margin.bottom }));
    above.append(shape("text", { class: "guide-label", x: from, y: margin.top + 10 + 14 * row }, words));
  } else if (known(guide.y)) {
    if (guide.y < y.low || guide.y > y.high) return;
    plot.append(shape("line", { class: "guide", x1: margin.left, x2: width - margin.right, y1: y.at(guide.y), y2: y.at(guide.y) }));
    const below = y.at(guide.y) < margin.top + 12 ? 14 : -5;
    above.append(shape("text", { class: "guide-label", x: width - margin.right - 4, y: y.at(guide.y) + below, "text-anchor": "end" }, words));
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

// Marker of a point: filled, hollow or square, to distinguish series of the same colour.
function mark(series, cx, cy, r) {
  const look = `dot c-${series.colour}${series.dash === "dashed" ? " hollow" : ""}`;
  if (series.dash === "dotted") return shape("rect", { class: look, x: (cx - r).toFixed(1), y: (cy - r).toFixed(1), width: 2 * r, height: 2 * r });
  return shape("circle", { class: look, cx: cx.toFixed(1), cy: cy.toFixed(1), r });
}

function drawPoints(plot, series, x, y, spec) {
  if (series.joined) drawLine(plot, { ...series, dash: `thin ${series.dash ?? ""}` }, x, y);
  for (const i of drawable(series)) {
    const cx = x.at(series.x[i]), cy = y.at(series.y[i]);
    if (series.low && known(series.low[i]) && known(series.high[i])) {
      plot.append(shape("line", { class: `bar c-${series.colour}`, x1: cx, x2: cx, y1: y.at(series.low[i]), y2: y.at(series.high[i]) }));
    }
    const dot = mark(series, cx, cy, series.radius ?? 3.6);
    const range = series.low && known(series.low[i]) ? ` (95%: ${short(series.low[i])} to ${short(series.high[i])})` : "";
    const label = series.labels?.[i];
    dot.dataset.tip = (label && !series.named && label) || `${label ? `${label}, ` : ""}${series.name}\n${spec.x.label}: ${short(series.x[i])}\n${spec.y.label}: ${short(series.y[i])}${range}`;
    if (series.ids) {
      dot.classList.add("pick");
      dot.dataset.head = series.ids[i];
      if (series.ids[i] === spec.chosen) plot.append(shape("circle", { class: "ring", cx: cx.toFixed(1), cy: cy.toFixed(1), r: 8 }));
    }
    plot.append(dot);
  }
}
