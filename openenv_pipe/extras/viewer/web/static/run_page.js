// One run: its head, alarms, curves, logs and configuration.

import { h, fill, address, statusMark, number, percent, count, duration, choice, field, NONE } from "./dom.js";
import { ask, listen, runPath } from "./api.js";
import { Chart } from "./charts.js";
import { progressBar, interval, modelName, tagChips } from "./runs_page.js";

export const TABS = [["", "Curves", "c"], ["episodes", "Episodes", "e"], ["tasks", "Tasks"], ["evaluations", "Evaluations"], ["logs", "Logs"], ["config", "Configuration"], ["play", "Play", "p"]];

export function runTabs(key, current) {
  return h("nav", { class: "tabs", "aria-label": "Parts of the run" }, TABS.filter(([name]) => name !== "play" || !window.bundle).map(([name, title, letter]) =>
    h("a", { "data-key": letter, href: address(`/run/${key}${name ? `/${name}` : ""}`), "aria-current": name === current ? "page" : null }, title)));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== NONE)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

// The facts of a reward's terms; none if its only one says the same.
export function termsOf(reward, terms) {
  const found = Object.entries(terms);
  return found.length === 1 && found[0][1] === reward ? [] : found.map(([name, value]) => [`Term ${name}`, number(value)]);
}

function head(run) {
  return [
    h("div", { class: "bar" }, h("h1", {}, run.key), statusMark(run.status), progressBar(run), tagChips(run),
      run.lineage ? h("span", { class: "muted" }, `${run.lineage.kind} of ${run.lineage.run}`) : null),
    run.problem && run.problem !== run.status ? h("div", { class: "notice bad" }, run.problem) : null,
    run.resume ? h("p", {}, "Continue it from its last checkpoint: ", h("code", {}, run.resume)) : null,
    facts([
      ["Stage", run.status === "running" ? run.stage : null], ["Time left", duration(run.left_s)],
      ["Reward", number(run.reward)], ["Success in training", percent(run.success)],
      ["Success before", interval(run.success_start)], ["Success trained", interval(run.success_trained)],
      ["Time", duration(run.duration_s)], ["Tokens written", count(run.num_tokens)], ["Tokens per second", count(run.tokens_per_s)],
      ["Memory", run.memory_gib ? h("span", { title: "Of the run's processes, its servers included, when it was last measured" }, `${run.memory_gib.toFixed(2)} GiB`) : null],
      ["Environment", run.env], ["Model", modelName(run)],
    ]),
    run.alarms.map((alarm) => h("div", { class: "notice", "data-metric": alarm.metric }, h("strong", {}, alarm.what, "."), h("p", {}, "Try: ", alarm.advice, "."))),
  ];
}

export async function runPage(route, key, tab) {
  const top = h("div", {}), body = h("div", {});
  let run = await ask(runPath(key));
  fill(top, head(run));
  const part = await { "": curvesTab, logs: logsTab, config: configTab }[tab](route, key, body, run);
  const stop = listen(runPath(key), async () => {
    run = { ...run, ...await ask(`${runPath(key)}/progress`).catch(() => ({})) };
    fill(top, head(run));
    await part.update?.();
  });
  return {
    title: key, trail: [[key, address(`/run/${key}`)]], node: h("div", {}, top, runTabs(key, tab), body),
    shown: part.shown, end: () => { stop(); part.end?.(); },
  };
}

// Which steps a metric is drawn over: those of GRPO, unless only the warm start has it. over: the metric on the other axis, if it is not the step.
export function linesOf(panel, data, over) {
  return panel.names.filter((name) => name !== over).map((name) => {
    const values = data.values[name] ?? [];
    const has = (stage) => values.some((value, index) => value !== null && data.stages[index] === stage);
    const stage = has("grpo") || !has("warm_start") ? "grpo" : "warm_start";
    const line = { name, metric: name, x: [], y: [], steps: [], stage, explanation: data.explanations?.[name] };
    values.forEach((value, index) => {
      const x = over ? data.values[over]?.[index] ?? null : data.steps[index];
      if (data.stages[index] !== stage || x === null || (over && value === null)) return;
      line.x.push(x);
      line.y.push(value);
      line.steps.push(data.steps[index]);
    });
    return line;
  });
}

function isConstant({ y }) {
  const values = y.filter((value) => value !== null);
  return values.length > 1 && values.every((value) => value === values[0]);
}

// Whether a metric is the reward by another name, as that of its only term is.
function isTheReward(name, { values }) {
  const reward = values["reward/mean"];
  return !["reward/mean", "reward/std"].includes(name) && name.startsWith("reward/") && reward !== undefined && reward.every((value, index) => value === values[name][index]);
}

export function pointsOf(panel, data, over) {
  const measure = { "reward/mean": "reward", "success/rate": "success" }[panel.names[0]];
  const place = (step) => over ? data.values[over]?.find((_, index) => data.stages[index] === "grpo" && data.steps[index] === step) ?? null : step;
  return measure ? data.evaluations.filter((each) => each[measure] && place(each.step) !== null).map((each) => ({ x: place(each.step), step: each.step, ...each[measure] })) : [];
}

function extend(data, more) {
  if (!data || more.start === 0) return more;
  const known = data.steps.length;
  for (const name of new Set([...Object.keys(data.values), ...Object.keys(more.values)])) {
    const old = data.values[name] ?? new Array(known).fill(null);
    more.values[name] = [...old, ...(more.values[name] ?? new Array(more.steps.length).fill(null))];
  }
  return { ...more, explanations: data.explanations, steps: [...data.steps, ...more.steps], stages: [...data.stages, ...more.stages] };
}

// What the curves are drawn over: the steps, smoothed or not, or another metric, as dots.
export function curveControls(route, names, changed) {
  const { parameters } = route;
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: parameters.smooth ?? "0", "aria-label": "Smoothing",
    oninput: () => { parameters.smooth = slider.value; history.replaceState(null, "", address(route.path, parameters)); changed(); } });
  const over = choice(parameters.over, [["", "step"], ...names.map((name) => [name, name])], (value) => { location.hash = address(route.path, { ...parameters, over: value }); }, "Over");
  return [field("Over", over), parameters.over ? h("span", { class: "muted small" }, "Each dot is a step; later steps are stronger.") : field("Smoothing", slider)];
}

async function curvesTab(route, key, body) {
  let data = null, numNames = 0;
  const charts = new Map(), sections = new Map(), place = h("div", {}), controls = h("div", { class: "bar" }), { over } = route.parameters;
  async function load() {
    const asked = data ? { epoch: data.epoch, after: data.steps.length } : {};
    data = extend(data, await ask(`${runPath(key)}/curves`, asked));
    draw();
  }
  const newSection = () => ({ grid: h("div", { class: "grid" }), folded: h("details", { ontoggle: () => charts.forEach((chart) => chart.fit()) }, h("summary", { class: "small" }), h("div", { class: "grid" })) });
  function draw() {
    const weight = Number(route.parameters.smooth ?? 0), names = Object.keys(data.values);
    if (controls.childElementCount === 0 || names.length !== numNames) {
      numNames = names.length;
      fill(controls, curveControls(route, names, draw), h("span", { class: "muted small" }, "Drag over a plot to look closer; double-click to see all. ? says what a metric means."));
    }
    for (const panel of data.panels) {
      const lines = linesOf(panel, data, over);
      if (!lines.some((line) => line.y.some((value) => value !== null))) continue;
      if (lines.length === 1 && isTheReward(lines[0].metric, data)) continue;
      const name = `${panel.section}/${panel.title}`;
      if (!sections.has(panel.section)) {
        sections.set(panel.section, newSection());
        place.append(h("section", { class: "section" }, h("h2", {}, panel.section), Object.values(sections.get(panel.section))));
      }
      if (!charts.has(name)) charts.set(name, new Chart(panel.title, { unit: lines[0].stage === "grpo" ? "step" : "warm start step", over }));
      const points = pointsOf(panel, data, over), { grid, folded } = sections.get(panel.section), { node } = charts.get(name);
      const home = !points.length && lines.every(isConstant) ? folded.lastChild : grid;
      if (node.parentNode !== home) home.append(node);
      charts.get(name).update(lines, { weight, points });
    }
    for (const { folded } of sections.values()) {
      const size = folded.lastChild.children.length;
      folded.hidden = !size;
      folded.firstChild.textContent = `${size} ${size === 1 ? "plot" : "plots"} of metrics that have not changed`;
    }
    if (!charts.size) fill(place, h("p", { class: "empty-page" }, "The run has not finished a step yet. Curves appear here by themselves."));
    else place.querySelector(".empty-page")?.remove();
  }
  fill(body, controls, place);
  await load();
  return { update: load, shown: () => charts.forEach((chart) => chart.fit()), end: () => charts.forEach((chart) => chart.end()) };
}

async function logsTab(route, key, body, run) {
  if (!run.logs.length) {
    fill(body, h("p", { class: "empty-page" }, "The run has written no logs."));
    return {};
  }
  const name = run.logs.includes(route.parameters.name) ? route.parameters.name : run.logs[0];
  const text = h("pre", { class: "log", tabindex: 0 });
  async function load() {
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
    text.textContent = (await ask(`${runPath(key)}/log`, { name })).text || "(empty)";
    if (atEnd) text.scrollTop = text.scrollHeight;
  }
  fill(body, choice(name, run.logs.map((each) => [each, each]), (value) => { location.hash = address(route.path, { name: value }); }, "Log"), text);
  await load();
  return { update: load, shown: () => { text.scrollTop = text.scrollHeight; } };
}

async function configTab(route, key, body, run) {
  const rows = [];
  const walk = (value, path) => {
    if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
      for (const [name, each] of Object.entries(value)) walk(each, path ? `${path}.${name}` : name);
    } else rows.push([path, value]);
  };
  walk(run.config, "");
  const search = h("input", { type: "search", placeholder: "Filter keys and values", value: route.parameters.q ?? "", "aria-label": "Filter keys", oninput: () => draw() });
  const place = h("div", { class: "wide", tabindex: 0 });
  function draw() {
    const word = search.value.toLowerCase();
    const shown = rows.filter(([name, value]) => `${name} ${JSON.stringify(value)}`.toLowerCase().includes(word));
    fill(place, h("table", { class: "list" }, shown.map(([name, value]) => h("tr", {}, h("td", { class: "mono" }, name), h("td", { class: "long mono" }, typeof value === "string" ? value : JSON.stringify(value))))));
  }
  fill(body, h("div", { class: "bar" }, h("span", { class: "grow" }, search)),
    h("p", { class: "mono small muted" }, run.command), place,
    h("p", { class: "small muted" }, `Versions: ${Object.entries(run.versions).map((each) => each.join(" ")).join(", ")}`));
  draw();
  return {};
}
