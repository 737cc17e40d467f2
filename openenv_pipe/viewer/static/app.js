// Routes: the part of the address after # names a page and everything that is chosen on it.

import { h, fill, address } from "./dom.js";
import { runsPage } from "./runs_page.js";
import { runPage } from "./run_page.js";
import { episodesPage, tasksPage } from "./episodes_page.js";
import { episodePage, groupPage, taskPage, samePage } from "./episode_page.js";
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
  [/^\/evaluations$/, (route) => evaluationsPage(route, null)],
  [/^\/overlay$/, (route) => overlayPage(route)],
  [/^\/sweeps$/, (route) => sweepsPage(route)],
  [/^\/sweep\/([^/]+)$/, (route, stamp) => sweepPage(route, stamp)],
  [/^\/same$/, (route) => samePage(route)],
];
let current = null, turn = 0;

function routeOfAddress() {
  const [path, query] = (location.hash.slice(1) || "/runs").split("?");
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
    h("span", { class: "trail" }, h("a", { href: address("/runs") }, h("strong", {}, NAME)), next.trail.map(([name, link]) => h("a", { href: link }, name))),
    h("nav", { "aria-label": "Pages" }, h("a", { href: address("/runs") }, "Runs"), h("a", { href: address("/sweeps") }, "Sweeps")));
  fill(page, next.node);
  page.dataset.path = route.path;
  next.shown?.();
  if (isSame) scrollTo(0, height);
  else { scrollTo(0, 0); page.focus({ preventScroll: true }); }
}

addEventListener("hashchange", show);
if (document.readyState === "loading") addEventListener("DOMContentLoaded", show); else show();
