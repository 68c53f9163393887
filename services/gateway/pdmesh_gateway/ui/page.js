// What the mesh does now: the page's parts, each redrawn from the last frame.

import { Charts, seconds } from "./charts.js";
import { follow, reason, request } from "./feed.js";
import { duration, kindOf, notesOf, safetyText, timeOf } from "./history.js";
import { KINDS, Timeline } from "./timeline.js";
import { drawWay } from "./way.js";

const $ = (id) => document.getElementById(id);
const timeline = new Timeline($("timeline"));
const charts = new Charts($("charts"), () => timeline.colours);
let frame = null;
let chosen = null;

// --- small helpers ---

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const count = (value) => (value < 10000 ? String(value) : `${(value / 1000).toFixed(0)}K`);

// Rows that stay what they are: made once for each key, changed in place.
class Rows {
  constructor(parent, make) { this.parent = parent; this.make = make; this.rows = new Map(); }

  show(items, key, update) {
    const seen = new Set();
    let place = this.parent.firstElementChild;
    for (const [index, item] of items.entries()) {
      const name = key(item, index);
      seen.add(name);
      let row = this.rows.get(name);
      if (!row) this.rows.set(name, (row = this.make(item)));
      update(row, item);
      if (row !== place) this.parent.insertBefore(row, place);
      else place = place.nextElementSibling;
    }
    for (const [name, row] of this.rows) if (!seen.has(name)) { row.remove(); this.rows.delete(name); }
  }
}

function put(node, text) { if (node.textContent !== text) node.textContent = text; }

// --- the parts ---

const instances = new Rows($("instances"), () => {
  const row = element("div", "instance");
  const blocks = element("span", "blocks");
  blocks.append(element("i", "held"), element("i", "reserved"), element("i", "stuck"));
  row.append(element("span", "name"), element("span", "role"), blocks, element("span", "doing"));
  return row;
});

const links = new Rows($("links"), () => element("li", "link"));

function showLinks() {
  links.show(frame.links || [], (item) => `${item.source} ${item.destination}`, (row, item) => {
    put(row, `${item.source} → ${item.destination}: ${(item.bytes_per_s / 1e9).toPrecision(2)} GB/s`);
  });
}

function showInstances() {
  instances.show(frame.instances, (item) => item.id, (row, item) => {
    const [name, role, blocks, doing] = row.children;
    row.classList.toggle("away", item.state !== "serving");
    row.classList.toggle("gone", Boolean(item.gone));
    put(name, item.id);
    const about = aboutInstance(item);
    if (row.title !== about) row.title = about;
    role.className = `role ${item.role}`;
    put(role, item.role);
    const [held, reserved, stuck] = blocks.children;
    const share = (blocks) => `${(100 * blocks) / Math.max(item.num_blocks, 1)}%`;
    held.style.width = share(item.num_held_blocks);
    reserved.style.width = share(Math.max(item.num_taken_blocks - item.num_held_blocks, 0));
    stuck.style.width = share(item.num_quarantined_blocks);
    const title = `${item.num_held_blocks} of ${item.num_blocks} KV blocks held, ${item.num_taken_blocks} taken or promised, ${item.num_quarantined_blocks} quarantined`;
    if (blocks.title !== title) blocks.title = title;
    const parts = [];
    if (item.state !== "serving") parts.push(item.state);
    if (item.num_decoding) parts.push(`${item.num_decoding} decoding`);
    if (item.num_prefilling) parts.push(`${item.num_prefilling} in prefill`);
    if (item.num_queued_tokens) parts.push(`${count(item.num_queued_tokens)} tokens to go`);
    if (item.gone) parts.push(`${duration(frame.at - item.note.at)}`);
    put(doing, (parts.join(", ") || "idle") + mode(item.batching));
  });
  $("mesh").style.setProperty("--count", frame.instances.length);
}

function aboutInstance(item) {
  if (item.gone) return `process ${item.pid} on ${item.host || "an unknown host"}; is safe to delete: yes, it has no request`;
  const age = item.joined_at ? `joined ${duration(frame.at - item.joined_at)} ago, ${item.num_restarts} restarts` : "";
  return `${item.id}: process ${item.pid}, ${age}\n${safetyText(item)}`;
}

const notes = new Rows($("notes"), () => {
  const row = element("li");
  row.append(element("b"), " ", element("span"));
  return row;
});

const events = new Rows($("events"), () => {
  const row = element("li");
  row.append(element("time"), element("b"), element("span"));
  return row;
});

function showHistory() {
  const sentences = notesOf(frame);
  $("notes").hidden = sentences.length === 0;
  notes.show(sentences, ([name], index) => `${index} ${name}`, (row, [name, text]) => {
    put(row.firstChild, name);
    put(row.lastChild, text);
  });
  const newest = [...(frame.events ?? [])].reverse();
  events.show(newest, (event) => `${event.at} ${event.what} ${event.name}`, (row, event) => {
    const [time, what, rest] = row.children;
    put(time, `${duration(frame.at - event.at)} ago`);
    time.title = timeOf(event.at);
    what.className = kindOf(event.what);
    put(what, event.what);
    put(rest, [event.name, event.detail].filter(Boolean).join(": "));
  });
}

/** Its batching mode, and the phase of an exclusive one; of an instance that has none, nothing. */
function mode(batching) {
  if (!batching) return "";
  return ` · ${batching.mode}${batching.phase ? `, ${batching.phase} phase` : ""}`;
}

const requests = new Rows($("requests"), (item) => {
  const row = element("tr");
  row.append(element("td", "id"), element("td"), element("td", "number"), element("td"), element("td", "number"));
  row.children[3].append(element("progress"));
  row.children[3].firstChild.max = 1;
  row.onclick = () => choose(item.id);
  return row;
});

function showRequests() {
  put($("work-count"), `${frame.num_running} running, ${frame.num_waiting} waiting`);
  $("work-none").hidden = frame.requests.length > 0;
  requests.show(frame.requests, (item) => item.id, (row, item) => {
    const [id, where, prompt, progress, age] = row.children;
    row.classList.toggle("chosen", item.id === chosen);
    put(id, item.label || item.id);
    id.title = item.id;
    put(where, [[...item.where.slice(0, 1), ...(item.helpers ?? [])].join(" + "), ...item.where.slice(1)].join(" → ") || "waiting");
    put(prompt, count(item.num_prompt_tokens));
    const done = item.num_planned_tokens / Math.max(item.num_prompt_tokens, 1);
    progress.firstChild.value = done;
    progress.title = done < 1 ? `${Math.round(100 * done)} % of its prompt` : item.phase.replace("_", " ");
    put(age, seconds(item.age_s));
  });
}

function showFigures() {
  const health = $("health");
  const good = frame.unready_reason === null;
  health.className = `health ${good ? "good" : "bad"}`;
  put(health, good ? "serving" : frame.unready_reason);
  const itl = frame.itl_s;
  const figures = [
    ["policy", frame.batching ? `${frame.bundle}, ${frame.batching}` : frame.bundle],
    ["ITL p50 / p99 of ≤ 4,096 tokens", itl ? `${seconds(itl.p50)} / ${seconds(itl.p99)}` : "–"],
    ["running", String(frame.num_running)],
    ["waiting", String(frame.num_waiting)],
  ];
  const list = $("figures");
  for (const [index, [name, value]] of figures.entries()) {
    let pair = list.children[index];
    if (!pair) { pair = element("div"); pair.append(element("dt", "", name), element("dd")); list.append(pair); }
    put(pair.lastChild, value);
  }
}

// --- one request's life ---

let asking = 0;
let steps = []; // of the request that is shown

function showWay() {
  const svg = $("way");
  if (steps.length) drawWay(svg, steps, svg.parentElement.clientWidth - 20);
  else svg.replaceChildren();
}

async function choose(id) {
  chosen = id;
  timeline.chosen = id;
  $("parts").classList.add("chosen");
  await showLife();
}

async function showLife() {
  const id = chosen, turn = (asking += 1);
  if (id === null) return;
  let life, problem = "";
  try {
    const response = await request(`ui/requests/${encodeURIComponent(id)}`);
    if (response.ok) life = await response.json();
    else problem = await reason(response);
  } catch (error) {
    problem = error.message;
  }
  if (turn !== asking) return;
  put($("life-title"), life ? life.title : problem);
  steps = life?.steps ?? [];
  showWay();
  const rows = steps.map(([at_s, what, where, detail]) => {
    const row = element("tr");
    row.append(element("td", "number", (at_s * 1000).toFixed(1)), element("td", "", what), element("td", "", where), element("td", "quiet", detail));
    return row;
  });
  $("life-rows").replaceChildren(...rows);
  if (life && !life.ended) setTimeout(showLife, 700);
}

// --- start ---

for (const [kind, text] of KINDS) {
  const entry = element("li");
  const patch = element("i");
  patch.style.background = `var(--${kind})`;
  entry.append(patch, text);
  $("legend").append(entry);
}
$("zoom").oninput = () => { timeline.span_s = Number($("zoom").value); put($("span"), $("zoom").value); };
$("pause").onclick = () => {
  const on = $("pause").getAttribute("aria-pressed") !== "true";
  $("pause").setAttribute("aria-pressed", String(on));
  put($("pause"), on ? "resume" : "pause");
  timeline.pause(on);
};
// A request may be named by the address: answers in the chat link to their way.
function chooseNamed() { if (location.hash) choose(decodeURIComponent(location.hash.slice(1))); }
addEventListener("hashchange", chooseNamed);
chooseNamed();

addEventListener("resize", () => { charts.draw(); showWay(); });

window.pdmesh = { timeline, charts }; // for whoever looks into the page by its console, and for its test

follow("ui/events", (next) => {
  if (!next.instances) { // the gateway has no news of the mesh, and says why
    const health = $("health");
    health.className = "health bad";
    put(health, next.unready_reason);
    return;
  }
  frame = next;
  put($("model"), next.model);
  if (next.requests.length || next.steps.length) $("parts").classList.remove("fresh");
  timeline.take(next);
  charts.take(next);
  showFigures();
  showInstances();
  showHistory();
  showLinks();
  showRequests();
}, (why) => {
  const health = $("health");
  health.className = "health bad";
  put(health, `the scheduler sends no updates: ${why}`);
});
