// An episode as a conversation: observation, reply, action, what followed, and the numbers of each turn.

import { h, number, count } from "./dom.js";

// Where two texts begin to differ, at the beginning of a word.
function split(text, other) {
  let index = 0;
  while (index < text.length && index < other.length && text[index] === other[index]) index++;
  while (index > 0 && /\S/.test(text[index - 1])) index--;
  return [text.slice(0, index), text.slice(index)];
}

function words(text, other) {
  if (other === undefined || other === text) return h("p", { class: "text" }, text || "(nothing)");
  const [same, rest] = split(text, other);
  return h("p", { class: "text" }, same, h("span", { class: "changed", title: "Differs from the other episode" }, rest || "(ends here)"));
}

// The fields of an observation; those that have changed since the one before are marked.
export function fields(observation, before, other) {
  const entries = Object.entries(observation);
  if (!entries.length) return h("p", { class: "text muted" }, "(empty)");
  if (entries.length === 1) return words(entries[0][1], other && Object.keys(other).length === 1 ? Object.values(other)[0] : undefined);
  return h("dl", { class: "fields" }, entries.map(([name, text]) => {
    const isChanged = !other && before && before[name] !== text;
    const differs = other && other[name] !== text;
    return [h("dt", {}, name), h("dd", { class: "text" }, h("span", { class: isChanged || differs ? "changed" : null, title: differs ? "Differs from the other episode" : isChanged ? "Changed by this turn" : null }, text))];
  }));
}

// The images of an observation; addresses are the server's or the bundle's own.
function images(found) {
  if (!found?.length) return null;
  return h("p", { class: "images" }, found.map(({ address, size }) => h("img", { src: address, alt: size, title: size, loading: "lazy" })));
}

export function said(kind, title, ...content) {
  return h("div", { class: `said ${kind}` }, h("h3", {}, title), content);
}

function numbersOf(turn, index) {
  const pairs = [
    ["reward", turn.steps.length ? number(turn.steps.reduce((sum, step) => sum + step.reward, 0)) : null],
    ["credited", turn.turn_reward === null ? null : number(turn.turn_reward)],
    ["advantage", turn.advantage === null ? null : number(turn.advantage, 2)],
    ["tokens", `${count(turn.num_prompt_tokens)} + ${count(turn.num_completion_tokens)}`],
    ["policy", turn.policy_versions.length ? turn.policy_versions.join(", ") : null],
    ["ended", turn.finish === "length" ? "cut off" : null],
  ];
  return h("header", {}, h("h2", {}, `Turn ${index + 1}`), turn.branch ? h("span", { class: "bad" }, turn.branch) : null, pairs.filter(([, value]) => value !== null).map(([name, value]) => h("span", {}, name, " ", h("b", {}, value))));
}

export function beginning(content, other) {
  return h("article", { class: "turn" }, h("header", {}, h("h2", {}, "Beginning")),
    said("env", "Observation", fields(content.first_observation, null, other?.first_observation), images(content.first_images)));
}

// other: the same part of another run's episode, to mark what differs. beside: who gave the reply of a turn, and parts beside it.
export function conversation(content, other, beside) {
  return [beginning(content, other), afterBeginning(content, other, beside)];
}

export function afterBeginning(content, other, beside = () => ["", []]) {
  let seen = content.first_observation;
  const turns = content.turns.map((turn, index) => {
    const its = other?.turns[index], [by, more] = beside(index);
    const parts = [h("div", { class: "beside" }, said("model", `Reply${by}`, words(turn.reply, other ? its?.reply ?? "" : undefined)), more)];
    turn.steps.forEach((step, which) => {
      const title = turn.steps.length > 1 ? ` ${which + 1}` : "";
      if (!(Object.keys(step.action).length === 1 && Object.values(step.action)[0] === turn.reply)) parts.push(said("", `Action${title}`, fields(step.action)));
      parts.push(said("env", [h("span", {}, `Observation${title}`), turn.steps.length > 1 ? h("span", {}, `reward ${number(step.reward)}`) : null],
        fields(step.observation, seen, its?.steps[which]?.observation), images(step.images)));
      seen = step.observation;
    });
    if (turn.unusable) parts.push(said("wrong", "Could not be used", h("p", { class: "text" }, turn.unusable)));
    return h("article", { class: "turn", id: `turn-${index + 1}` }, numbersOf(turn, index), parts);
  });
  const end = content.error || content.unscored
    ? h("article", { class: "turn" }, said("wrong", content.error ? "Failed" : "Has no reward", h("p", { class: "text" }, content.error ?? content.unscored))) : null;
  const judged = Object.entries(content.judgements).map(([name, text]) => h("article", { class: "turn" }, said("", `Judge on ${name}`, h("p", { class: "text" }, text))));
  const ended = content.exit_code == null ? null : h("p", { class: "text" }, `The program ended with exit code ${content.exit_code}.`);
  const output = ended || content.output || content.notes?.length
    ? h("article", { class: "turn" }, content.notes.map((note) => h("p", { class: "text" }, note)), ended, content.output ? said("", "Output of the program", h("pre", { class: "text" }, content.output)) : null) : null;
  return [turns, end, output, judged];
}
