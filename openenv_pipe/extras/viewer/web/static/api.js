// Ask the server, or the data files of a bundle that is opened from a disk.

export async function ask(path, parameters = {}) {
  if (window.bundle) return window.bundle.ask(path, parameters);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return read(await fetch(`api${path}?${query}`));
}

// Have the server do something, which no page of another site can ask for.
export async function send(path, content = {}) {
  return read(await fetch(`api${path}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) }));
}

async function read(answer) {
  if (answer.status === 401) location.reload(); // The viewer was restarted: its own page says what to do.
  const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// Return a function that calls `work`, an async function, never twice at once: calls that come meanwhile
// have it called once more afterwards. So what was asked for last is also what arrives last.
export function oneAtATime(work) {
  let going = null, isAsked = false;
  async function workOff() {
    try {
      while (isAsked) { isAsked = false; await work(); }
    } finally { going = null; }
  }
  return () => {
    isAsked = true;
    going ??= workOff();
    return going;
  };
}

// Call `changed`, an async function, whenever the run changes, one call at a time; returns a function that ends this.
export function listen(path, changed) {
  if (window.bundle) return () => {};
  const source = new EventSource(`api${path}/events`);
  source.onmessage = oneAtATime(changed);
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) source.onmessage(); }; // It was rejected, not interrupted.
  return () => source.close();
}

export function runPath(key) {
  return `/runs/${key.split("/").map(encodeURIComponent).join("/")}`;
}
