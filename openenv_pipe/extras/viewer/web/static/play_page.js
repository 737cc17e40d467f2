// Play a checkpoint in its environment: at each turn the model replies, or the person does.

import { h, fill, address, number, choice, field } from "./dom.js";
import { ask, listen, oneAtATime, runPath, send } from "./api.js";
import { runTabs, facts, termsOf } from "./run_page.js";
import { conversation, said } from "./conversation.js";

const BUSY = { starting: "Starting", working: "Waiting for the model and the environment" };
const SPLITS = [["eval", "evaluation"], ["train", "training"]];

function scriptedParts(replies, use) {
  return Object.entries(replies ?? {}).map(([name, text]) => said("scripted",
    [h("span", {}, `Scripted policy: ${name}`), use ? h("button", { type: "button", class: "quiet", onclick: () => use(text) }, "Use it") : null],
    h("p", { class: "text" }, text || "(nothing)")));
}

function result(state) {
  const { episode } = state;
  return facts([["Reward", episode.reward === null ? "none" : number(episode.reward)], ["Success", episode.success ? "yes" : "no"], ["Ended", episode.status],
    ...termsOf(episode.reward, episode.reward_terms)]);
}

export async function playPage(route, key) {
  const { parameters } = route, run = await ask(runPath(key));
  const place = h("div", {}), turns = h("div", {}), controls = h("div", {}), problem = h("div", { class: "notice bad", hidden: true, role: "alert" });
  const index = h("input", { type: "number", min: 0, value: parameters.index ?? "0", "aria-label": "Task" });
  const written = h("textarea", { rows: 3, "aria-label": "Your reply", placeholder: "Your reply, as the model would write it" });
  const chosen = { checkpoint: parameters.checkpoint ?? "", split: parameters.split ?? "eval" };
  let state = await ask("/play"), isOpen = true;

  const refresh = oneAtATime(async () => {
    const found = await ask("/play").catch(() => null);
    if (found && isOpen) { state = found; draw(); }
  });

  // The answer is left unread: it may arrive after the news of what the session did next.
  async function act(path, content) {
    problem.hidden = true;
    try { await send(path, content); } catch (error) { fill(problem, error.message); problem.hidden = false; return; }
    await refresh();
  }

  function start() {
    Object.assign(parameters, chosen, { index: index.value });
    history.replaceState(null, "", address(route.path, parameters));
    return act("/play/start", { run: key, ...chosen, index: Number(index.value) });
  }

  function startForm(title) {
    const checkpoints = [["", "newest"], ...(run.checkpoints.length > 1 ? [["best", "best"]] : []), ...run.checkpoints.map((step) => [step, `step ${step}`]), ["start", "untrained"]];
    const isOver = state.status === "over" && state.run === key;
    return h("div", { class: "bar" },
      isOver ? null : field("Checkpoint", choice(chosen.checkpoint, checkpoints, (value) => { chosen.checkpoint = value; }, "Checkpoint")),
      field("Tasks of", choice(chosen.split, SPLITS, (value) => { chosen.split = value; }, "Tasks of")), field("Task", index),
      h("button", { type: "button", class: "main", onclick: start }, title),
      isOver ? h("button", { type: "button", onclick: () => act("/play/end") }, "End") : null);
  }

  function replyForm() {
    const use = (text) => { written.value = text; written.focus(); };
    return h("section", { class: "turn" }, h("header", {}, h("b", {}, `Turn ${state.episode.turns.length + 1} of at most ${state.max_turns}`)),
      h("div", { class: "beside" }, scriptedParts(state.scripted.at(-1), use)),
      said("model", "Who replies?", written, h("div", { class: "bar" },
        h("button", { type: "button", class: "main", "data-key": "m", onclick: () => act("/play/reply", { text: null }) }, "The model"),
        h("button", { type: "button", onclick: () => { act("/play/reply", { text: written.value }); written.value = ""; } }, "Me, with this text"),
        h("button", { type: "button", class: "quiet", onclick: () => act("/play/end") }, "End"))));
  }

  function draw() {
    const isMine = state.run === key, isGoing = state.status && state.status !== "ended";
    if (isGoing && !isMine) {
      fill(turns);
      fill(controls, h("p", { class: "notice" }, "A session with ", h("a", { href: address(`/run/${state.run}/play`) }, state.run), " is still open, and a viewer has one at a time. "),
        h("button", { type: "button", onclick: () => act("/play/end") }, "End it"));
      return;
    }
    if (state.episode && isMine) {
      fill(turns, h("p", { class: "muted small" }, `${state.model}, ${state.split} task ${state.index}`),
        h("details", {}, h("summary", {}, "What the model is told at first"), state.opening.map((each) => said("", each.role, h("p", { class: "text" }, each.content)))),
        conversation(state.episode, undefined, (at) => [` by ${state.authors[at]}`, scriptedParts(state.scripted[at])]),
        ["over", "ended"].includes(state.status) ? result(state) : null);
    } else fill(turns);
    const busy = BUSY[state.status];
    if (busy) fill(controls, h("p", { class: "notice", role: "status" }, `${busy} … ${state.note} `, h("button", { type: "button", onclick: () => act("/play/end") }, "End")));
    else if (state.status === "choosing") fill(controls, replyForm());
    else fill(controls, isMine && state.note ? h("p", { class: "notice", role: "status" }, `${state.note[0].toUpperCase()}${state.note.slice(1)}.`) : null, startForm(state.status === "over" ? "Play this task" : "Start"));
  }

  fill(place, problem, turns, controls);
  draw();
  const stop = listen("/play", refresh);
  return {
    title: `Play ${key}`, trail: [[key, address(`/run/${key}`)], ["Play", address(route.path, parameters)]],
    node: h("div", {}, h("div", { class: "bar" }, h("h1", {}, `Play ${key}`)), runTabs(key, "play"), place),
    end: () => { isOpen = false; stop(); },
  };
}
