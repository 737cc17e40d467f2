// The tokens of an episode, coloured by what is known of each, with all numbers on hover. A checkpoint of the run can score them.

import { h, fill, number, percent, count, choice, field, NONE } from "./dom.js";
import { send, runPath } from "./api.js";

const KINDS = [
  ["logprob", "logprob of the sampler"], ["advantage", "advantage"], ["mask", "loss mask"], ["version", "policy version"],
  ["entropy", "entropy"], ["mismatch", "mismatch of sampler and trainer"], ["kl", "KL from the start"],
];
const LOWEST = -6; // a logprob with the strongest colour
const VERSIONS = 6;

function colouring(kind, tokens) {
  const most = Math.max(1e-9, ...tokens.advantage.map((value) => Math.abs(value ?? 0)));
  const largest = Math.max(1e-9, ...(tokens[kind] ?? []).map((value) => typeof value === "number" ? Math.abs(value) : 0));
  const versions = [...new Set(tokens.version.filter((value) => value !== null))];
  return {
    logprob: (index) => tokens.logprob[index] === null ? null : ["--hot", Math.min(1, tokens.logprob[index] / LOWEST)],
    advantage: (index) => tokens.advantage[index] === null ? null : [tokens.advantage[index] < 0 ? "--minus" : "--plus", Math.abs(tokens.advantage[index]) / most],
    mask: (index) => tokens.mask[index] ? ["--plus", 0.45] : null,
    version: (index) => tokens.version[index] === null ? null : [`--line-${versions.indexOf(tokens.version[index]) % VERSIONS}`, 0.5],
  }[kind] ?? ((index) => tokens[kind]?.[index] == null ? null : ["--hot", Math.abs(tokens[kind][index]) / largest]);
}

function scaleOf(kind, tokens) {
  const ramp = (from, to, low, high) => h("span", { class: "ramp" }, low, h("i", { style: { "--from": from, "--to": to } }), high);
  if (kind === "logprob") return ramp("transparent", "var(--hot)", "probable (0)", `improbable (${LOWEST})`);
  if (kind === "advantage") {
    const known = tokens.advantage.filter((value) => value !== null), most = Math.max(0, ...known.map(Math.abs));
    return known.length ? ramp("var(--minus)", "var(--plus)", number(-most, 2), number(most, 2)) : h("span", { class: "muted small" }, "This episode was not trained on, so it has no advantage.");
  }
  if (kind === "mask") return h("span", { class: "muted small" }, "Coloured tokens are those of the model that training learns from.");
  if (kind === "version") return h("span", { class: "muted small" }, `Versions of the weights: ${[...new Set(tokens.version.filter((value) => value !== null))].join(" | ") || NONE}`);
  return ramp("transparent", "var(--hot)", "0", "the largest");
}

function shownText(text) {
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function tipOf(tokens, index) {
  const rows = [
    ["token", tokens.texts ? JSON.stringify(tokens.texts[index]) : NONE], ["id", tokens.ids[index]], ["position", index], ["turn", tokens.turn[index]],
    ["loss mask", tokens.mask[index] ? "1, of the model" : tokens.logprob[index] === null ? "0, from the environment" : "0, of a turn that is not trained"],
    ["logprob", tokens.logprob[index] === null ? null : number(tokens.logprob[index], 4)],
    ["probability", tokens.logprob[index] === null ? null : number(Math.exp(tokens.logprob[index]), 4)],
    ["advantage", tokens.advantage[index] === null ? null : number(tokens.advantage[index], 4)],
    ["policy version", tokens.version[index]], ["entropy", tokens.entropy?.[index] == null ? null : number(tokens.entropy[index], 4)], ["mismatch", tokens.mismatch?.[index] == null ? null : number(tokens.mismatch[index], 4)],
    ["logprob, scored", tokens.scored?.[index] == null ? null : number(tokens.scored[index], 4)], ["KL from the start", tokens.kl?.[index] == null ? null : number(tokens.kl[index], 4)],
    ...(tokens.top?.[index] ?? []).map(([text, share], rank) => [`${rank + 1}. ${tokens.texts ? JSON.stringify(text) : text}`, share < 0.0005 ? "< 0.1 %" : percent(share)]),
  ];
  return h("table", {}, rows.filter(([, value]) => value !== null).map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value))));
}

function weightsName(name) {
  return name === "start" ? "the untrained weights" : `the checkpoint of step ${name}`;
}

// What has the server score the tokens by a checkpoint. which: where the episode is; scored: takes what is known of each token then.
export function scoring(key, which, { wrote, kept }, scored) {
  const isThere = kept.includes(wrote), note = h("span", { class: "muted small", role: "status" });
  let chosen = isThere ? wrote : kept[0];
  const button = h("button", { type: "button", onclick: async () => {
    button.disabled = true;
    fill(note, "Loading the checkpoint and scoring the tokens …");
    try {
      const found = await send(`${runPath(key)}/scores`, { ...which, checkpoint: chosen });
      fill(note, `By ${weightsName(chosen)}, at temperature ${number(found.temperature)} and without top_p, top_k and min_p; KL from ${found.start === "untrained" ? "the untrained weights" : found.start}.`);
      scored(found);
    } catch (error) { fill(note, h("span", { class: "bad" }, error.message)); }
    button.disabled = false;
  } }, "Show alternatives and KL");
  const select = choice(chosen, kept.map((name) => [name, `${weightsName(name)}${name === wrote ? ", which wrote this" : ""}`]), (value) => { chosen = value; }, "Score by");
  if (!isThere && wrote !== null) fill(note, `${weightsName(wrote)[0].toUpperCase()}${weightsName(wrote).slice(1)}, which wrote this, is gone; choose another to see what it would write.`);
  return h("div", { class: "bar" }, field("Score by", select), button, note);
}

// Returns the view; `kind` is what colours, `changed` is told of another choice.
export function tokenView(tokens, kind, changed) {
  const tip = h("div", { class: "tip", hidden: true }), place = h("div", {}), scale = h("span", {});
  const known = KINDS.filter(([name]) => tokens[name] !== undefined), unknown = KINDS.filter(([name]) => name !== "kl" && tokens[name] === undefined);
  let chosen = known.some(([name]) => name === kind) ? kind : "logprob";
  const spans = [];

  function paint() {
    const colour = colouring(chosen, tokens);
    spans.forEach((span, index) => {
      const found = colour(index);
      span.style.setProperty("--tone", found ? `var(${found[0]})` : "transparent");
      span.style.setProperty("--heat", found ? found[1].toFixed(3) : 0);
    });
    fill(scale, scaleOf(chosen, tokens));
  }

  const show = (event) => {
    const span = event.target.closest("[data-token]");
    tip.hidden = !span;
    if (!span) return;
    const index = Number(span.dataset.token);
    fill(tip, tipOf(tokens, index));
    const box = event.target.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${box.bottom + 6 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
  };
  const turns = new Map();
  tokens.ids.forEach((id, index) => {
    const span = h("span", { "data-token": index, class: tokens.mask[index] ? "model" : "env" }, tokens.texts ? shownText(tokens.texts[index]) : `${id} `);
    spans.push(span);
    if (!turns.has(tokens.turn[index])) turns.set(tokens.turn[index], h("div", { class: "tokens" }));
    turns.get(tokens.turn[index]).append(span);
  });
  for (const [turn, node] of turns) place.append(h("article", { class: "turn" }, h("header", {}, h("h2", {}, `Turn ${turn}`)), node));
  place.addEventListener("mouseover", show);
  place.addEventListener("click", show);
  place.addEventListener("mouseleave", () => { tip.hidden = true; });
  paint();
  return h("div", {}, h("div", { class: "bar" },
    field("Colour by", choice(chosen, known, (value) => { chosen = value; changed(value); paint(); }, "Colour by")), scale,
    unknown.length ? h("span", { class: "muted small" }, `Not recorded: ${unknown.map(([, title]) => title).join(", ")}.`) : null),
  tokens.problem ? h("div", { class: "notice" }, tokens.problem) : null,
  tokens.num_more ? h("div", { class: "notice" }, `${count(tokens.num_more)} more tokens are not shown.`) : null, place, tip);
}
