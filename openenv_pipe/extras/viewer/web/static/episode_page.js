// One episode, a group side by side, a task over the steps of training, and two runs on one task.

import { h, fill, address, sortable, statusMark, number, count, choice, field } from "./dom.js";
import { ask, runPath } from "./api.js";
import { runTabs, facts, termsOf } from "./run_page.js";
import { afterBeginning, beginning, conversation, messages } from "./conversation.js";
import { scoring, tokenView } from "./tokens.js";
import { noteField } from "./notes.js";
import { Chart } from "./charts.js";
import { episodeAddress, episodeColumns, groupAddress, taskAddress, sourceName } from "./episodes_page.js";

const MOST_OF_TASK = 2000; // episodes that the page of a task shows
const VIEW_KEYS = { messages: "m", tokens: "t" };

function placeName(entry) {
  return entry.step === null ? sourceName(entry.source) : entry.step === 0 ? "demonstrations" : `step ${entry.step}`;
}

function memberChips(key, entry, members, more) {
  const at = members.findIndex((each) => each.line === entry.line), keys = new Map([[at + 1, "j"], [at - 1, "k"]]);
  return h("nav", { class: "chips", "aria-label": "Episodes of the group" }, members.map((each, index) =>
    h("a", { class: "chip", "data-key": keys.get(index), href: episodeAddress(key, each, more), "aria-current": each.line === entry.line ? "page" : null, title: `episode ${each.member}: ${each.status}` },
      `${each.member}`, h("b", { class: each.success ? "good" : null }, each.is_scored ? number(each.reward) : each.status))));
}

function partOfGroup({ members, num_members: all }) {
  return members.length < all ? h("p", { class: "muted" }, `${count(members.length)} of the ${count(all)} episodes of the group are shown.`) : null;
}

function headFacts(entry) {
  return facts([
    ["Reward", entry.is_scored ? number(entry.reward) : "none"], ["Success", entry.success ? "yes" : "no"],
    ["Advantage", entry.advantage === null ? null : number(entry.advantage, 2)],
    ...termsOf(entry.reward, entry.terms),
    ["Turns", entry.num_turns], ["Tokens", count(entry.num_tokens)], ["Unusable replies", entry.num_unusable || null],
  ]);
}

export async function episodePage(route, key) {
  const { parameters } = route;
  const found = await ask(`${runPath(key)}/episode`, parameters), { entry } = found;
  const { view = "" } = parameters, isTokens = view === "tokens", body = h("div", {}), keep = { view, colour: isTokens ? parameters.colour : null };
  // A view's key leads to it, and from it back to the conversation.
  const mode = (name, title, shortcut) => h("a", { "data-key": name === view ? null : shortcut ?? VIEW_KEYS[view], href: address(route.path, { ...parameters, view: name }), "aria-current": name === view ? "page" : null }, title);
  if (isTokens) {
    const tokens = await ask(`${runPath(key)}/tokens`, { source: parameters.source, step: parameters.step, line: parameters.line });
    const shown = h("div", {}), draw = (found, kind) => fill(shown, tokenView({ ...tokens, ...found }, kind, (colour) => {
      parameters.colour = colour;
      history.replaceState(null, "", address(route.path, parameters));
    }));
    draw({}, parameters.colour ?? "logprob");
    const which = { source: entry.source, step: entry.step, line: entry.line };
    fill(body, tokens.weights ? scoring(key, which, tokens.weights, (found) => draw(found, "kl")) : null, shown);
  } else fill(body, view === "messages" ? messages(found) : conversation(found));
  const isCut = !isTokens && body.textContent.includes("more characters)");
  return {
    title: `Episode ${entry.group_id} · ${entry.member}`,
    trail: [[key, address(`/run/${key}`)], ["Episodes", address(`/run/${key}/episodes`, { source: parameters.source })], [`${placeName(entry)} · ${entry.member}`, address(route.path, parameters)]],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, entry.task), statusMark(entry.status), h("span", { class: "muted" }, `${placeName(entry)}, seed ${found.task.seed}`),
      h("a", { href: taskAddress(key, entry), "data-key": "o" }, "this task over all steps"), h("a", { href: groupAddress(key, entry), "data-key": "g" }, "the group side by side")),
    headFacts(entry),
    found.skipped ? h("div", { class: "notice" }, `The group was not trained on: ${found.skipped}.`) : null,
    memberChips(key, entry, found.members, keep), partOfGroup(found),
    h("p", {}), await noteField(key, entry), h("nav", { class: "tabs", "aria-label": "View" }, mode("", "Conversation"), mode("messages", "Messages", VIEW_KEYS.messages), mode("tokens", "Tokens", VIEW_KEYS.tokens)),
    isCut ? h("p", { class: "small" }, h("a", { href: address(route.path, { ...parameters, whole: "yes" }) }, "Show long texts whole")) : null, body),
  };
}

export async function groupPage(route, key) {
  const { parameters } = route;
  const found = await ask(`${runPath(key)}/group`, parameters), { members, skipped } = found, first = members[0].entry;
  const advantages = members.map(({ entry }) => entry.advantage).filter((value) => value !== null);
  // What all members were shown at first is shown once.
  const begins = members.map((each) => JSON.stringify([each.first_observation, each.first_images])), isShared = begins.every((each) => each === begins[0]);
  const columns = members.map(({ entry, ...content }) => h("section", { class: "member" },
    h("div", { class: "bar" }, h("h2", {}, h("a", { href: episodeAddress(key, entry) }, `Episode ${entry.member}`)), statusMark(entry.status)),
    facts([["Reward", entry.is_scored ? number(entry.reward) : "none"], ["Advantage", number(entry.advantage, 2)], ["Success", entry.success ? "yes" : "no"],
      ...termsOf(entry.reward, entry.terms)]),
    isShared ? null : beginning(content), afterBeginning(content)));
  return {
    title: `Group ${first.group_id}`,
    trail: [[key, address(`/run/${key}`)], ["Episodes", address(`/run/${key}/episodes`, { source: parameters.source })], [`group ${first.group_id}`, address(route.path, parameters)]],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, first.task), h("span", { class: "muted" }, `group ${first.group_id} of ${sourceName(first.source)}`), h("a", { href: taskAddress(key, first) }, "this task over all steps")),
      skipped ? h("div", { class: "notice" }, `The group was not trained on: ${skipped}.`)
        : advantages.length ? h("p", { class: "muted" }, `Advantages from ${number(Math.min(...advantages), 2)} to ${number(Math.max(...advantages), 2)}.`) : null,
      partOfGroup(found), isShared ? beginning(members[0]) : null, h("div", { class: "columns" }, columns)),
  };
}

// An answer has some of the episodes that are asked for.
async function episodesOfTask(key, query) {
  const found = await ask(`${runPath(key)}/episodes`, query), { episodes, total } = found;
  while (episodes.length < Math.min(total, MOST_OF_TASK)) {
    const next = await ask(`${runPath(key)}/episodes`, { ...query, offset: episodes.length });
    if (!next.episodes.length) break;
    episodes.push(...next.episodes);
  }
  return found;
}

export async function taskPage(route, key) {
  const { parameters } = route, source = parameters.source ?? "train";
  const [found, { runs }] = await Promise.all([
    episodesOfTask(key, { source, task_id: parameters.task, order: "step", way: "up" }), ask("/runs")]);
  const chart = new Chart("Reward of this task's episodes"), steps = new Map();
  for (const each of found.episodes) if (each.is_scored && each.step !== null) steps.set(each.step, [...(steps.get(each.step) ?? []), each.reward]);
  const x = [...steps.keys()], mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const lines = [["mean", mean], ["lowest", (values) => Math.min(...values)], ["highest", (values) => Math.max(...values)]]
    .map(([name, of]) => ({ name, x, y: x.map((step) => of(steps.get(step))) }));
  // Each with its run and its source: this run's other evaluations, its last step beside its first, and other runs.
  const evaluations = source === "train" ? [] : Object.keys(found.choices.sources).filter((name) => name !== "train" && name !== source);
  const others = [...evaluations.map((name) => [key, name, sourceName(name)]), ...(x.length > 1 ? [[key, source, "this run: first and last step"]] : []),
    ...runs.filter((run) => run.key !== key && run.status !== "unreadable").map((run) => [run.key, source, run.key])];
  const beside = ([run, its]) => { location.hash = address("/same", { runs: `${key},${run}`, source: `${source},${its}`, task: parameters.task }); };
  return {
    title: `Task ${parameters.task}`, trail: [[key, address(`/run/${key}`)], ["Tasks", address(`/run/${key}/tasks`, { source: parameters.source })], [parameters.task, address(route.path, parameters)]],
    end: () => chart.end(), shown: () => { if (x.length > 1) chart.update(lines); },
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, parameters.task), h("span", { class: "muted" }, `${count(found.total)} episodes of ${sourceName(source)}`),
      others.length ? field("Beside the same task of", choice("", [["", "choose"], ...others.map(([, , name], index) => [String(index), name])], (index) => beside(others[index]), "Beside")) : null),
    runTabs(key, "tasks"), found.episodes.length < found.total ? h("div", { class: "notice" }, `The chart and the table have the first ${count(found.episodes.length)} of these episodes.`) : null,
    x.length > 1 ? chart.node : null, h("p", {}),
    sortable(episodeColumns(key), found.episodes, { sort: "step", way: "up", link: () => address(route.path, parameters), empty: "The run has played no such task." })),
  };
}

// The last episodes of one task in two runs or evaluations, or the first and the last of one run; where their texts differ is marked.
export async function samePage(route) {
  const { parameters } = route, keys = parameters.runs.split(",").slice(0, 2), sources = (parameters.source ?? "train").split(",");
  const found = await Promise.all(keys.map(async (key, index) => {
    const source = sources[index] ?? sources[0], way = keys[0] === keys[1] && index === 0 ? "up" : "down";
    const { episodes } = await ask(`${runPath(key)}/episodes`, { source, task_id: parameters.task, order: "step", way });
    if (!episodes.length) return { key, episodes };
    const line = parameters[`episode_${index}`], entry = episodes.find((each) => `${each.step}:${each.line}` === line) ?? episodes[0];
    return { key, episodes, ...(await ask(`${runPath(key)}/episode`, { source, step: entry.step, line: entry.line })) };
  }));
  const columns = found.map((each, index) => {
    if (!each.entry) return h("section", {}, h("h2", {}, each.key), h("p", { class: "muted" }, "This run has not played the task."));
    const other = found[1 - index], options = each.episodes.map((one) => [`${one.step}:${one.line}`, `${placeName(one)}, ${one.is_scored ? `reward ${number(one.reward)}` : "no reward"}`]);
    return h("section", { class: "member" }, h("div", { class: "bar" }, h("h2", {}, h("a", { href: episodeAddress(each.key, each.entry) }, each.key)), statusMark(each.entry.status),
      choice(`${each.entry.step}:${each.entry.line}`, options, (value) => { location.hash = address(route.path, { ...parameters, [`episode_${index}`]: value }); }, "Episode")),
    headFacts(each.entry), conversation(each, other.entry ? other : undefined));
  });
  return {
    title: `Task ${parameters.task} twice`, trail: [[keys[0], address(`/run/${keys[0]}`)], [`${parameters.task} twice`, address(route.path, parameters)]],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, parameters.task), h("span", { class: "muted" }, "Marked texts differ from the other episode's.")), h("div", { class: "columns" }, columns)),
  };
}
