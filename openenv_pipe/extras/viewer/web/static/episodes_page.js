// The list of a run's episodes, with filters; and its tasks.

import { h, fill, address, sortable, statusMark, number, percent, count, choice, field, NONE } from "./dom.js";
import { ask, listen, runPath } from "./api.js";
import { runTabs } from "./run_page.js";
import { noteOf, notesOf } from "./notes.js";

const PAGE = 200;
const WAIT_MS = 350; // after the last key, before a text is searched for
const CELLS = 40; // of the heat map, in each row
const YES_NO = [["", "any"], ["yes", "yes"], ["no", "no"]];

export function episodeAddress(key, entry, more = {}) {
  return address(`/run/${key}/episode`, { source: entry.source === "train" ? null : entry.source, step: entry.step, line: entry.line, ...more });
}

export function groupAddress(key, entry) {
  return address(`/run/${key}/group`, { source: entry.source === "train" ? null : entry.source, step: entry.step, group: entry.group_id });
}

export function taskAddress(key, entry) {
  return address(`/run/${key}/task`, { source: entry.source === "train" ? null : entry.source, task: entry.task });
}

export function sourceName(source) {
  return source === "train" ? "training" : `evaluation ${source.replace("eval/", "")}`;
}

export function episodeColumns(key, term, notes = {}) {
  return [
    { key: "step", title: "Step", class: "num", order: true, cell: (each) => each.step ?? NONE },
    { key: "task", title: "Task", cell: (each) => h("a", { href: taskAddress(key, each) }, each.task) },
    { key: "group", title: "Group", class: "optional", cell: (each) => h("a", { href: groupAddress(key, each) }, `${each.group_id} · ${each.member}`) },
    { key: "status", title: "Status", cell: (each) => h("span", { title: each.error }, statusMark(each.status)) },
    { key: "success", title: "Success", cell: (each) => each.success ? h("span", { class: "good" }, "yes") : "no" },
    { key: "reward", title: "Reward", class: "num", order: true, cell: (each) => h("a", { href: episodeAddress(key, each) }, each.is_scored ? number(each.reward) : "none") },
    term ? { key: "term", title: term, class: "num", cell: (each) => number(each.terms[term]) } : null,
    { key: "advantage", title: "Advantage", class: "num optional", order: true, cell: (each) => number(each.advantage, 2) },
    { key: "turns", title: "Turns", class: "num optional", order: true, cell: (each) => each.num_turns },
    { key: "tokens", title: "Tokens", class: "num optional", order: true, cell: (each) => count(each.num_tokens) },
    { key: "marks", title: "", class: "optional", cell: (each) => [each.is_truncated ? "cut " : "", each.num_unusable ? `${each.num_unusable} unusable ` : "", noteOf(notes, each) ? h("span", { title: noteOf(notes, each) }, "note") : null] },
    { key: "preview", title: "Last reply", class: "line", cell: (each) => h("a", { href: episodeAddress(key, each), class: "muted mono" }, each.error ?? each.preview) },
  ].filter(Boolean);
}

// Bars of rewards. A click on a bar keeps its episodes; another click on it keeps all again.
function bars(histogram, parameters, link) {
  if (!histogram) return null;
  const { low, high, counts } = histogram, most = Math.max(...counts), width = (high - low) / counts.length;
  const isChosen = (from) => parameters.reward_from === String(from);
  const buttons = counts.map((size, index) => {
    const from = low + index * width, isLast = index === counts.length - 1;
    const bounds = isChosen(from)
      ? { reward_from: null, reward_below: null, reward_to: null }
      : { reward_from: from, reward_below: isLast ? null : low + (index + 1) * width, reward_to: isLast ? high : null };
    const title = `${number(from)} to ${number(isLast ? high : low + (index + 1) * width)}: ${size} episodes`;
    return h("button", { type: "button", title, "aria-label": title, "aria-pressed": String(isChosen(from)), class: [isChosen(from) ? "on" : "", size ? "" : "empty"].join(" "),
      onclick: () => { location.hash = link({ ...bounds, offset: null }); } }, h("i", { style: { "--share": size ? Math.max(0.04, size / most) : 0 } }));
  });
  const any = counts.some((_, index) => isChosen(low + index * width));
  const middle = parameters.reward_from ? h("a", { href: link({ reward_from: null, reward_below: null, reward_to: null, offset: null }) }, "all rewards") : h("span", {}, parameters.reward_term || "reward");
  return h("div", {}, h("div", { class: `histogram${any ? " chosen" : ""}`, role: "group", "aria-label": "Episodes by reward" }, buttons),
    h("div", { class: "scale" }, h("span", {}, number(low)), middle, h("span", {}, number(high))));
}

export async function episodesPage(route, key) {
  const { parameters } = route;
  const results = h("div", {}), filters = h("div", { class: "bar" }), note = h("span", { class: "muted" });
  const file = window.bundle ? null : h("a", { download: "", title: "The episodes that match the filters, each as a line of JSON" }, "save");
  const link = (changes) => address(route.path, { ...parameters, ...changes });
  const set = (changes) => { location.hash = link({ ...changes, offset: null }); };
  let timer = null, asked = 0;

  const search = h("input", { type: "search", placeholder: "Search observations, replies, errors and verdicts", value: parameters.text ?? "", "aria-label": "Search text",
    oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        parameters.text = search.value;
        delete parameters.offset;
        history.replaceState(null, "", link({}));
        load().catch(() => {});
      }, WAIT_MS);
    } });
  const textField = (name, label, type, width) => field(label, h("input", { type, value: parameters[name] ?? "", "aria-label": label, size: width,
    onchange: (event) => set({ [name]: event.target.value }) }));

  function drawFilters(choices) {
    const { sources, statuses, terms } = choices;
    const named = Object.entries(sources).map(([name, size]) => [name === "train" ? "" : name, `${sourceName(name)} (${count(size)})`]);
    fill(filters,
      field("Episodes of", choice(parameters.source, named.length ? named : [["", "training"]], (value) => set({ source: value }), "Episodes of")),
      parameters.source ? null : field("Steps", h("span", { class: "pair" },
        h("input", { type: "number", min: 0, value: parameters.first_step ?? "", "aria-label": "First step", onchange: (event) => set({ first_step: event.target.value }) }), "to",
        h("input", { type: "number", min: 0, value: parameters.last_step ?? "", "aria-label": "Last step", onchange: (event) => set({ last_step: event.target.value }) }))),
      textField("task", "Task contains", "search", 10),
      field("Status", choice(parameters.status, [["", "any"], ...Object.entries(statuses).map(([name, size]) => [name, `${name} (${count(size)})`])], (value) => set({ status: value }), "Status")),
      field("Success", choice(parameters.success, YES_NO, (value) => set({ success: value }), "Success")),
      field("Has a reward", choice(parameters.is_scored, YES_NO, (value) => set({ is_scored: value }), "Has a reward")),
      field("Cut off", choice(parameters.is_truncated, YES_NO, (value) => set({ is_truncated: value }), "Cut off")),
      field("Unusable replies", choice(parameters.has_unusable, YES_NO, (value) => set({ has_unusable: value }), "Unusable replies")),
      terms.length > 1 ? field("Bars show", choice(parameters.reward_term, [["", "reward"], ...terms.map((name) => [name, name])],
        (value) => set({ reward_term: value, reward_from: null, reward_below: null, reward_to: null })), "Bars show") : null);
  }

  async function load() {
    const mine = ++asked;
    const found = await ask(`${runPath(key)}/episodes`, parameters);
    if (mine !== asked) return;
    drawFilters(found.choices);
    const offset = Number(parameters.offset ?? 0);
    note.textContent = `${count(found.total)} episodes`;
    if (file) file.href = `api${runPath(key)}/export?${new URLSearchParams(Object.entries(parameters).filter(([, value]) => value))}`;
    const pages = found.total > PAGE ? h("div", { class: "pages" },
      offset > 0 ? h("a", { href: link({ offset: offset - PAGE || null }) }, "← before") : null,
      `${offset + 1} to ${Math.min(offset + PAGE, found.total)} of ${count(found.total)}`,
      offset + PAGE < found.total ? h("a", { href: link({ offset: offset + PAGE }) }, "next →") : null) : null;
    fill(results, found.choices.problems.map((problem) => h("div", { class: "notice bad" }, problem)),
      bars(found.histogram, parameters, link),
      sortable(episodeColumns(key, parameters.reward_term, notes), found.episodes, {
        sort: parameters.order ?? "step", way: parameters.way ?? "up", empty: "No episode matches the filters.",
        link: ({ sort, way }) => link({ order: sort, way, offset: null }) }), pages);
  }

  const { notes } = await notesOf(key);
  await load();
  const stop = listen(runPath(key), () => load().catch(() => {}));
  return {
    title: `Episodes of ${key}`, trail: [[key, address(`/run/${key}`)], ["Episodes", address(route.path)]], end: () => { stop(); clearTimeout(timer); },
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, key), note, file, h("span", { class: "grow" }, search)), runTabs(key, "episodes"), filters, results),
  };
}

// Return what draws a task's steps as cells that are the darker the higher the reward, so that the rows are a heat map.
function heatMap(tasks) {
  const played = tasks.flatMap((task) => task.steps), steps = played.map(([step]) => step), rewards = played.map(([, reward]) => reward);
  if (!played.length) return null;
  const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
  const [first, last, low, high] = [least(steps), most(steps), least(rewards), most(rewards)], width = Math.ceil((last - first + 1) / CELLS), size = Math.ceil((last - first + 1) / width);
  const title = `Mean reward in steps ${first} to ${last}, ${width} in a cell: from ${number(low)} (light) to ${number(high)} (dark); blank where the task was not played`;
  const draw = (task) => {
    const cells = Array.from({ length: size }, () => []);
    for (const [step, reward] of task.steps) cells[Math.floor((step - first) / width)].push(reward);
    const stops = cells.map((values, index) => {
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length, share = high > low ? 10 + 90 * (mean - low) / (high - low) : 55;
      return `${values.length ? `color-mix(in srgb, var(--accent) ${share.toFixed(0)}%, var(--panel))` : "transparent"} ${100 * index / size}% ${100 * (index + 1) / size}%`;
    });
    return h("span", { class: "heat", title: task.steps.map(([step, reward]) => `step ${step}: ${number(reward)}`).slice(0, CELLS).join(", "), style: { background: `linear-gradient(90deg, ${stops.join(", ")})` } });
  };
  return { title, draw };
}

export async function tasksPage(route, key) {
  const { parameters } = route;
  const [tasks, { choices }] = await Promise.all([ask(`${runPath(key)}/tasks`, parameters), ask(`${runPath(key)}/episodes`, { source: parameters.source })]);
  const link = (changes) => address(route.path, { ...parameters, ...changes });
  const sources = Object.keys(choices.sources).map((name) => [name === "train" ? "" : name, sourceName(name)]), heat = heatMap(tasks);
  const columns = [
    { key: "task", title: "Task", of: (each) => each.task, first: "up", cell: (each) => h("a", { href: taskAddress(key, { task: each.task, source: parameters.source ?? "train" }) }, each.task) },
    { key: "reward", title: "Mean reward", class: "num", of: (each) => each.reward, first: "up", cell: (each) => number(each.reward) },
    { key: "success", title: "Success", class: "num", of: (each) => each.success, first: "up", cell: (each) => percent(each.success) },
    { key: "episodes", title: "Episodes", class: "num", of: (each) => each.num_episodes, cell: (each) => count(each.num_episodes) },
    heat ? { key: "steps", title: "Reward over the steps", hint: heat.title, class: "steps optional", cell: heat.draw } : null,
  ].filter(Boolean);
  return {
    title: `Tasks of ${key}`, trail: [[key, address(`/run/${key}`)], ["Tasks", address(route.path)]],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, key)), runTabs(key, "tasks"),
      h("div", { class: "bar" }, field("Episodes of", choice(parameters.source, sources, (value) => { location.hash = link({ source: value }); }, "Episodes of")),
        h("span", { class: "muted small" }, "The tasks with the lowest mean reward, at most 1,000. ", heat ? `${heat.title}.` : null)),
      sortable(columns, tasks, { sort: parameters.sort, way: parameters.way, link, empty: "No episodes yet." })),
  };
}
