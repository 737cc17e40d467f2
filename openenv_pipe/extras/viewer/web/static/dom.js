// Build elements and write numbers. Text of others only ever becomes a text node.

export function h(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

export const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e6)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(size >= 1000 ? 0 : digits);
}

// A share, with digits where it would else read as 0 % or 100 %. One that differs from 0 or 1 only by rounding errors gets none.
export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const isEnd = value === 0 || Math.abs(value) === 1;
  for (let digits = value > 0 && value < 0.1 ? 1 : 0; digits <= 3; digits += 1) {
    const text = (100 * value).toFixed(digits);
    if (isEnd || ![0, 100].includes(Math.abs(Number(text)))) return `${text} %`;
  }
  return `${Math.round(100 * value) + 0} %`;
}

export function count(value) {
  if (value === null || value === undefined) return NONE;
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)} ${unit}`;
  }
  return Math.round(value).toLocaleString("en");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes % 60)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function moment(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : NONE;
}

export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return `#${path}${text ? `?${text}` : ""}`;
}

export function statusMark(status) {
  return h("span", { class: `status ${status}` }, status);
}

export function field(label, control) {
  return h("label", { class: "field" }, h("span", {}, label), control);
}

export function choice(value, options, change, label) {
  const select = h("select", { onchange: () => change(select.value), "aria-label": label });
  for (const [key, text] of options) {
    const option = h("option", { value: key }, text);
    option.selected = key === (value ?? "");
    select.append(option);
  }
  return select;
}

// Compare two values that a table is sorted by. Texts are compared with the numbers in them: train/2 comes before train/10.
export function compared(x, y) {
  if (typeof x === "string" && typeof y === "string") return x.localeCompare(y, "en", { numeric: true });
  return x < y ? -1 : 1;
}

// A table whose heads sort. columns: {key, title, cell, of, class, order, hint}; of: what is sorted by.
export function sortable(columns, rows, { sort, way, link, empty }) {
  const column = columns.find((each) => each.key === sort);
  const sorted = column?.of ? [...rows].sort((a, b) => {
    const [x, y] = [column.of(a), column.of(b)];
    if (x === y) return 0;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return compared(x, y) * (way === "down" ? -1 : 1);
  }) : rows;
  const heads = columns.map((each) => {
    const next = each.key === sort && way !== "down" ? "down" : "up";
    const mark = each.key === sort ? (way === "down" ? " ↓" : " ↑") : "";
    const title = each.of || each.order
      ? h("a", { href: link({ sort: each.key, way: each.key === sort ? next : each.first ?? "down" }) }, each.title, mark)
      : each.title;
    return h("th", { class: each.class, title: each.hint, scope: "col" }, title);
  });
  const body = sorted.map((row) => h("tr", { class: row.rowClass },
    columns.map((each) => h("td", { class: each.class }, each.cell(row)))));
  return h("div", { class: "wide", tabindex: 0 }, h("table", { class: "list" },
    h("thead", {}, h("tr", {}, heads)),
    h("tbody", {}, body.length ? body : h("tr", {}, h("td", { colspan: columns.length, class: "empty" }, empty)))));
}
