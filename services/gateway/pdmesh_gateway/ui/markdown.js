// Markdown as a tree of plain objects, and the tree as elements. Text of a model only ever becomes text nodes, and each
// tag is a literal of this file. Parsing takes time linear in the text.

const MAX_DEPTH = 8; // of lists and quotes within each other
const MAX_OPEN = 16; // unclosed emphases
const MAX_LABEL = 500, MAX_URL = 2000; // characters of a link

const FENCE = /^( *)(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const BEGINNINGS = [FENCE, HEADING, RULE, QUOTE, ITEM];

// A node is a text, or {tag, children} with attributes.
export function parse(text) { return blocks(text.replaceAll("\r", "").split("\n"), 0); }

// --- blocks: each reader returns a node and the number of the next line, or null ---

function blocks(lines, depth) {
  const found = [];
  let paragraph = [];
  const end = () => {
    if (paragraph.length) found.push({ tag: "p", children: inline(paragraph.join("\n")) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length;) {
    let block = null;
    if (lines[at].trim()) for (const read of [fence, heading, rule, quote, list, table]) if ((block = read(lines, at, depth))) break;
    if (block || !lines[at].trim()) end();
    else paragraph.push(lines[at].trimStart());
    if (block) found.push(block[0]);
    at = block ? block[1] : at + 1;
  }
  end();
  return found;
}

function fence(lines, at) {
  const opened = FENCE.exec(lines[at]);
  if (!opened) return null;
  const [, indent, mark, about] = opened, inner = [], language = about.trim().split(/\s/)[0];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (line.startsWith(mark) && line === mark[0].repeat(line.length)) return [{ tag: "pre", language, children: [inner.join("\n")] }, at + 1];
    inner.push(lines[at].slice(Math.min(indent.length, leadOf(lines[at]))));
  }
  return [{ tag: "pre", language, children: [inner.join("\n")] }, at]; // the closing fence has not come yet
}

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]) ?? [];
  return marks ? [{ tag: `h${Math.min(marks.length + 2, 6)}`, children: inline(text.trim()) }, at + 1] : null;
}

function rule(lines, at) { return RULE.test(lines[at]) ? [{ tag: "hr", children: [] }, at + 1] : null; }

function quote(lines, at, depth) {
  if (depth >= MAX_DEPTH) return null;
  const inner = [];
  for (let line; at < lines.length && (line = QUOTE.exec(lines[at])); at += 1) inner.push(line[1]);
  return inner.length ? [{ tag: "blockquote", children: blocks(inner, depth + 1) }, at] : null;
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= MAX_DEPTH) return null;
  const indent = first[1].length, isOrdered = /\d/.test(first[2]), items = [];
  const itemAt = (number) => {
    const item = number < lines.length && !RULE.test(lines[number]) ? ITEM.exec(lines[number]) : null;
    return item && item[1].length <= indent + 1 && /\d/.test(item[2]) === isOrdered ? item : null;
  };
  for (let item; (item = itemAt(at));) {
    const inner = [item[3] ?? ""], width = item[1].length + item[2].length + 1;
    for (at += 1; at < lines.length;) {
      let next = at;
      while (next < lines.length && !lines[next].trim()) next += 1;
      if (next === lines.length) { at = next; break; }
      const line = lines[next], lead = leadOf(line);
      if (lead >= indent + 2) { while (at++ < next) inner.push(""); inner.push(line.slice(Math.min(lead, width))); }
      else if (next === at && !BEGINNINGS.some((begins) => begins.test(line))) inner.push(line); // a paragraph goes on
      else { if (itemAt(next)) at = next; break; }
      at = next + 1;
    }
    const [head, ...rest] = blocks(inner, depth + 1);
    items.push({ tag: "li", children: head?.tag === "p" ? [...head.children, ...rest] : head ? [head, ...rest] : [] });
  }
  return [isOrdered ? { tag: "ol", start: parseInt(first[2], 10), children: items } : { tag: "ul", children: items }, at];
}

function table(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const head = cellsOf(lines[at]), rules = cellsOf(lines[at + 1]);
  if (head.length !== rules.length || !rules.every((cell) => /^:?-+:?$/.test(cell))) return null;
  const sides = rules.map((cell) => (!cell.endsWith(":") ? "" : cell.startsWith(":") ? "center" : "right"));
  const row = (tag, cells) => ({ tag: "tr", children: cells.slice(0, sides.length).map((cell, number) => ({ tag, className: sides[number], children: inline(cell) })) });
  const rows = [];
  for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) rows.push(row("td", cellsOf(lines[at])));
  const parts = [{ tag: "thead", children: [row("th", head)] }, { tag: "tbody", children: rows }];
  return [{ tag: "div", className: "table", children: [{ tag: "table", children: parts }] }, at];
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function leadOf(line) { return line.length - line.trimStart().length; }

// --- within a line ---

const MARK = /\\([!-/:-@[-`{-~])|(`+)|<br ?\/?>|<(https?:\/\/[^\s<>]{1,2000})>|(https?:\/\/[^\s<>`|]{1,2000})|(!?\[)|(\*+|_+|~~)/g;

function inline(text, inLink = false) {
  const out = [], open = []; // unclosed emphases: [mark, its place in `out`]
  const waiting = new Map(); // mark → its number in `open`
  let done = 0;
  const say = (node) => { if (node !== "") out.push(node); };
  MARK.lastIndex = 0;
  for (let found; (found = MARK.exec(text));) {
    const [all, escaped, ticks, bracketed, bare, bracket, stars] = found;
    let end = found.index + all.length, node = all;
    if (escaped) node = escaped;
    else if (ticks) {
      const close = closingTicks(text, end, ticks.length);
      if (close >= 0) [node, end] = [{ tag: "code", children: [text.slice(end, close).replace(/^ (.+) $/s, "$1")] }, close + ticks.length];
    } else if (bracketed) node = link(bracketed, [bracketed], inLink) ?? all;
    else if (bare) {
      const url = withoutTail(bare);
      [node, end] = [link(url, [url], inLink) ?? url, found.index + url.length];
    } else if (bracket) {
      const whole = inLink ? null : linkAt(text, end); // each level would be parsed twice
      const made = whole && link(whole.url, inline(whole.label, true), inLink);
      if (made) [node, end] = [made, whole.end];
      else [node, end] = [text[found.index], found.index + 1];
    } else if (!stars) node = { tag: "br", children: [] };
    say(text.slice(done, found.index));
    if (stars) emphasis(stars, text[found.index - 1] ?? " ", text[end] ?? " ");
    else say(node);
    done = MARK.lastIndex = end;
  }
  say(text.slice(done));
  return joined(out);

  function emphasis(run, before, after) {
    const kind = run[0], isWord = kind === "_";
    const mayOpen = /\S/.test(after) && !(isWord && /[\p{L}\p{N}]/u.test(before));
    const mayClose = /\S/.test(before) && !(isWord && /[\p{L}\p{N}]/u.test(after));
    let rest = run.length > 3 ? 0 : run.length; // more than three are no emphasis
    if (rest === 0) return say(run);
    while (mayClose && rest > 0) {
      const mark = [kind.repeat(2), kind].filter((each) => each.length <= rest && waiting.get(each)).sort((a, b) => placeOf(b) - placeOf(a))[0];
      if (mark === undefined) break;
      let last;
      do { last = open.pop(); waiting.set(last[0], waiting.get(last[0]) - 1); } while (last[0] !== mark);
      const tag = kind === "~" ? "s" : mark.length === 2 ? "strong" : "em";
      const children = joined(out.splice(last[1]).slice(1));
      say({ tag, children });
      rest -= mark.length;
    }
    for (const mark of rest === 3 ? [kind.repeat(2), kind] : rest ? [kind.repeat(rest)] : []) {
      if (mayOpen && open.length < MAX_OPEN) {
        open.push([mark, out.length]);
        waiting.set(mark, (waiting.get(mark) ?? 0) + 1);
      }
      out.push(mark); // text, unless its end comes
    }
  }

  function placeOf(mark) { return open.findLastIndex(([each]) => each === mark); }
}

function joined(nodes) {
  const out = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof out.at(-1) === "string") out.push(out.pop() + node);
    else out.push(node);
  }
  return out;
}

function closingTicks(text, from, length) {
  for (let at = from; (at = text.indexOf("`", at)) >= 0;) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === length) return at;
    at = end;
  }
  return -1;
}

// The label and the address of "label](address)" at a place, or null.
function linkAt(text, from) {
  let depth = 1, at = from;
  for (const limit = from + MAX_LABEL; depth > 0; at += 1) {
    if (at >= limit || at >= text.length) return null;
    if (text[at] === "\\") at += 1;
    else if (text[at] === "[") depth += 1;
    else if (text[at] === "]") depth -= 1;
  }
  if (text[at] !== "(") return null;
  const label = text.slice(from, at - 1), begin = at + 1;
  for (depth = 1, at = begin; depth > 0; at += 1) {
    if (at >= begin + MAX_URL || at >= text.length) return null;
    if (text[at] === "(") depth += 1;
    else if (text[at] === ")") depth -= 1;
  }
  return { label, url: text.slice(begin, at - 1).trim().split(/\s/)[0].replace(/^<|>$/g, ""), end: at };
}

function withoutTail(url) {
  let end = url.length;
  while (end > 0 && /[.,;:!?'"*_~\])}]/.test(url[end - 1]) && !(url[end - 1] === ")" && url.slice(0, end).includes("("))) end -= 1;
  return url.slice(0, end);
}

// A link to an address of http or https; null for any other, and for one with a user name, which may imitate a host.
function link(address, children, inLink) {
  let url;
  try { url = new URL(address); } catch { return null; }
  if (inLink || !["http:", "https:"].includes(url.protocol) || url.username || url.password) return null;
  return { tag: "a", href: url.href, children };
}

// --- elements ---

const shown = new WeakMap(); // element → its block as JSON

// Shows a text within an element. Unchanged blocks keep their elements, so a selection survives a stream.
export function show(container, text) {
  const nodes = parse(text);
  for (const [number, node] of nodes.entries()) {
    const source = JSON.stringify(node), old = container.children[number];
    if (old && shown.get(old) === source) continue;
    const made = build(node);
    shown.set(made, source);
    if (old) old.replaceWith(made);
    else container.append(made);
  }
  while (container.children.length > nodes.length) container.lastElementChild.remove();
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  if (node.tag === "pre") return codeBox(node);
  const made = document.createElement(node.tag);
  if (node.className) made.className = node.className;
  if (node.start !== undefined) made.start = node.start;
  if (node.href) Object.assign(made, { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer" });
  for (const child of node.children) made.append(build(child));
  return made;
}

function codeBox({ language, children }) {
  const box = document.createElement("div"), head = document.createElement("div"), code = document.createElement("code");
  const pre = document.createElement("pre");
  box.className = "code";
  code.textContent = children[0];
  pre.tabIndex = 0; // so that keys can scroll it
  pre.append(code);
  head.append(language || "text", copyButton(() => code.textContent, "copy code"));
  box.append(head, pre);
  return box;
}

// A button that copies a text, and says so for a moment.
export function copyButton(text, label) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "copy";
  button.setAttribute("aria-label", label);
  button.onclick = async () => {
    button.textContent = (await copied(text())) ? "copied" : "cannot copy";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without TLS, a browser offers a clipboard to pages of its own machine only
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
