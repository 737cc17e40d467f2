// An episode as a conversation: observation, reply, action, what followed, and the numbers of each turn.

import { h, number, count } from "./dom.js";

const WORDS = /\s+|[\p{L}\p{M}\p{N}_]+|[^\s\p{L}\p{M}\p{N}_]/gu;
const MOST_PAIRS = 1_000_000; // of words that are compared; beyond it, all between the common beginning and end differs

// The indices of the words of a longest common subsequence, as pairs.
function common(mine, its) {
  const found = [], width = its.length + 1;
  if (mine.length * its.length > MOST_PAIRS) return found;
  const lengths = new Uint32Array((mine.length + 1) * width); // of what is common from two indices on
  for (let i = mine.length - 1; i >= 0; i--) {
    for (let j = its.length - 1; j >= 0; j--) {
      lengths[i * width + j] = mine[i] === its[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < mine.length && j < its.length;) {
    if (mine[i] === its[j]) found.push([i++, j++]);
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}

// A text in pieces, each with whether it differs from the other text; an empty one is where the other has more.
export function difference(text, other) {
  const mine = text.match(WORDS) ?? [], its = other.match(WORDS) ?? [], shorter = Math.min(mine.length, its.length);
  let start = 0, end = 0;
  while (start < shorter && mine[start] === its[start]) start++;
  while (end < shorter - start && mine.at(-1 - end) === its.at(-1 - end)) end++;
  const rest = mine.length - end, pieces = [mine.slice(0, start).join("")]; // equal and different ones in turns
  let [i, j] = [start, start];
  for (const [x, y] of [...common(mine.slice(start, rest), its.slice(start, its.length - end)).map(([a, b]) => [a + start, b + start]), [rest, its.length - end]]) {
    const last = pieces.length - 1, word = x < rest ? mine[x] : "";
    if (x === i && y === j) pieces[last] += word;
    // Only a space is common between two words that differ.
    else if (last > 1 && !pieces[last].trim() && pieces[last - 1] && x > i) pieces.splice(last - 1, 2, pieces[last - 1] + pieces[last] + mine.slice(i, x).join(""), word);
    else pieces.push(mine.slice(i, x).join(""), word);
    [i, j] = [x + 1, y + 1];
  }
  pieces[pieces.length - 1] += mine.slice(rest).join("");
  return pieces.map((piece, index) => [piece, index % 2 === 1]).filter(([piece, differs]) => piece || differs);
}

function marked(text, other) {
  return difference(text, other).map(([piece, differs]) => !differs ? piece
    : h("span", { class: piece ? "changed" : "lacking", title: piece ? "Differs from the other episode" : "The other episode has more here" }, piece));
}

function words(text, other) {
  if (text && other !== undefined) return h("p", { class: "text" }, marked(text, other));
  return h("p", { class: "text" }, h("span", { class: other ? "changed" : null }, text || "(nothing)"));
}

// The fields of an observation; those that have changed since the one before are marked.
export function fields(observation, before, other) {
  const entries = Object.entries(observation);
  if (!entries.length) return h("p", { class: "text muted" }, "(empty)");
  if (entries.length === 1) return words(entries[0][1], other && Object.keys(other).length === 1 ? Object.values(other)[0] : undefined);
  return h("dl", { class: "fields" }, entries.map(([name, text]) => {
    const isChanged = !other && before && before[name] !== text;
    return [h("dt", {}, name), h("dd", { class: "text" }, other ? marked(text, Object.hasOwn(other, name) ? other[name] : "") : h("span", { class: isChanged ? "changed" : null, title: isChanged ? "Changed by this turn" : null }, text))];
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

const ENDINGS = { length: "cut off", content_filter: "withheld by the provider" };

function numbersOf(turn, index) {
  const pairs = [
    ["reward", turn.steps.length ? number(turn.steps.reduce((sum, step) => sum + step.reward, 0)) : null],
    ["credited", turn.turn_reward === null ? null : number(turn.turn_reward)],
    ["advantage", turn.advantage === null ? null : number(turn.advantage, 2)],
    ["tokens", `${count(turn.num_prompt_tokens)} + ${count(turn.num_completion_tokens)}`],
    ["policy", turn.policy_versions.length ? turn.policy_versions.join(", ") : null],
    ["ended", ENDINGS[turn.finish] ?? null],
  ];
  return h("header", {}, h("h2", {}, `Turn ${index + 1}`), turn.branch ? h("span", { class: "bad" }, turn.branch) : null, pairs.filter(([, value]) => value !== null).map(([name, value]) => h("span", {}, name, " ", h("b", {}, value))));
}

// The messages as the model was shown them, each with its role, and what it wrote.
export function messages(content) {
  return [content.turns.map((turn, index) => h("article", { class: "turn" }, numbersOf(turn, index),
    turn.messages.length ? null : h("p", { class: "text muted" }, "(no messages were recorded)"),
    turn.messages.map(({ role, text }) => {
      const shown = h("p", { class: "text" }, text || "(nothing)");
      return said("", role, role === "tools" ? h("details", {}, h("summary", {}, "What the model could call"), shown) : shown);
    }),
    said("model", "Reply", h("p", { class: "text" }, turn.reply || "(nothing)")),
    turn.unusable ? said("wrong", "Could not be used", h("p", { class: "text" }, turn.unusable)) : null)), ending(content)];
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
  return [turns, ending(content)];
}

function ending(content) {
  const end = content.error || content.unscored
    ? h("article", { class: "turn" }, said("wrong", content.error ? "Failed" : "Has no reward", h("p", { class: "text" }, content.error ?? content.unscored))) : null;
  const judged = Object.entries(content.judgements).map(([name, text]) => h("article", { class: "turn" }, said("", `Judge on ${name}`, h("p", { class: "text" }, text))));
  const ended = content.exit_code == null ? null : h("p", { class: "text" }, `The program ended with exit code ${content.exit_code}.`);
  const output = ended || content.output || content.notes?.length
    ? h("article", { class: "turn" }, content.notes.map((note) => h("p", { class: "text" }, note)), ended, content.output ? said("", "Output of the program", h("pre", { class: "text" }, content.output)) : null) : null;
  return [end, output, judged];
}
