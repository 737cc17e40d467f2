// Routes: the part of the address after # names a page and everything that is chosen on it.

import { h, fill, address } from "./dom.js";
import { showViews } from "./notes.js";
import { runsPage } from "./runs_page.js";
import { runPage } from "./run_page.js";
import { episodesPage, tasksPage } from "./episodes_page.js";
import { episodePage, groupPage, taskPage, samePage } from "./episode_page.js";
import { playPage } from "./play_page.js";
import { overlayPage, sweepsPage, sweepPage, evaluationsPage } from "./compare_page.js";

const NAME = "openenv-pipe";
const ROUTES = [
  [/^\/runs$/, (route) => runsPage(route)],
  [/^\/run\/([^/]+\/[^/]+)$/, (route, key) => runPage(route, key, "")],
  [/^\/run\/([^/]+\/[^/]+)\/(logs|config)$/, (route, key, tab) => runPage(route, key, tab)],
  [/^\/run\/([^/]+\/[^/]+)\/episodes$/, (route, key) => episodesPage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/tasks$/, (route, key) => tasksPage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/episode$/, (route, key) => episodePage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/group$/, (route, key) => groupPage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/task$/, (route, key) => taskPage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/evaluations$/, (route, key) => evaluationsPage(route, key)],
  [/^\/run\/([^/]+\/[^/]+)\/play$/, (route, key) => playPage(route, key)],
  [/^\/evaluations$/, (route) => evaluationsPage(route, null)],
  [/^\/overlay$/, (route) => overlayPage(route)],
  [/^\/sweeps$/, (route) => sweepsPage(route)],
  [/^\/sweep\/([^/]+)$/, (route, stamp) => sweepPage(route, stamp)],
  [/^\/same$/, (route) => samePage(route)],
];
let current = null, turn = 0;

function routeOfAddress() {
  const [path, query] = (location.hash || window.bundle?.start || "#/runs").slice(1).split("?");
  return { path: decodeURIComponent(path), parameters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

async function show() {
  const mine = ++turn, route = routeOfAddress(), page = document.getElementById("page");
  const found = ROUTES.map(([pattern, make]) => [route.path.match(pattern), make]).find(([match]) => match);
  let next;
  try {
    if (!found) throw new Error(`there is no page ${route.path}`);
    next = await found[1](route, ...found[0].slice(1));
  } catch (error) {
    next = { title: "Not found", trail: [], node: h("p", { class: "notice bad" }, error.message) };
  }
  if (mine !== turn) { next.end?.(); return; } // Another page was asked for meanwhile.
  const isSame = current?.path === route.path, height = scrollY;
  current?.page.end?.();
  current = { path: route.path, page: next };
  document.title = `${next.title} · ${NAME}`;
  fill(document.getElementById("top"),
    h("span", { class: "trail" }, h("a", { href: address("/runs") }, h("strong", {}, NAME)), next.trail.map(([name, link]) => h("a", { href: link, "data-key": name === "Episodes" ? "e" : null }, name))),
    h("nav", { "aria-label": "Pages" }, h("a", { href: address("/runs"), "data-key": "r" }, "Runs"), h("a", { href: address("/sweeps"), "data-key": "s" }, "Sweeps"),
      window.bundle ? null : h("button", { class: "quiet", type: "button", "data-key": "v", title: "Saved views", onclick: showViews }, "Views"),
      h("button", { class: "quiet", type: "button", title: "Keys of this page", onclick: help }, "?")));
  fill(page, next.node);
  page.dataset.path = route.path;
  next.shown?.();
  if (isSame) scrollTo(0, height);
  else { scrollTo(0, 0); page.focus({ preventScroll: true }); }
}

// A key presses the element of the page that names it in data-key; / goes to the search.
function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const search = document.querySelector("main input[type=search]");
  const pressed = [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === event.key);
  if (event.key === "/" && search) search.focus();
  else if (event.key === "?") help();
  else if (pressed) pressed.click();
  else return;
  event.preventDefault();
}

function help() {
  const keys = new Map([...document.querySelectorAll("[data-key]")].map((each) => [each.dataset.key, each.title || each.textContent]));
  if (document.querySelector("main input[type=search]")) keys.set("/", "search");
  const dialog = h("dialog", {}, h("h2", {}, "Keys of this page"), h("dl", { class: "fields" }, [...keys, ["?", "this list"]].map(([key, name]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, name)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

addEventListener("keydown", press);
addEventListener("hashchange", show);
if (document.readyState === "loading") addEventListener("DOMContentLoaded", show); else show();
