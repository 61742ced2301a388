// The memory view: reserved and resident memory, cache pages, requests and token rates. It polls /flatkv/state while it is shown.

import {fetchState, setKey} from "./api.js";
import {$, bytes, element, integer, seconds, short} from "./util.js";

const POLL_MS = 1000;
const MAX_SAMPLES = 600;
let timer = 0,
  isShown = false,
  before = null;

// ---- plots

const past = {t: [], resident: [], planned: [], generated: [], computed: [], cached: []};

// Resolves a colour of style.css for the current theme.
function color(name) {
  const probe = $("memory-plot");
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}

// Draws lines over time. The vertical axis starts at 0.
function plot(canvas, lines, format) {
  const ratio = window.devicePixelRatio || 1,
    w = canvas.clientWidth,
    h = canvas.clientHeight,
    pen = canvas.getContext("2d"),
    left = 62;
  canvas.width = w * ratio;
  canvas.height = h * ratio;
  pen.scale(ratio, ratio);
  const top = Math.max(10, ...lines.flatMap(line => line.values)) * 1.08,
    start = past.t[0],
    span = past.t.at(-1) - start || 1;
  const y = v => h - 14 - (v / top) * (h - 22),
    x = t => left + ((t - start) / span) * (w - left - 2);
  pen.font = "11px system-ui";
  for (const part of [0, 0.5, 1]) {
    const v = (top * part) / 1.08;
    pen.fillStyle = color("dim");
    pen.strokeStyle = color("line");
    pen.fillText(format(v), 0, y(v) + 4);
    pen.beginPath();
    pen.moveTo(left, y(v));
    pen.lineTo(w, y(v));
    pen.stroke();
  }
  for (const line of lines) {
    pen.strokeStyle = color(line.color);
    pen.lineWidth = 1.8;
    pen.beginPath();
    line.values.forEach((v, i) => pen.lineTo(x(past.t[i]), y(v)));
    pen.stroke();
  }
}

function remember(s) {
  const rate = field => (before ? Math.max(0, (s[field] - before[field]) / (s.now - before.now || 1)) : 0);
  const sample = {
    t: s.now,
    resident: s.resident_bytes,
    planned: s.planned_bytes + s.base_bytes,
    generated: rate("new_tokens"),
    computed: rate("computed_tokens"),
    cached: rate("cached_tokens"),
  };
  for (const [name, value] of Object.entries(sample)) {
    past[name].push(value);
    if (past[name].length > MAX_SAMPLES) past[name].shift();
  }
}

// ---- memory

// Shows a bar of parts [label, bytes, colour class] that add up to `total`.
function showBudget(name, text, total, parts) {
  $(name + "-text").textContent = text;
  $(name + "-bar").replaceChildren(
    ...parts.map(([, n, fill]) => {
      const part = element("i", {class: fill});
      part.style.width = (100 * n) / (total || 1) + "%";
      return part;
    }),
  );
  $(name + "-key").replaceChildren(
    ...parts.map(([label, n, fill]) => element("span", {}, element("i", {class: fill}), `${label} ${bytes(n)}`)),
  );
}

// The reservation is fixed, and its pages are free, used or cached. The resident memory of the process also includes the
// program, the weights and the buffers of connections, so it is shown separately.
function showMemoryUse(s) {
  const pageBytes = field => s.groups.reduce((sum, group) => sum + group[field] * group.page_bytes, 0);
  const held = pageBytes("held"),
    cached = pageBytes("cached"),
    free = pageBytes("free");
  showBudget("reserved", `${bytes(s.planned_bytes)}, fixed since the start`, s.planned_bytes, [
    ["pages in use", held, "fill-private"],
    ["cached prefixes", cached, "fill-cached"],
    ["free pages", free, "fill-free"],
    ["step buffers and tables", Math.max(0, s.planned_bytes - held - cached - free), "fill-promised"],
  ]);
  const cache = Math.max(0, Math.min(s.planned_bytes, s.resident_bytes - s.base_bytes));
  const base = Math.min(s.base_bytes, s.resident_bytes);
  showBudget("resident", `${bytes(s.resident_bytes)}`, s.resident_bytes, [
    [s.n_models > 1 ? "program, weights and other models" : "program and weights", base, "fill-pinned"],
    ["reserved cache", cache, "fill-private"],
    ["connections and requests", s.resident_bytes - base - cache, "fill-shared"],
  ]);
}

// ---- pages

const STATES = ["free", "private", "shared", "cached", "pinned"];
const NAMES = {
  private: "private",
  shared: "shared by several requests",
  pinned: "prefix in use",
  cached: "cached prefix",
  promised: "reserved",
  free: "free",
};
const HUES = [211, 28, 150, 285, 340, 55, 185, 250, 5, 105];
const hue = tenant => `hsl(${HUES[Math.max(0, tenant - 1) % HUES.length]} 62% 52%)`;
let byTenant = null; // colours chosen by the user; null: by tenant if there are several
let cellsBefore = [];

function legendItem(className, text, background) {
  const swatch = element("i", {class: className});
  if (background) swatch.style.background = background;
  return element("span", {}, swatch, text);
}

function showLegend(tenants, tenantColours) {
  const items = tenantColours
    ? [
        ...tenants.map(tenant => legendItem("", tenant ? "key " + tenant : "no key", hue(tenant))),
        "pale: cached, striped: shared, outlined: prefix in use",
      ]
    : Object.entries(NAMES).map(([name, text]) => legendItem(name === "promised" ? "outline-promised" : "fill-" + name, text));
  $("map-key").replaceChildren(
    ...items,
    legendItem("outline-evicted", "evicted"),
    legendItem("outline-copied", "copied on write"),
  );
}

function showPages(groups, pages, evicted, copied) {
  const g = groups[pages.group],
    n = pages.states.length,
    share = n / Math.max(1, g.pages),
    map = $("map");
  const tenants = [...new Set([...pages.tenants].filter((_, i) => pages.states[i] !== "0"))]
    .map(c => c.charCodeAt(0) - 97)
    .sort((a, b) => a - b);
  const tenantColours = byTenant ?? tenants.length > 1;
  let promised = Math.round(Math.min(g.promised, g.free) * share);
  while (map.children.length < n) map.append(element("i"));
  while (map.children.length > n) map.lastChild.remove();
  map.classList.toggle("tenants", tenantColours);
  map.classList.toggle("few", n <= 400);
  $("by").textContent = tenantColours ? "Colour by state" : "Colour by key";
  for (let i = 0; i < n; i++) {
    let name = STATES[pages.states[i]];
    if (name === "free" && promised > 0) {
      name = "promised";
      promised--;
    }
    const was = cellsBefore[i],
      tenant = pages.tenants.charCodeAt(i) - 97,
      now = name + tenant,
      cell = map.children[i];
    let mark = "";
    if (was?.startsWith("cached") && was !== now && name !== "pinned" && name !== "shared" && evicted > 0) {
      mark = " evicted";
      evicted--;
    } else if (was && /^(free|promised)/.test(was) && name === "private" && copied > 0) {
      mark = " copied";
      copied--;
    }
    if (was === now && !mark && !cell.className.includes(" ")) continue;
    cellsBefore[i] = now;
    cell.className = name + mark;
    cell.style.setProperty("--own", hue(tenant));
    cell.title = NAMES[name] + (tenant && name !== "free" ? ", key " + tenant : "");
  }
  showLegend(tenants, tenantColours);
  $("pages").textContent =
    `${integer(g.pages)} pages: ${g.held} in use (${g.shared} shared), ${g.cached} cached, ${g.promised} reserved, ${g.free} free` +
    (share < 1 ? `; showing 1 of every ${Math.round(1 / share)}` : "") +
    (groups.length > 1 ? `; layer group ${pages.group + 1} of ${groups.length}` : "");
}

// ---- requests and totals

const MAX_ROWS = 40;

function requestRow(r) {
  const bar = element("div", {class: "bar"}),
    whole = r.n_prompt + r.max_new;
  for (const [kind, n] of [
    ["cached", r.n_cached],
    ["shared", Math.max(0, r.n_computed - r.n_cached)],
    ["private", r.n_new],
  ]) {
    const part = element("i", {class: "fill-" + kind});
    part.style.width = (100 * n) / whole + "%";
    bar.append(part);
  }
  const phase = ["queued", "prefill", "decode"][r.phase] + (r.tenant ? " · " + r.tenant : "");
  return element(
    "div",
    {class: "request"},
    element("span", {}, phase),
    bar,
    element("span", {class: "right dim"}, `${r.n_prompt} + ${r.n_new}, ${seconds(r.age_s)}`),
  );
}

const statistic = (name, value) => element("div", {}, element("b", {}, value), element("span", {class: "dim"}, name));

function showTotals(s) {
  const mean = (sum, n) => (n ? seconds(sum / n) : "–");
  $("totals").replaceChildren(
    statistic("answers", short(s.finished)),
    statistic("stopped answers", short(s.stopped)),
    statistic("tokens generated", short(s.new_tokens)),
    statistic("prompt tokens cached", s.prompt_tokens ? Math.round((100 * s.cached_tokens) / s.prompt_tokens) + " %" : "–"),
    statistic("mean time to first token", mean(s.first_token_sum, s.first_token_n)),
    statistic("mean time between tokens", mean(s.between_sum, s.between_n)),
    statistic("rejected", short(s.refused)),
    statistic("disconnects", short(s.disconnects)),
    statistic("copied pages", short(s.page_copies)),
    statistic("evicted pages", short(s.evictions)),
  );
  if (s.store_max_bytes)
    $("totals").append(
      statistic("prefix cache on disk, limit " + bytes(s.store_max_bytes), bytes(s.store_bytes)),
      statistic("pages on disk", short(s.store_pages)),
      statistic("pages read from disk", short(s.store_read_pages)),
      statistic("pages written to disk", short(s.store_written_pages)),
    );
}

// ---- polling

function render(s) {
  const more = field => (before ? s[field] - before[field] : 0),
    evicted = more("evictions"),
    copied = more("page_copies");
  remember(s);
  before = s;
  $("about").textContent = `${s.model}, ${s.architecture}, ${short(s.max_tokens)} cache tokens` + (s.isa ? ", " + s.isa : "");
  $("rates").textContent = `${short(past.generated.at(-1))} generated, ${short(past.computed.at(-1))} computed`;
  $("counts").textContent =
    `${s.running} running, ${s.waiting} waiting` +
    (s.predicted_wait_s > 0.5 ? `, predicted wait ${seconds(s.predicted_wait_s)}` : "");
  showMemoryUse(s);
  plot(
    $("memory-plot"),
    [
      {values: past.planned, color: "pinned"},
      {values: past.resident, color: "private"},
    ],
    bytes,
  );
  plot(
    $("rate-plot"),
    [
      {values: past.generated, color: "private"},
      {values: past.computed, color: "shared"},
      {values: past.cached, color: "cached"},
    ],
    short,
  );
  showPages(s.groups, s.map, evicted, copied);
  $("requests").replaceChildren(...(s.requests.length ? s.requests.slice(0, MAX_ROWS).map(requestRow) : ["none"]));
  showTotals(s);
}

async function poll() {
  clearTimeout(timer);
  try {
    const state = await fetchState();
    if (!isShown) return;
    $("admin-form").hidden = true;
    $("memory-panels").hidden = false;
    $("notice").hidden = true;
    render(state);
  } catch (error) {
    const needsKey = error.status === 401 || error.status === 403;
    if (!isShown) return;
    $("admin-form").hidden = !needsKey;
    $("memory-panels").hidden = needsKey;
    if (needsKey) return; // polls again when a key is entered
    $("notice").textContent = error.status === 503 ? "The model is loading." : error.message + " " + (error.advice ?? "");
    $("notice").hidden = false;
  }
  if (isShown) timer = setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

// Starts or stops polling.
export function showMemory(show) {
  isShown = show;
  if (show) poll();
  else clearTimeout(timer);
}

$("by").addEventListener("click", () => {
  byTenant = !$("map").classList.contains("tenants");
});
$("admin-form").addEventListener("submit", async event => {
  event.preventDefault();
  setKey("admin", $("admin-key").value.trim(), false);
  $("admin-error").textContent = "";
  await poll();
  if (!$("admin-form").hidden) $("admin-error").textContent = "The server did not accept this key.";
});
