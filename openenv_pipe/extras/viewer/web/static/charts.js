// Curves with smoothing, or dots over another metric; a legend with values, and evaluations with their intervals.

import { h, fill, number } from "./dom.js";

export const COLOURS = 6;
const HEIGHT = 170;
const charts = new Set();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function lineColour(index) {
  return colour(`--line-${index % COLOURS}`);
}

function faint(text) {
  return `color-mix(in srgb, ${text} 28%, transparent)`;
}

// The exponential moving average without a bias to its first value; gaps stay gaps.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// lines: {name, x, y, steps, explanation, colour}; the values of several x are put on one axis. over: the metric that x is, if it is not the step.
export class Chart {
  constructor(title, { unit = "step", over } = {}) {
    this.unit = unit;
    this.over = over;
    this.place = h("div", { class: "plot" });
    this.legend = h("ul", { class: "legend" });
    this.about = h("dl", { class: "about", hidden: true });
    this.button = h("button", { class: "quiet", type: "button", "aria-expanded": "false", title: "What these numbers mean",
      onclick: () => this.toggle() }, "?");
    this.node = h("section", { class: "panel" },
      h("header", {}, h("h3", {}, title), this.button), this.place, this.legend, this.about);
    this.plot = null;
    charts.add(this);
  }

  toggle() {
    this.about.hidden = !this.about.hidden;
    this.button.setAttribute("aria-expanded", String(!this.about.hidden));
  }

  update(lines, { weight = 0, points = [] } = {}) {
    if (this.over) weight = 0;
    this.last = [lines, { weight, points }];
    // Steps may have an equal value of another metric, and are two dots nevertheless.
    const key = (x, step) => this.over ? `${x} ${step}` : x, slots = new Map();
    for (const line of lines) line.x.forEach((x, index) => slots.set(key(x, line.steps?.[index]), [x, line.steps?.[index]]));
    for (const { x, step } of points) slots.set(key(x, step), [x, step]);
    const sorted = [...slots].sort(([, [x, a]], [, [y, b]]) => x - y || a - b), place = new Map(sorted.map(([name], index) => [name, index]));
    const axis = sorted.map(([, [x]]) => x), columns = [axis];
    this.steps = sorted.map(([, [, step]]) => step);
    for (const line of lines) {
      const values = new Array(axis.length).fill(null), soft = new Array(axis.length).fill(null);
      const average = smoothed(line.y, weight);
      line.x.forEach((x, index) => {
        const at = place.get(key(x, line.steps?.[index]));
        values[at] = line.y[index];
        soft[at] = average[index];
      });
      columns.push(values, soft);
    }
    // uPlot draws a point of data as nothing but a line; evaluations, of which a step may have several, need room on the axes.
    for (const [bound, outer] of [["low", Math.min], ["high", Math.max]]) {
      const values = new Array(axis.length).fill(null);
      for (const point of points) {
        const at = place.get(key(point.x, point.step)), value = point[bound] ?? point.mean;
        values[at] = outer(values[at] ?? value, value);
      }
      columns.push(values);
    }
    this.points = points;
    this.lines = lines;
    const shape = JSON.stringify([lines.map((line) => [line.name, line.colour]), weight > 0]);
    if (!this.plot || this.shape !== shape) this.draw(columns, weight, shape);
    else this.plot.setData(columns);
    this.explain();
    this.values(null);
  }

  draw(columns, weight, shape) {
    this.plot?.destroy();
    this.shape = shape;
    const series = [{}];
    this.lines.forEach((line, index) => {
      const stroke = line.colour ?? lineColour(index);
      const alone = (plot, which) => plot.data[which].filter((value) => value !== null).length < 2;
      series.push({ stroke: weight ? faint(stroke) : stroke, width: weight ? 1 : 1.6, spanGaps: true, ...(this.over ? { paths: () => null, points: { show: false } } : { points: { show: alone, size: 6, fill: stroke } }) });
      series.push({ stroke, width: 1.8, show: weight > 0, spanGaps: true, points: { show: false } });
    });
    series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
    const font = "11px system-ui, sans-serif", ink = colour("--muted"), grid = { stroke: colour("--grid"), width: 1 };
    const look = { font, stroke: ink, grid, ticks: { show: false }, gap: 4 };
    this.plot = new uPlot({
      width: this.width(), height: HEIGHT, padding: [8, 18, 0, 0],
      scales: { x: { time: false, ...(this.over ? { range: (_, low, high) => withMargin(low, high) } : {}) }, y: { range: (_, low, high) => this.range(low, high) } },
      series,
      axes: [
        this.over ? { ...look, size: 24, space: 60, label: this.over, labelSize: 16, labelFont: font, labelGap: 0, values: (_, ticks) => tickTexts(ticks) }
          : { ...look, size: 24, space: 60, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000] },
        { ...look, size: 52, space: 34, values: (_, ticks) => tickTexts(ticks) },
      ],
      legend: { show: false },
      cursor: { points: { size: 5 }, drag: { x: true, y: false },
        ...(this.over ? { dataIdx: (plot) => this.nearest(plot) } : { sync: { key: "steps", scales: ["x", null] } }) },
      hooks: { setCursor: [(plot) => this.values(this.over ? this.nearest(plot) : plot.cursor.idx)], draw: [(plot) => this.marks(plot)] },
    }, columns, this.place);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.lines.every((line) => line.metric === "success/rate")) return [0, 1];
    return withMargin(low, high);
  }

  // The place of the dot that is nearest to the pointer, if it is over the plot.
  nearest(plot) {
    const { left, top } = plot.cursor, at = { place: null, distance: Infinity };
    if (left < 0 || top < 0) return null;
    this.dots(plot, (place, x, y) => {
      const distance = Math.hypot(x - left, y - top);
      if (distance < at.distance) Object.assign(at, { place, distance });
    });
    return at.place;
  }

  dots(plot, visit, onCanvas = false) {
    this.lines.forEach((_, which) => plot.data[1 + 2 * which].forEach((value, place) => {
      if (value !== null) visit(place, plot.valToPos(plot.data[0][place], "x", onCanvas), plot.valToPos(value, "y", onCanvas), which);
    }));
  }

  // Dots over another metric, the later the stronger, and evaluations with their intervals.
  marks(plot) {
    const { ctx } = plot, ratio = devicePixelRatio, { left, top, width, height } = plot.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left - 4 * ratio, top - 4 * ratio, width + 8 * ratio, height + 8 * ratio);
    ctx.clip();
    if (this.over) {
      const colours = this.lines.map((line, which) => line.colour ?? lineColour(which));
      const ends = this.lines.map(({ steps }) => [steps[0], steps.at(-1)]);
      this.dots(plot, (place, x, y, which) => {
        ctx.fillStyle = colours[which];
        const [first, last] = ends[which];
        ctx.globalAlpha = last > first ? 0.25 + 0.65 * (this.steps[place] - first) / (last - first) : 0.9;
        ctx.beginPath();
        ctx.arc(x, y, 3 * ratio, 0, 7);
        ctx.fill();
      }, true);
      ctx.globalAlpha = 1;
    }
    ctx.strokeStyle = ctx.fillStyle = colour("--ink");
    ctx.lineWidth = 1.2 * ratio;
    for (const point of this.points) {
      if (point.colour) ctx.strokeStyle = ctx.fillStyle = point.colour;
      const x = plot.valToPos(point.x, "x", true);
      const [y, low, high] = [point.mean, point.low ?? point.mean, point.high ?? point.mean].map((value) => plot.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, low);
      ctx.lineTo(x, high);
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(x, y, 2.8 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  values(index) {
    const data = this.plot?.data;
    if (!data) return;
    const at = index ?? null;
    fill(this.legend, this.lines.map((line, which) => {
      const values = data[1 + 2 * which];
      const value = at !== null ? values[at] : this.over ? null : values.findLast((each) => each !== null);
      const swatch = h("i", { style: { background: line.colour ?? lineColour(which) } });
      return h("li", { title: line.explanation?.meaning }, swatch, h("span", {}, line.name), at === null && this.over ? null : h("b", {}, number(value ?? null)));
    }), at === null ? null : h("li", { class: "at" }, this.over ? `${this.over} ${number(data[0][at])}, ${this.unit} ${this.steps[at]}` : `${this.unit} ${data[0][at]}`),
    this.points.length ? h("li", { class: "at" }, "● evaluation") : null);
  }

  explain() {
    const known = this.lines.filter((line, index) => line.explanation && this.lines.findIndex((other) => other.metric === line.metric) === index);
    this.button.hidden = !known.length;
    fill(this.about, known.map((line) => [h("dt", {}, line.metric),
      h("dd", {}, line.explanation.meaning, ". ", line.explanation.hint)]));
  }

  width() {
    return Math.max(160, this.place.clientWidth || 300);
  }

  fit() {
    if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.width(), height: HEIGHT });
  }

  redraw() {
    if (!this.last) return;
    this.shape = null;
    this.update(...this.last);
  }

  end() {
    this.plot?.destroy();
    charts.delete(this);
  }
}

function withMargin(low, high) {
  const margin = low === high ? Math.abs(low) * 0.1 || 0.1 : (high - low) * 0.06;
  return [low - margin, high + margin];
}

// With as few digits as say where each tick is, which are then as many as make them differ.
export function tickTexts(ticks) {
  const near = Math.abs(ticks[1] - ticks[0]) / 100 || Math.abs(ticks[0]) / 1000;
  let texts = [];
  for (let digits = 1; digits < 12; digits++) {
    texts = ticks.map((tick) => short(tick, digits));
    if (texts.every((text, index) => Math.abs(Number(text) - ticks[index]) <= near)) break;
  }
  return texts;
}

function short(value, digits) {
  const size = Math.abs(value), rounded = +value.toPrecision(digits);
  return value !== 0 && (size >= 1e4 || size < 1e-3) ? rounded.toExponential().replace("e+", "e") : String(rounded);
}

addEventListener("resize", () => charts.forEach((chart) => chart.fit()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
