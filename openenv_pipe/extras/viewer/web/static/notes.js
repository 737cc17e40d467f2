// Notes on episodes, and names of views. The server keeps them beside the run folders; bundles leave them out.

import { h, fill } from "./dom.js";
import { ask, send, runPath } from "./api.js";

export function noteOf(notes, entry) {
  return notes[episodeName(entry)];
}

function episodeName(entry) {
  return `${entry.source} ${entry.step ?? ""} ${entry.line}`;
}

// Where notes cannot be read, the page is shown with the reason in their place.
export async function notesOf(key) {
  const none = { notes: {}, can_write: false };
  return window.bundle ? none : ask(`${runPath(key)}/notes`).catch((error) => ({ ...none, problem: error.message }));
}

export async function noteField(key, entry) {
  const { notes, can_write: canWrite, problem } = await notesOf(key), known = noteOf(notes, entry) ?? "";
  if (problem) return h("div", { class: "notice bad" }, problem);
  if (!canWrite) return known ? h("div", { class: "notice" }, h("strong", {}, "Note: "), h("span", { class: "text" }, known)) : null;
  const text = h("textarea", { rows: 3, value: known, "aria-label": "Note" }), said = h("span", { class: "muted small", role: "status" });
  const save = async () => {
    try {
      await send(`${runPath(key)}/notes`, { episode: episodeName(entry), text: text.value });
      fill(said, text.value.trim() ? "Saved." : "Deleted.");
    } catch (error) { fill(said, h("span", { class: "bad" }, error.message)); }
  };
  return h("details", { open: known !== "" }, h("summary", {}, "Note"), text, h("div", { class: "bar" }, h("button", { type: "button", onclick: save }, "Save the note"), said));
}

// Show the views that have names, and name the page that is shown.
export async function showViews() {
  const list = h("ul", { class: "views" }), said = h("p", { class: "bad", role: "alert" });
  const name = h("input", { type: "text", maxlength: 80, "aria-label": "Name of this page with its filters", placeholder: "Name of this page" });
  const form = h("div", { class: "bar" }, name, h("button", { type: "button", onclick: () => put(name.value, location.hash || "#/runs") }, "Save"));
  const dialog = h("dialog", { "aria-label": "Saved views" }, h("h2", {}, "Saved views"), list, said, form, h("form", { method: "dialog" }, h("button", {}, "Close")));
  function draw(views, canWrite) {
    form.hidden = !canWrite;
    fill(list, Object.entries(views).map(([title, to]) => h("li", {}, h("a", { href: to, onclick: () => dialog.close() }, title),
      canWrite ? h("button", { class: "quiet", type: "button", "aria-label": `Delete ${title}`, onclick: () => put(title, "") }, "×") : null)));
    if (!list.childElementCount) fill(list, h("li", { class: "muted" }, "There are none yet."));
  }
  async function put(title, to) {
    fill(said);
    try { draw((await send("/views", { name: title, address: to })).views, true); } catch (error) { fill(said, error.message); }
  }
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  try {
    const { views, can_write: canWrite } = await ask("/views");
    draw(views, canWrite);
  } catch (error) { form.hidden = true; fill(said, error.message); }
}
