// Several runs: laid over each other, as a sweep, and by their evaluations.

import { h, address, sortable, statusMark, number, percent, count, choice, field, NONE } from "./dom.js";
import { ask, listen, runPath } from "./api.js";
import { Chart, lineColour } from "./charts.js";
import { parallelCoordinates } from "./parallel.js";
import { runTabs, curveControls, linesOf, pointsOf } from "./run_page.js";

const MOST = 6;

function figure(value, measure) {
  if (!value) return NONE;
  const show = measure === "success" || measure.startsWith("pass@") ? percent : number;
  const text = show(value.mean);
  return value.low === null ? text : h("span", { title: `${show(value.low)} to ${show(value.high)} over ${value.over}` }, text, " ", h("span", { class: "muted small" }, `± ${show((value.high - value.low) / 2)}`));
}

function valueText(value) {
  return typeof value === "string" ? value : JSON.stringify(value ?? null);
}

// The settings in which runs differ, with their results; the best is marked.
export function settingsTable(found, route, colours) {
  const link = (changes) => address(route.path, { ...route.parameters, ...changes });
  const columns = [
    { key: "runs", title: "Runs", cell: (each) => each.runs.map((key, index) => [index ? ", " : "", colours?.has(key) ? h("i", { class: "swatch", style: { background: colours.get(key) } }) : null, h("a", { href: address(`/run/${key}`) }, key)]) },
    ...found.keys.map((key) => ({ key, title: found.labels[key] ?? key, hint: key, of: (each) => each.values[key] ?? null, first: "up", class: "mono", cell: (each) => key in each.values ? valueText(each.values[key]) : NONE })),
    ...found.measures.map((measure) => ({ key: measure, title: measure, class: "num", of: (each) => each.figures[measure]?.mean ?? null, cell: (each) => figure(each.figures[measure], measure) })),
    { key: "status", title: "Status", cell: (each) => each.statuses },
  ];
  const rows = found.settings.map((each) => ({ ...each, rowClass: each.name === found.best ? "best" : null }));
  return [found.notes.map((note) => h("div", { class: "notice" }, note)), found.lost_jobs.map((job) => h("div", { class: "notice bad" }, job)),
    sortable(columns, rows, { sort: route.parameters.sort, way: route.parameters.way, link, empty: "No run can be read." })];
}

// One plot for each metric, with a line for each run. Returns what updates and what ends them.
function overlaidCurves(route, keys, colours, place, only) {
  const charts = new Map(), sections = new Map(), { over } = route.parameters;
  let data = new Map();
  async function load() {
    data = new Map(await Promise.all(keys.map(async (key) => [key, await ask(`${runPath(key)}/curves`)])));
    draw();
  }
  function draw() {
    const weight = Number(route.parameters.smooth ?? 0), panels = new Map();
    for (const each of data.values()) for (const panel of each.panels) for (const name of panel.names) panels.set(name, { ...panel, names: [name] });
    for (const [name, panel] of panels) {
      if (only && !only.includes(name)) continue;
      const lines = [], points = [];
      for (const key of keys) {
        const [line] = linesOf(panel, data.get(key), over), colour = colours.get(key);
        if (line?.y.some((value) => value !== null)) lines.push({ ...line, name: key, colour });
        points.push(...pointsOf(panel, data.get(key), over).map((point) => ({ ...point, colour })));
      }
      if (!lines.length) continue;
      if (!sections.has(panel.section)) {
        sections.set(panel.section, h("div", { class: "grid" }));
        place.append(h("section", { class: "section" }, h("h2", {}, panel.section), sections.get(panel.section)));
      }
      if (!charts.has(name)) {
        charts.set(name, new Chart(name, { over }));
        sections.get(panel.section).append(charts.get(name).node);
      }
      charts.get(name).update(lines, { weight, points });
    }
  }
  const names = () => [...new Set([...data.values()].flatMap((each) => Object.keys(each.values)))].sort();
  return { load, draw, names, fit: () => charts.forEach((chart) => chart.fit()), end: () => charts.forEach((chart) => chart.end()) };
}

function coloursOf(keys) {
  return new Map(keys.map((key, index) => [key, lineColour(index)]));
}

export async function overlayPage(route) {
  const keys = (route.parameters.runs ?? "").split(",").filter(Boolean).slice(0, MOST), colours = coloursOf(keys), place = h("div", {});
  const found = await ask("/compare", { runs: keys.join(",") });
  const curves = overlaidCurves(route, keys, colours, place);
  await curves.load();
  const stops = keys.map((key) => listen(runPath(key), () => curves.load().catch(() => {})));
  return {
    title: `${keys.length} runs`, trail: [[`${keys.length} runs`, address(route.path, route.parameters)]], shown: curves.fit, end: () => { stops.forEach((stop) => stop()); curves.end(); },
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, `${keys.length} runs overlaid`), curveControls(route, curves.names(), curves.draw),
      h("a", { href: address("/evaluations", { runs: keys.join(",") }) }, "their evaluations by task")), settingsTable(found, route, colours), h("p", {}), place),
  };
}

export async function sweepsPage(route) {
  const { sweeps } = await ask("/sweeps");
  const columns = [
    { key: "sweep", title: "Sweep", of: (each) => each.stamp, cell: (each) => h("a", { href: address(`/sweep/${each.stamp}`) }, each.stamp) },
    { key: "status", title: "Status", of: (each) => each.status, first: "up", cell: (each) => h("span", { title: each.problem }, statusMark(each.status)) },
    { key: "jobs", title: "Jobs", cell: (each) => Object.entries(each.jobs ?? {}).map(([status, size]) => `${size} ${status}`).join(", ") || NONE },
    { key: "overrides", title: "Overrides", class: "long mono", cell: (each) => each.overrides ?? NONE },
  ];
  const link = (changes) => address(route.path, { ...route.parameters, ...changes });
  return { title: "Sweeps", trail: [["Sweeps", address("/sweeps")]], node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, "Sweeps")),
    sortable(columns, sweeps, { sort: route.parameters.sort, way: route.parameters.way, link, empty: "There are no sweeps here: openenv-pipe train -m makes one." })) };
}

export async function sweepPage(route, stamp) {
  const found = await ask(`/sweeps/${encodeURIComponent(stamp)}`);
  const keys = found.settings.flatMap((each) => each.runs).slice(0, MOST), colours = coloursOf(keys), place = h("div", {});
  const curves = overlaidCurves(route, keys, colours, place, ["reward/mean", "success/rate", "loss/entropy"]);
  await curves.load();
  return {
    title: found.title, trail: [["Sweeps", address("/sweeps")], [stamp, address(route.path)]], shown: curves.fit, end: curves.end,
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, found.title), curveControls(route, curves.names(), curves.draw),
      keys.length > 1 ? h("a", { href: address("/overlay", { runs: keys.join(",") }) }, `all curves of the first ${keys.length} runs`) : null), settingsTable(found, route, colours), h("p", {}), parallelCoordinates(found), place),
  };
}

function interval(value, show) {
  if (!value) return NONE;
  return value.low === null ? show(value.mean) : h("span", {}, show(value.mean), " ", h("span", { class: "muted small" }, `${show(value.low)} to ${show(value.high)}`));
}

// key: of the run whose tab this is; without it, the runs of the address.
export async function evaluationsPage(route, key) {
  const { parameters } = route, runs = key ?? parameters.runs;
  const found = await ask("/evaluations", { runs, before: parameters.before, after: parameters.after });
  const link = (changes) => address(route.path, { ...parameters, ...changes }), names = found.reports.map((each) => each.name);
  const measure = parameters.measure || "success", show = measure === "success" ? percent : number;
  const hasOwn = found.reports.some((each) => each.env_reward);
  const reports = h("div", { class: "wide", tabindex: 0 }, h("table", { class: "list" },
    h("thead", {}, h("tr", {}, ["Evaluation", "Model", "Step", "Temperature", "Success", "Reward", ...(hasOwn ? ["Environment's reward"] : []), "Turns", "Tasks scored", "Unusable replies", "Failed"].map((title, index) => h("th", { class: index > 1 ? "num" : null, scope: "col" }, title)))),
    h("tbody", {}, found.reports.map((each) => h("tr", {}, h("td", {}, key ? h("a", { href: address(`/run/${key}/episodes`, { source: `eval/${each.name}` }) }, each.name) : each.name), h("td", { class: "line" }, each.model), h("td", { class: "num" }, each.step ?? NONE), h("td", { class: "num" }, each.temperature ?? NONE),
      h("td", { class: "num" }, interval(each.success, percent)), h("td", { class: "num" }, interval(each.reward, number)), hasOwn ? h("td", { class: "num" }, interval(each.env_reward, number)) : null, h("td", { class: "num" }, number(each.turns?.mean, 2)),
      h("td", { class: each.num_scored_tasks < each.num_tasks ? "num bad" : "num" }, `${count(each.num_scored_tasks)} of ${count(each.num_tasks)}`), h("td", { class: each.unusable >= 0.5 ? "num bad" : "num" }, percent(each.unusable)), h("td", { class: each.num_failed ? "num bad" : "num" }, each.error ?? each.num_failed))))));
  const gain = (each) => {
    const [from, to] = [each.scores[found.before]?.[measure], each.scores[found.after]?.[measure]];
    return from === null || from === undefined || to === null || to === undefined ? null : to - from;
  };
  const columns = [
    { key: "task", title: "Task", of: (each) => each.task, first: "up", cell: (each) => key ? h("a", { href: address(`/run/${key}/task`, { source: `eval/${found.after}`, task: each.task }) }, each.task) : each.task },
    ...names.map((name) => ({ key: name, title: name, class: "num", of: (each) => each.scores[name]?.[measure] ?? null, cell: (each) => show(each.scores[name]?.[measure]) })),
    { key: "difference", title: `${found.after} − ${found.before}`, class: "num", of: gain, cell: (each) => {
      const value = gain(each);
      return h("span", { class: value > 0 ? "good" : value < 0 ? "bad" : null }, value === null ? NONE : `${value > 0 ? "+" : ""}${number(value, 2)}`);
    } },
  ];
  const differences = found.difference ? ["success", "reward", "env_reward", "turns"].filter((name) => found.difference[name]).map((name) => {
    const value = found.difference[name], way = name === "success" ? percent : number, sure = value.low > 0 || value.high < 0;
    const limits = value.low === null ? "no interval" : `${way(value.low)} to ${way(value.high)}`;
    return h("div", {}, h("dt", {}, `Difference in ${name === "env_reward" ? "the environment's reward" : name}`), h("dd", {}, `${value.mean > 0 ? "+" : ""}${way(value.mean)} `, h("span", { class: "muted small" }, `${limits} on ${found.difference.on}${sure ? "" : ", may be chance"}`)));
  }) : [];
  for (const name of found.difference ? ["fixed", "regressed"] : []) {
    differences.push(h("div", {}, h("dt", {}, `Tasks ${name}`), h("dd", {}, `${count(found.difference[name].length)} `, h("span", { class: "muted small" }, `${number(found.difference[`${name}_by_chance`], 1)} if divided at random`))));
  }
  const options = names.map((name) => [name, name]), trail = key ? [[key, address(`/run/${key}`)], ["Evaluations", address(route.path)]] : [["Evaluations", address(route.path, parameters)]];
  const body = names.length ? [reports,
    h("div", { class: "bar" }, field("From", choice(found.before, options, (value) => { location.hash = link({ before: value }); }, "From")), field("To", choice(found.after, options, (value) => { location.hash = link({ after: value }); }, "To")),
      field("Show", choice(measure, [["success", "success"], ["reward", "reward"]], (value) => { location.hash = link({ measure: value }); }, "Show")), h("dl", { class: "facts inline" }, differences)),
    found.problem ? h("div", { class: "notice" }, found.problem) : null,
    sortable(columns, found.tasks, { sort: parameters.sort ?? "difference", way: parameters.way ?? "up", link, empty: "No task was played." })]
    : h("p", { class: "empty-page" }, "There are no evaluations yet.");
  return { title: `Evaluations of ${runs}`, trail, node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, key ?? "Evaluations")), key ? runTabs(key, "evaluations") : null, body) };
}
