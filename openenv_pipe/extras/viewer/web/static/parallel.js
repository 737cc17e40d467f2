// Parallel coordinates: an axis for each setting and each result, a line for each row of a sweep's table.

import { h, number } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 300, TOP = 44, BOTTOM = 22, SIDE = 70, LEAST_WIDTH = 150;
const LOG_FROM = 50; // ratio of the largest to the smallest value, from which an axis is logarithmic
const TICKS = 5;

function svg(tag, properties = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// An axis: where a value lies, from 0 at the bottom to 1, and what is written beside it.
function axisOf(title, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (known.length && known.every((value) => typeof value === "number")) {
    const low = Math.min(...known), high = Math.max(...known), isLog = low > 0 && high / low >= LOG_FROM;
    const scale = isLog ? Math.log : (value) => value, [from, to] = [scale(low), scale(high)];
    const place = (value) => (to === from ? 0.5 : (scale(value) - from) / (to - from));
    const distinct = [...new Set(known)].sort((a, b) => a - b);
    const marks = distinct.length <= TICKS ? distinct : [low, high];
    return { title: isLog ? `${title} (log)` : title, place: (value) => (typeof value === "number" ? place(value) : null), ticks: marks.map((value) => [place(value), number(value)]) };
  }
  const texts = [...new Set(known.map((value) => JSON.stringify(value)))].sort();
  const place = (text) => (texts.length > 1 ? texts.indexOf(text) / (texts.length - 1) : 0.5);
  return { title, place: (value) => (value === null || value === undefined ? null : place(JSON.stringify(value))), ticks: texts.map((text) => [place(text), text.replace(/^"|"$/g, "")]) };
}

// found: the answer about a sweep. Dragging along an axis keeps the lines that cross it there.
export function parallelCoordinates(found) {
  const valuesOf = (measure) => new Set(found.settings.map((each) => each.figures[measure]?.mean).filter((value) => value !== undefined));
  const differing = found.measures.filter((measure) => valuesOf(measure).size > 1);
  const results = differing.length ? differing : found.measures.filter((measure) => valuesOf(measure).size);
  if (found.settings.length < 2 || found.keys.length + results.length < 2) return null;
  const columns = [
    ...found.keys.map((key) => [found.labels[key] ?? key, (each) => each.values[key]]),
    ...results.map((measure) => [measure, (each) => each.figures[measure]?.mean]),
  ];
  const axes = columns.map(([title, read]) => axisOf(title, found.settings.map(read)));
  const width = 2 * SIDE + LEAST_WIDTH * (axes.length - 1), step = (width - 2 * SIDE) / (axes.length - 1);
  const x = (index) => SIDE + index * step, y = (share) => HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  const kept = new Map(), said = h("p", { class: "small muted", role: "status" });
  const about = "Each line is a setting. Point at one to read it; drag along an axis to keep the lines that cross it there; click on an axis to keep all.";
  const rows = found.settings.map((each) => ({ each, places: columns.map(([, read], index) => axes[index].place(read(each))) }));
  const measured = results.length ? columns.length - results.length : -1;

  for (const row of rows) {
    const points = row.places.map((place, index) => (place === null ? null : [x(index), y(place)])).filter(Boolean);
    const share = measured < 0 ? null : row.places[measured];
    row.line = svg("polyline", { points: points.map((point) => point.join(",")).join(" "), class: "setting", "data-setting": row.each.name });
    row.line.style.setProperty("--share", share === null ? "0%" : `${Math.round(100 * share)}%`);
    if (row.each.name === found.best) row.line.classList.add("best");
    row.line.append(svg("title", {}, document.createTextNode(row.each.name)));
    row.line.addEventListener("mouseenter", () => { said.textContent = `${row.each.name}: ${results.map((measure) => `${measure} ${number(row.each.figures[measure]?.mean)}`).join(", ")}`; });
    row.line.addEventListener("mouseleave", tell);
  }

  function tell() {
    const shown = rows.filter((row) => !row.line.classList.contains("faded"));
    said.textContent = kept.size ? `${shown.length} of ${rows.length} settings: ${shown.map((row) => row.each.name).join(" | ")}` : about;
  }

  function fade() {
    for (const row of rows) row.line.classList.toggle("faded", [...kept].some(([index, [low, high]]) => row.places[index] === null || row.places[index] < low || row.places[index] > high));
    tell();
  }

  const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "parallel", role: "img", "aria-label": "Settings and results as parallel coordinates" });
  chart.style.setProperty("min-width", `${Math.round(0.8 * width)}px`);
  const drawn = axes.map((axis, index) => {
    const brush = svg("rect", { x: x(index) - 7, width: 14, class: "brush", y: 0, height: 0 });
    const grip = svg("rect", { x: x(index) - 14, y: TOP - 6, width: 28, height: HEIGHT - TOP - BOTTOM + 12, class: "grip", "data-axis": index });
    const share = (event) => {
      const box = chart.getBoundingClientRect(), at = ((event.clientY - box.top) * HEIGHT) / box.height;
      return Math.min(1, Math.max(0, (HEIGHT - BOTTOM - at) / (HEIGHT - TOP - BOTTOM)));
    };
    let begin = null;
    grip.addEventListener("pointerdown", (event) => { begin = share(event); grip.setPointerCapture(event.pointerId); });
    grip.addEventListener("pointermove", (event) => {
      if (begin === null) return;
      const [low, high] = [begin, share(event)].sort((a, b) => a - b);
      kept.set(index, [low - 0.01, high + 0.01]);
      brush.setAttribute("y", y(high));
      brush.setAttribute("height", y(low) - y(high));
      fade();
    });
    grip.addEventListener("pointerup", (event) => {
      if (Math.abs(share(event) - begin) < 0.02) { kept.delete(index); brush.setAttribute("height", 0); fade(); }
      begin = null;
    });
    return [svg("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1), class: "axis" }),
      svg("text", { x: x(index), y: index % 2 ? 14 : 28, class: "name" }, document.createTextNode(axis.title)),
      ...axis.ticks.map(([place, text]) => svg("text", { x: x(index) + 6, y: y(place) + 4, class: "tick" }, document.createTextNode(text))), brush, grip];
  });
  chart.append(...drawn.map(([line]) => line), ...rows.map((row) => row.line), ...drawn.flatMap(([, ...rest]) => rest));
  tell();
  return h("section", { class: "section" }, h("h2", {}, "Settings and results"), h("div", { class: "wide panel", tabindex: 0 }, chart), said);
}
