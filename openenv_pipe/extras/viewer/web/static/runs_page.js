// The table of all runs.

import { h, fill, address, sortable, statusMark, number, percent, count, duration, moment, NONE } from "./dom.js";
import { ask } from "./api.js";

const REFRESH_MS = 5000;

export function progressBar(run) {
  if (!run.num_steps) return run.step ? `step ${run.step}` : NONE;
  const share = Math.min(100, (100 * run.step) / run.num_steps);
  return h("span", { class: "progress", title: `${run.stage}, step ${run.step} of ${run.num_steps}` },
    h("i", { style: { "--done": share } }), `${run.step}/${run.num_steps}`);
}

export function tagChips(run) {
  return (run.tags ?? []).map((tag) => h("a", { class: "chip", href: address("/runs", { q: tag }) }, tag));
}

export function interval(value) {
  if (!value) return null;
  const limits = value.low === null ? "" : ` (${percent(value.low)} to ${percent(value.high)})`;
  return `${percent(value.mean)}${limits} on ${value.on}`;
}

// The last part of a folder's path, and the whole name of a model of the hub.
export function modelName(run) {
  if (!/^[./~]/.test(run.model ?? "")) return run.model ?? NONE;
  return h("span", { title: run.model }, run.model.split("/").filter(Boolean).at(-1));
}

function successCell(run) {
  if (!run.success_start && !run.success_trained) return percent(run.success);
  const title = `evaluated before: ${interval(run.success_start) ?? NONE}; trained: ${interval(run.success_trained) ?? NONE}`;
  return h("span", { title }, percent(run.success_start?.mean), " → ", percent(run.success_trained?.mean));
}

function matches(run, words) {
  const text = [run.key, run.status, run.env, run.model, run.loss, run.sweep, run.problem, ...(run.tags ?? [])].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export async function runsPage(route) {
  const { parameters } = route;
  const place = h("div", {}), chosen = new Set((parameters.with ?? "").split(",").filter(Boolean));
  let { runs } = await ask("/runs");
  const link = (changes) => address("/runs", { ...parameters, ...changes });
  const overlay = h("a", { class: "chip" });
  const search = h("input", { type: "search", placeholder: "Filter by name, tag, status, environment, model", value: parameters.q ?? "",
    "aria-label": "Filter", oninput: () => { parameters.q = search.value; history.replaceState(null, "", link({})); draw(); } });

  function pick(key, on) {
    if (on) chosen.add(key); else chosen.delete(key);
    parameters.with = [...chosen].join(",");
    history.replaceState(null, "", link({}));
    showOverlay();
  }

  function showOverlay() {
    overlay.hidden = chosen.size < 2 || chosen.size > 6;
    overlay.textContent = `Overlay ${chosen.size} runs`;
    overlay.href = address("/overlay", { runs: [...chosen].join(",") });
  }

  function draw() {
    const words = (parameters.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
    const columns = [
      { key: "pick", title: "", cell: (run) => h("input", { type: "checkbox", checked: chosen.has(run.key), "aria-label": `Choose ${run.key}`,
        onchange: (event) => pick(run.key, event.target.checked) }), hint: "Choose two to six runs to overlay them" },
      { key: "run", title: "Run", of: (run) => run.key, first: "up", cell: (run) => h("a", { href: address(`/run/${run.key}`) }, run.key) },
      ...(runs.some((run) => run.tags?.length) ? [{ key: "tags", title: "Tags", of: (run) => (run.tags ?? []).join(" ") || null, first: "up", cell: (run) => h("span", { class: "chips" }, tagChips(run)) }] : []),
      { key: "status", title: "Status", of: (run) => run.status, first: "up", cell: (run) => h("span", { title: run.problem }, statusMark(run.status)) },
      { key: "steps", title: "Progress", of: (run) => run.num_steps ? run.step / run.num_steps : null, cell: progressBar },
      { key: "success", title: "Success", class: "num", of: (run) => run.success_trained?.mean ?? run.success, cell: successCell,
        hint: "Evaluated before and after training; while the run trains, that of its last steps" },
      { key: "reward", title: "Reward", class: "num", of: (run) => run.reward, cell: (run) => number(run.reward), hint: "Mean of the last ten steps" },
      { key: "time", title: "Time", class: "num", of: (run) => run.duration_s, cell: (run) => duration(run.duration_s) },
      { key: "left", title: "Left", class: "num optional", of: (run) => run.left_s, cell: (run) => duration(run.left_s) },
      { key: "tokens", title: "Tokens", class: "num", of: (run) => run.num_tokens, cell: (run) => count(run.num_tokens), hint: "Tokens that the model wrote" },
      { key: "env", title: "Environment", class: "optional", of: (run) => run.env, first: "up", cell: (run) => run.env ?? NONE },
      { key: "model", title: "Model", class: "optional", of: (run) => run.model, first: "up", cell: modelName },
      { key: "loss", title: "Loss", class: "optional", of: (run) => run.loss, first: "up", cell: (run) => run.loss ?? NONE },
      { key: "seed", title: "Seed", class: "num optional", of: (run) => run.seed, first: "up", cell: (run) => run.seed ?? NONE },
      { key: "sweep", title: "Sweep", class: "optional", of: (run) => run.sweep, cell: (run) => run.sweep ? h("a", { href: address(`/sweep/${run.sweep}`) }, run.sweep) : NONE },
      { key: "created", title: "Created (UTC)", class: "optional", of: (run) => run.created, cell: (run) => moment(run.created) },
    ];
    const rows = runs.filter((run) => matches(run, words)).sort((a, b) => (b.created ?? 0) - (a.created ?? 0));
    const empty = runs.length ? "No run matches the filter." : "There are no runs here yet: openenv-pipe train conf=echo makes the first.";
    fill(place, sortable(columns, rows, { sort: parameters.sort, way: parameters.way, link, empty }));
  }

  showOverlay();
  draw();
  const timer = setInterval(async () => {
    if (document.hidden || window.bundle) return;
    const found = await ask("/runs").catch(() => null);
    if (found) { runs = found.runs; draw(); }
  }, REFRESH_MS);
  return {
    title: "Runs", trail: [],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, "Runs"), h("span", { class: "grow" }, search), overlay), place),
    end: () => clearInterval(timer),
  };
}
