// The script of the live page. The server sends the parts that have changed, as JSON: HTML that it has escaped, and charts as
// numbers, which are drawn here as SVG in the look of the report's plots.
"use strict";

const WIDTH = 331, LEFT = 42, RIGHT = 10, TOP = 26, BOTTOM = 20, LABELS = 78;  // as wide as the report's plots, in their units
const FORMS = {
  power: value => value ? value.toExponential(0) : "0",
  percent: value => `${Math.round(value)}%`,
  plain: value => value.toLocaleString("en", {maximumSignificantDigits: 4}),
};

function element(parent, name, attributes = {}, text = null) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  if (text !== null) one.textContent = text;
  parent.append(one);
  return one;
}

function ticks(low, high, most) {
  const rough = (high - low || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(times => times * power).find(size => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step + 0);  // no -0
  return found;
}

function range(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

function drawPanel(svg, panel, top, height, last) {
  const named = panel.curves.some(curve => curve.dots && curve.name) && panel.title === "Evaluation";
  const right = WIDTH - (named ? LABELS : RIGHT), bottom = top + height;
  let [first, end] = range(panel.curves.flatMap(curve => curve.x));
  if (first === end) [first, end] = [Math.max(first - 1, 0), end + 1];
  let [low, high] = range(panel.curves.flatMap(curve => curve.y));
  [low, high] = [Math.min(low, 0), panel.top ?? (high > 0 ? high * 1.06 : 1)];
  const x = step => LEFT + 6 + (right - LEFT - 12) * (step - first) / (end - first);
  const y = value => bottom - (bottom - top) * (value - low) / (high - low);
  const show = FORMS[panel.form] ?? FORMS.plain;
  element(svg, "text", {x: LEFT, y: top - 10}, panel.title);
  const value = element(svg, "text", {x: right, y: top - 10, class: "value end"}, "");
  for (const at of ticks(low, high, height > 60 ? 4 : 2)) {
    element(svg, "line", {x1: LEFT, x2: right, y1: y(at), y2: y(at), class: "grid"});
    element(svg, "text", {x: LEFT - 6, y: y(at) + 4, class: "end"}, show(at));
  }
  if (last) {
    for (const at of ticks(first, end, 5).filter(Number.isInteger)) {
      element(svg, "text", {x: x(at), y: bottom + 16, class: "middle"}, at.toLocaleString("en"));
    }
    element(svg, "text", {x: (LEFT + right) / 2, y: bottom + 32, class: "middle"}, "step");
  }
  for (const mark of panel.marks.filter(step => step >= first && step <= end)) {
    element(svg, "line", {x1: x(mark), x2: x(mark), y1: top, y2: bottom, class: "mark"});
  }
  for (const curve of panel.curves) {
    const line = curve.x.map((step, i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(curve.y[i]).toFixed(1)}`).join("");
    element(svg, "path", {d: line, class: `${curve.color}${curve.faint ? " faint" : ""}`});
    if (curve.dots || curve.x.length === 1) curve.x.forEach((step, i) => element(svg, "circle", {cx: x(step), cy: y(curve.y[i]), r: 2.5, class: curve.color}));
  }
  if (named) {
    let lowest = -Infinity;
    for (const curve of [...panel.curves].sort((a, b) => b.y.at(-1) - a.y.at(-1))) {
      lowest = Math.max(y(curve.y.at(-1)), lowest + 14);  // labels of curves that end together are placed below each other
      element(svg, "text", {x: right, y: lowest + 4, class: curve.color}, `${curve.name} ${FORMS.plain(curve.y.at(-1))}`);
    }
  }
  const line = element(svg, "line", {y1: top, y2: bottom, class: "hover", visibility: "hidden"});
  return {top, bottom, hide: () => { line.setAttribute("visibility", "hidden"); value.textContent = ""; }, point: at => {
    const curve = panel.curves.at(panel.title === "Evaluation" ? 0 : panel.curves[0].faint ? 1 : 0);
    let near = 0;
    curve.x.forEach((step, i) => { if (Math.abs(x(step) - at) < Math.abs(x(curve.x[near]) - at)) near = i; });
    line.setAttribute("x1", x(curve.x[near])); line.setAttribute("x2", x(curve.x[near])); line.removeAttribute("visibility");
    value.textContent = `step ${curve.x[near].toLocaleString("en")}: ${show(curve.y[near])}`;
  }};
}

function drawPanels(svg, chart) {
  const weights = chart.panels.map(panel => panel.weight ?? 1), whole = weights.reduce((a, b) => a + b);
  const total = 252;
  const room = total - chart.panels.length * (TOP + BOTTOM) - 16 + BOTTOM * (chart.panels.length - 1) * 0.5;
  let at = TOP;
  const drawn = chart.panels.map((panel, i) => {
    const height = room * weights[i] / whole;
    const one = drawPanel(svg, panel, at, height, i === chart.panels.length - 1);
    at += height + TOP + BOTTOM * 0.5;
    return one;
  });
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${total}`);
  svg.onpointermove = event => {
    const at = event.offsetX * WIDTH / svg.clientWidth;
    drawn.forEach(panel => panel.point(at));
  };
  svg.onpointerleave = () => drawn.forEach(panel => panel.hide());
}

function drawBars(svg, chart) {
  const most = Math.max(...chart.bars.map(bar => bar.share)) || 1, long = Math.max(...chart.bars.map(bar => bar.text.length));
  const left = 62, room = WIDTH - left - 10 - 6.2 * long;
  element(svg, "text", {x: 4, y: 14}, chart.title);
  chart.bars.forEach((bar, i) => {
    const top = 28 + 26 * i, width = room * bar.share / most;
    element(svg, "text", {x: left - 8, y: top + 13, class: "end"}, bar.name);
    element(svg, "rect", {x: left, y: top, width, height: 18, rx: 2, class: bar.color});
    element(svg, "text", {x: left + width + 5, y: top + 13, class: "value"}, bar.text);
  });
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${34 + 26 * chart.bars.length}`);
}

function drawChart(chart) {
  const figure = document.createElement("figure");
  figure.id = `chart-${chart.id}`;
  const svg = element(figure, "svg", {class: "chart", role: "img", "aria-label": chart.title ?? chart.panels.map(p => p.title).join(", ")});
  chart.bars ? drawBars(svg, chart) : drawPanels(svg, chart);
  if (chart.caption) {
    const caption = document.createElement("figcaption");
    caption.textContent = chart.caption;
    figure.append(caption);
  }
  return figure;
}

let drawnCharts = {};
function drawCharts(charts) {
  const place = document.getElementById("charts"), texts = {};
  if (!charts.length) return;
  const figures = charts.map(chart => {
    texts[chart.id] = JSON.stringify(chart);
    return (texts[chart.id] === drawnCharts[chart.id] && document.getElementById(`chart-${chart.id}`)) || drawChart(chart);
  });
  drawnCharts = texts;
  if (figures.some((figure, i) => place.children[i] !== figure) || place.children.length !== figures.length) {
    place.replaceChildren(...figures);
  }
}

function replacePart(name, html) {
  const place = document.getElementById(name);
  const open = [...place.querySelectorAll("details")].map(one => one.open);
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((one, i) => { one.open = open[i] ?? false; });
}

function connection(text, lost) {
  const place = document.getElementById("connection");
  place.textContent = text;
  place.className = lost ? "lost" : "";
}

const source = new EventSource("events");
source.onmessage = event => {
  for (const [name, value] of Object.entries(JSON.parse(event.data))) {
    if (name === "charts") drawCharts(value);
    else if (name === "title") document.title = value;
    else if (name !== "continues") replacePart(name, value);
  }
};
source.onopen = () => connection("Updated as the run goes on.", false);
source.onerror = () => connection("The connection is lost; this is the last state that was received.", true);
source.addEventListener("end", () => {
  source.close();
  connection("The server has ended; this is the last state of the run.", false);
});
