// In place of the server, where the pages are opened as files: answers are scripts in data/.

const MOST_LISTED = 200; // episodes of one answer, as of the server's

const bundle = {
  files: {}, start: "", loaded: new Map(), waiting: new Map(),

  put(name, answer) {
    this.loaded.set(name, answer);
  },

  async load(name) {
    if (!this.loaded.has(name)) {
      const file = this.files[name];
      if (!file) throw new Error("this is not part of the bundle");
      if (!this.waiting.has(name)) {
        this.waiting.set(name, new Promise((done, failed) => {
          const script = document.createElement("script");
          script.src = `data/${file}`;
          script.onload = done;
          script.onerror = () => failed(new Error(`the bundle lacks data/${file}`));
          document.head.append(script);
        }));
      }
      await this.waiting.get(name);
    }
    const answer = this.loaded.get(name);
    if (answer?.error) throw new Error(answer.error);
    return answer;
  },

  async ask(path, query) {
    const [, run, what] = path.match(/^(\/runs\/[^/]+\/[^/]+)(?:\/(\w+))?$/) ?? [];
    if (what === "log") return this.load(`${run}/log/${query.name}`);
    if (what === "episodes") return this.episodes(run, query);
    if (what === "tasks") return this.tasks(run, query);
    if (["episode", "group", "tokens"].includes(what)) return this.members(run, what, query);
    if (path === "/evaluations") return this.evaluations(query);
    if (path === "/compare") {
      const { runs } = await this.load("/runs");
      if (query.runs !== runs.map((each) => each.key).join(",")) return { settings: [], keys: [], measures: [], notes: ["The bundle compares the settings of all its runs only."], lost_jobs: [] };
    }
    return this.load(path);
  },

  async evaluations(query) {
    const found = await this.load(`/runs/${query.runs}/evaluations`);
    const before = query.before || found.before, after = query.after || found.after;
    if (before === found.before && after === found.after) return found;
    return { ...found, before, after, difference: null, problem: "The bundle has the intervals of one difference only." };
  },

  async entries(run, source) {
    const { entries, problems } = await this.load(`${run}/episodes`), sources = {};
    for (const each of entries) sources[each.source] = (sources[each.source] ?? 0) + 1;
    const chosen = source || "train";
    return { all: entries.filter((each) => each.source === chosen), problems, sources };
  },

  matches(each, query, isBounded) {
    const value = !each.is_scored ? NaN : query.reward_term ? each.terms[query.reward_term] : each.reward;
    const flag = (name, has) => !query[name] || (query[name] === "yes") === has;
    const text = `${each.preview} ${each.error ?? ""} ${each.task}`.toLowerCase();
    return (!query.first_step || each.step >= Number(query.first_step)) && (!query.last_step || each.step <= Number(query.last_step))
      && (!query.task || each.task.includes(query.task)) && (!query.task_id || each.task === query.task_id) && (!query.status || each.status === query.status)
      && flag("success", each.success) && flag("is_scored", each.is_scored) && flag("is_truncated", each.is_truncated) && flag("has_unusable", each.num_unusable > 0)
      && (!query.text || text.includes(query.text.toLowerCase()))
      && (!isBounded || ((!query.reward_from || value >= Number(query.reward_from)) && (!query.reward_below || value < Number(query.reward_below)) && (!query.reward_to || value <= Number(query.reward_to))));
  },

  histogram(entries, term) {
    const values = entries.filter((each) => each.is_scored).map((each) => term ? each.terms[term] : each.reward).filter((value) => value !== undefined && value !== null);
    if (!values.length) return null;
    const size = 24, low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (low === high) return { low, high, counts: [values.length] };
    const counts = new Array(size).fill(0);
    for (const value of values) counts[Math.min(size - 1, Math.floor((value - low) / ((high - low) / size)))] += 1;
    return { low, high, counts };
  },

  async episodes(run, query) {
    const { all, problems, sources } = await this.entries(run, query.source), statuses = {};
    const terms = new Set();
    for (const each of all) {
      statuses[each.status] = (statuses[each.status] ?? 0) + 1;
      for (const name of Object.keys(each.terms)) terms.add(name);
    }
    const found = all.filter((each) => this.matches(each, query, true)), down = query.way === "down" ? -1 : 1;
    const of = { step: (each) => each.step, reward: (each) => each.reward, turns: (each) => each.num_turns, tokens: (each) => each.num_tokens, advantage: (each) => each.advantage }[query.order ?? "step"];
    const sorted = found.map((each) => [of(each), each]).sort(([a, x], [b, y]) => (a === null) - (b === null) || down * (a - b) || x.step - y.step || x.line - y.line).map(([, each]) => each);
    const start = Number(query.offset ?? 0);
    return {
      total: found.length, episodes: sorted.slice(start, start + MOST_LISTED),
      histogram: this.histogram(all.filter((each) => this.matches(each, query, false)), query.reward_term),
      choices: { sources, statuses, terms: [...terms].sort(), problems },
    };
  },

  groups(entries, name) {
    const found = new Map();
    for (const each of entries) {
      if (!found.has(each[name])) found.set(each[name], []);
      found.get(each[name]).push(each);
    }
    return [...found];
  },

  async tasks(run, query) {
    const { all } = await this.entries(run, query.source);
    const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    const reward = (entries) => mean(entries.map((each) => each.reward));
    const tasks = this.groups(all, "task").map(([task, each]) => {
      const scored = each.filter((one) => one.is_scored), steps = this.groups(scored.filter((one) => one.step > 0), "step");
      return { task, num_episodes: each.length, reward: reward(scored), success: mean(scored.map((one) => Number(one.success))), steps: steps.map(([step, played]) => [step, reward(played)]).sort(([a], [b]) => a - b) };
    });
    return tasks.sort((a, b) => (a.reward === null) - (b.reward === null) || a.reward - b.reward || (a.task < b.task ? -1 : 1));
  },

  async members(run, what, query) {
    const { all } = await this.entries(run, query.source), step = query.step === undefined || query.step === null ? null : Number(query.step);
    const ofFile = all.filter((each) => each.step === step);
    const entry = what === "group" ? ofFile.find((each) => each.group_id === query.group) : ofFile.find((each) => each.line === Number(query.line));
    if (!entry) throw new Error("this episode is not part of the bundle");
    const file = await this.load(`${run}/file/${entry.source}/${step === null ? "None" : step}`);
    if (what === "tokens") return file[entry.line].tokens;
    const members = ofFile.filter((each) => each.group_id === entry.group_id);
    const { skipped } = entry, num_members = members.length, first = Math.max(0, members.indexOf(entry) - MOST_LISTED / 2), shown = members.slice(first, first + MOST_LISTED);
    if (what === "episode") return { entry, members: shown, num_members, skipped, ...file[entry.line].content };
    return { members: shown.map((each) => ({ entry: each, ...file[each.line].content })), num_members, skipped };
  },
};
window.bundle = bundle;
