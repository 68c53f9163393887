// The page to talk to the model: conversations of turns, each a question and its answer.

import { Conversations } from "./conversations.js";
import { events, reason, request } from "./feed.js";
import { copyButton, show } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const PREFIX = `pdmesh-chat-1 ${location.pathname} `;
const SAVE_MS = 3000; // while an answer comes
const NEAR_END = 60; // pixels from the end within which the transcript follows an answer
const ENDS = { length: "Cut at its limit of tokens.", stopped: "Stopped.", failed: "The answer failed." }; // and may go on
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const NEW_ANSWER = { text: "", reasoning: "", calls: [], end: null, error: "", id: null, usage: null, ttft_ms: null, took_ms: null };

const conversations = new Conversations(browserStorage(), PREFIX);
const running = new Map(); // conversation id → AbortController of its answer
const views = new WeakMap(); // turn → its elements
let current = null;
let model;

function browserStorage() {
  try { return localStorage; } catch { return null; }
}

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(text, label, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.setAttribute("aria-label", label);
  made.onclick = act;
  return made;
}

function say(text, isBad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", isBad);
}

function save(conversation) {
  if (!conversations.save(conversation)) say("This browser does not keep the conversation: a reload loses it.", true);
}

// --- asking ---

// Body of a request: the turns that have an answer, then the last question; with `goesOn`, the answer so far, too.
function bodyOf({ settings, turns }, goesOn) {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns) {
    const isLast = turn === turns.at(-1);
    if (!turn.text && !isLast) continue; // a question without an answer
    messages.push({ role: "user", content: turn.question });
    if (turn.text && (!isLast || goesOn)) messages.push({ role: "assistant", content: turn.text });
  }
  const numbers = Object.fromEntries(NUMBERS.filter((name) => name in settings).map((name) => [name, settings[name]]));
  const more = goesOn && { continue_final_message: true, add_generation_prompt: false };
  return { model, messages, stream: true, stream_options: { include_usage: true }, ...numbers, ...more };
}

// Streams an answer to the last question; `goesOn` continues the present answer, else a new one replaces it.
async function answer(conversation, { goesOn = false } = {}) {
  const turn = conversation.turns.at(-1), before = { ...turn };
  Object.assign(turn, goesOn ? { end: null, error: "" } : structuredClone(NEW_ANSWER));
  const stopper = new AbortController(), began_ms = performance.now();
  let came = false, saved_ms = began_ms;
  running.set(conversation.id, stopper);
  conversation.at = Date.now();
  save(conversation);
  showList();
  paint(turn);
  showState();
  try {
    model ??= await firstModel();
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(bodyOf(conversation, goesOn)),
      signal: stopper.signal,
    });
    if (!response.ok) throw new Error(await reason(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      turn.id = chunk.id;
      if (chunk.usage) turn.usage = chunk.usage;
      const [choice] = chunk.choices;
      if (choice && take(turn, choice) && !came) {
        came = true;
        turn.ttft_ms = performance.now() - began_ms;
      }
      turn.took_ms = performance.now() - began_ms;
      paintSoon(turn);
      if (performance.now() > saved_ms + SAVE_MS) {
        saved_ms = performance.now();
        save(conversation);
      }
    }
    if (turn.end === null) throw new Error("the connection ended before the answer did");
  } catch (error) {
    const wasStopped = stopper.signal.aborted;
    if (!came && before.text) Object.assign(turn, before); // keep the earlier answer
    else turn.end = wasStopped ? "stopped" : "failed";
    if (!wasStopped) turn.error = error.message;
  }
  running.delete(conversation.id);
  save(conversation);
  showList();
  paint(turn);
  showState();
  if (conversation === current) say(turn.error ? "The answer failed." : ENDS[turn.end] ?? "The answer is complete.");
}

// Adds a chunk's choice to an answer. Returns whether the choice holds text, reasoning or a call.
function take(turn, { delta = {}, finish_reason: end }) {
  turn.text += delta.content ?? "";
  turn.reasoning += delta.reasoning_content ?? "";
  for (const { index, function: piece } of delta.tool_calls ?? []) {
    const call = (turn.calls[index] ??= { name: "", arguments: "" });
    call.name += piece?.name ?? "";
    call.arguments += piece?.arguments ?? "";
  }
  if (end) turn.end = end;
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

async function firstModel() {
  const response = await request("v1/models");
  if (!response.ok) throw new Error(await reason(response));
  const { id } = (await response.json()).data[0];
  $("model").textContent = id;
  return id;
}

// --- a turn on the page ---

function viewOf(turn) {
  let view = views.get(turn);
  if (view) return view;
  view = { box: element("article"), question: element("div", "question", turn.question), answer: element("div", "answer") };
  view.reasoning = aside("Reasoning");
  view.text = element("div", "text");
  view.calls = element("div");
  view.notes = element("div");
  view.foot = element("div", "foot");
  view.answer.append(view.reasoning.box, view.text, view.calls, view.notes, view.foot);
  view.box.append(element("h2", "", "Question"), view.question, element("h2", "", "Answer"), view.answer);
  views.set(turn, view);
  return view;
}

// A folded part of an answer.
function aside(title) {
  const box = element("details", "aside"), summary = element("summary", "", title), text = element("pre");
  box.append(summary, text);
  return { box, summary, text };
}

function paintSoon(turn) {
  const view = viewOf(turn);
  view.frame ??= requestAnimationFrame(() => paint(turn));
}

function paint(turn) {
  const view = viewOf(turn), isLast = turn === current?.turns.at(-1), isRunning = turn.end === null;
  cancelAnimationFrame(view.frame);
  view.frame = undefined;
  const transcript = $("transcript");
  const follows = transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < NEAR_END;
  view.answer.setAttribute("aria-busy", String(isRunning));
  view.answer.classList.toggle("waits", isRunning && !turn.text && !turn.reasoning && !turn.calls.length);
  view.reasoning.box.hidden = !turn.reasoning;
  view.reasoning.summary.textContent = isRunning && !turn.text ? `Reasoning… (${turn.reasoning.length} characters so far)` : "Reasoning";
  view.reasoning.text.textContent = turn.reasoning;
  show(view.text, turn.text);
  for (const [number, call] of turn.calls.entries()) {
    if (!view.calls.children[number]) view.calls.append(aside("").box);
    const [summary, text] = view.calls.children[number].children;
    summary.textContent = `Call of ${call?.name ?? "a tool"}`;
    text.textContent = call?.arguments ?? "";
  }
  while (view.calls.children.length > turn.calls.length) view.calls.lastElementChild.remove();
  view.notes.replaceChildren();
  if (turn.error) view.notes.append(element("p", "failed", turn.error));
  if (turn.end === "length" || turn.end === "stopped") view.notes.append(element("p", "cut", ENDS[turn.end]));
  view.foot.replaceChildren(...(isRunning ? [] : footOf(turn, isLast)));
  if (follows) transcript.scrollTop = transcript.scrollHeight;
}

function footOf(turn, isLast) {
  const parts = [];
  if (turn.text) parts.push(copyButton(() => turn.text, "copy answer"));
  if (isLast) {
    const conversation = current;
    const again = (goesOn) => { answer(conversation, { goesOn }); $("question").focus(); };
    if (turn.text && ENDS[turn.end]) parts.push(button("continue", "continue the answer", () => again(true)));
    parts.push(turn.text ? button("regenerate", "regenerate the answer", () => again(false)) : button("try again", "try again", () => again(false)));
  }
  if (turn.id) {
    const way = element("a", "", "timeline");
    way.href = `ui#${encodeURIComponent(turn.id)}`;
    way.target = "pdmesh-ui"; // one tab of the mesh for all answers
    way.rel = "opener"; // it has the key of this tab then
    way.setAttribute("aria-label", "the answer's timeline in the mesh");
    parts.push(way);
  }
  if (turn.usage) {
    const tokens = turn.usage.completion_tokens, decode_s = (turn.took_ms - turn.ttft_ms) / 1000;
    const rate = tokens > 1 && decode_s > 0.05 ? `, then ${((tokens - 1) / decode_s).toFixed(1)} tokens/s` : "";
    parts.push(element("span", "", `${tokens} ${tokens === 1 ? "token" : "tokens"}, the first after ${(turn.ttft_ms / 1000).toFixed(2)} s${rate}`));
  }
  return parts;
}

// --- the conversations ---

function open(conversation) {
  current = conversation;
  history.replaceState(null, "", `#${conversation.id}`);
  document.title = `${conversation.title || "Chat"} · pdmesh`;
  const { system = "", ...numbers } = conversation.settings;
  for (const field of $("parameters").elements) field.value = field.name === "system" ? system : numbers[field.name] ?? "";
  $("transcript").replaceChildren(...conversation.turns.map((turn) => viewOf(turn).box));
  for (const turn of conversation.turns) paint(turn);
  $("transcript").scrollTop = $("transcript").scrollHeight;
  say("");
  showSide(false);
  showList();
  showState();
}

function showState() {
  const isRunning = running.has(current.id), count = Object.keys(current.settings).length;
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("settings-count").textContent = count ? `${count} set` : "the model's own";
}

function showList() {
  if (document.activeElement?.matches("#list input")) return; // one is being renamed
  const buttons = () => [...$("list").querySelectorAll("button")], focused = buttons().indexOf(document.activeElement);
  $("list").replaceChildren(...conversations.list().map((conversation) => {
    const row = element("li"), title = conversation.title || "New conversation";
    const name = button(title, title, () => { open(conversation); $("question").focus(); });
    name.className = running.has(conversation.id) ? "name running" : "name";
    if (conversation === current) name.setAttribute("aria-current", "true");
    const drop = button("×", `delete ${title}`, () => {
      if (!drop.classList.contains("sure")) {
        drop.className = "sure";
        drop.textContent = "sure?";
        drop.setAttribute("aria-label", `really delete ${title}`);
      } else remove(conversation);
    });
    row.append(name, button("✎", `rename ${title}`, () => rename(conversation, row)), drop);
    return row;
  }));
  buttons()[focused]?.focus();
}

function rename(conversation, row) {
  const field = element("input");
  field.value = conversation.title;
  field.setAttribute("aria-label", "title");
  field.maxLength = 80;
  const end = (title) => {
    field.onblur = null;
    field.remove();
    conversation.title = title.trim() || conversation.title;
    save(conversation);
    if (conversation === current) document.title = `${conversation.title || "Chat"} · pdmesh`;
    showList();
    $("question").focus();
  };
  field.onblur = () => end(field.value);
  field.onkeydown = (event) => {
    if (event.key === "Enter") end(field.value);
    if (event.key === "Escape") end("");
  };
  row.replaceChildren(field);
  field.select();
}

function remove(conversation) {
  running.get(conversation.id)?.abort();
  conversations.remove(conversation.id);
  if (conversation === current) open(conversations.list()[0] ?? conversations.create());
  else showList();
  $("question").focus();
}

function showSide(isOpen) {
  $("side").classList.toggle("open", isOpen);
  $("show-side").setAttribute("aria-expanded", String(isOpen));
}

// --- start ---

$("show-side").onclick = () => showSide(!$("side").classList.contains("open"));
$("new").onclick = () => {
  const empty = conversations.list().find((each) => !each.turns.length);
  open(empty ?? conversations.create({ ...current.settings }));
  $("question").focus();
};
$("stop").onclick = () => {
  running.get(current.id)?.abort();
  $("question").focus();
};
$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running.has(current.id) || !$("parameters").reportValidity()) return;
  $("question").value = "";
  current.title ||= question.split("\n")[0].slice(0, 60);
  document.title = `${current.title} · pdmesh`;
  const before = current.turns.at(-1);
  current.turns.push({ question, ...structuredClone(NEW_ANSWER) });
  if (before) paint(before); // only the last one can be regenerated
  $("transcript").append(viewOf(current.turns.at(-1)).box);
  $("transcript").scrollTop = $("transcript").scrollHeight;
  say("Answering…");
  answer(current);
};
$("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("parameters").oninput = () => {
  current.settings = {};
  for (const { name, value, validity } of $("parameters").elements) {
    if (value && validity.valid) current.settings[name] = NUMBERS.includes(name) ? Number(value) : value;
  }
  save(current);
  showState();
};
$("parameters").onsubmit = (event) => event.preventDefault();
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running.has(current.id) && event.target.closest("#ask, #transcript")) $("stop").click();
});
addEventListener("pagehide", () => {
  for (const [id, stopper] of running) {
    stopper.abort();
    conversations.save(conversations.all.get(id) ?? {});
  }
});
addEventListener("storage", ({ key }) => { // another page of this browser wrote one
  if (!key?.startsWith(PREFIX) || running.has(key.slice(PREFIX.length))) return;
  conversations.load(key);
  if (key === PREFIX + current.id) open(conversations.all.get(current.id) ?? conversations.create());
  else showList();
});

open(conversations.all.get(location.hash.slice(1)) ?? conversations.list()[0] ?? conversations.create());
firstModel().then((name) => { model = name; }, (error) => say(error.message, true));
