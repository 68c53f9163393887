// Steps as bars, one row an instance, and KV transfers as lines between rows. Only what is in sight is drawn. The rows fill
// the panel, and the list of instances beside them has rows of the same height (--row).

import { seconds } from "./charts.js";
import { absencesOf } from "./history.js";
import { explain } from "./tip.js";

const LABEL_WIDTH = 8;
const AXIS = 18;
const MIN_ROW = 22;
const MAX_ROW = 96;
const NAME_HEIGHT = 17; // of the line above each lane on a narrow screen
const NEAR = 5; // pixels from which a mark or a transfer is explained
const KEPT_S = 70;
const BEHIND_S = 0.4; // frames come a few times a second: draw a little behind, so that time runs smoothly

export const KINDS = [
  ["prefill", "prompt chunks"],
  ["mixed", "chunks and decodes"],
  ["decode", "decodes"],
  ["urgent", "urgent chunk"],
  ["move", "KV transfer"],
  ["bad", "preempted, retracted, restarted or lost"],
  ["away", "away"],
];

export class Timeline {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.rows = new Map(); // instance → row number
    this.decoding = new Map(); // instance → residents, from the last frame
    this.steps = [];
    this.moves = [];
    this.marks = [];
    this.absences = []; // [instance, from_s, to_s, why]
    this.geometry = null; // of what was drawn last
    this.narrow = matchMedia("(max-width: 900px)");
    this.explain = explain(canvas, (x, y) => this.linesAt(x, y));
    this.span_s = 20;
    this.clock = null; // the mesh's seconds at our milliseconds
    this.paused_at_s = null;
    this.chosen = null;
    this.frames = 0;
    this.colours = {};
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.readColours());
    const draw = () => { this.draw(); this.frames += 1; requestAnimationFrame(draw); };
    requestAnimationFrame(draw);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["prefill", "mixed", "decode", "urgent", "move", "bad", "away", "line", "text", "quiet", "panel"]) {
      this.colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
  }

  take(frame) {
    const ours_s = performance.now() / 1000;
    const offset = frame.now_s - ours_s;
    // The first frame sets the clock; later ones move it slowly, unless it is far off (a suspended tab, another mesh).
    this.clock = this.clock === null || Math.abs(offset - this.clock) > 2 ? offset : this.clock + 0.1 * (offset - this.clock);
    this.rows.clear();
    for (const instance of frame.instances) {
      this.rows.set(instance.id, this.rows.size);
      this.decoding.set(instance.id, instance.num_decoding);
    }
    this.absences = absencesOf(frame);
    this.steps.push(...frame.steps);
    this.moves.push(...frame.moves);
    this.marks.push(...frame.marks);
    const oldest = frame.now_s - KEPT_S;
    for (const [list, end] of [[this.steps, 2], [this.moves, 3], [this.marks, 1]]) {
      let cut = 0;
      while (cut < list.length && list[cut][end] < oldest) cut += 1;
      if (cut > 256) list.splice(0, cut);
    }
  }

  now_s() { return this.paused_at_s ?? performance.now() / 1000 + (this.clock ?? 0) - BEHIND_S; }

  pause(on) { this.paused_at_s = on ? this.now_s() : null; }

  draw() {
    const { canvas, pen, colours } = this;
    const panel = canvas.closest(".rows");
    const count = Math.max(this.rows.size, 1);
    const row = Math.max(this.narrow.matches ? NAME_HEIGHT + MIN_ROW : MIN_ROW, Math.min(MAX_ROW, Math.floor((panel.clientHeight - AXIS) / count)));
    const width = Math.max(canvas.parentElement.clientWidth, 120), height = row * count + AXIS;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      panel.style.setProperty("--row", `${row}px`);
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const to_s = this.now_s(), from_s = to_s - this.span_s;
    const x = (at_s) => LABEL_WIDTH + ((at_s - from_s) / this.span_s) * (width - LABEL_WIDTH);
    const top = this.narrow.matches ? NAME_HEIGHT : 1; // of a lane in its row
    const middle = (number) => number * row + (top + row - 1) / 2;
    this.geometry = { x, row, top, middle, from_s, to_s };

    for (const [name, number] of this.rows) {
      const y = number * row;
      if (this.decoding.get(name)) { // residents decode between the planned steps: a thin line says that there are some
        pen.fillStyle = colours.decode;
        pen.globalAlpha = 0.55;
        pen.fillRect(LABEL_WIDTH - 5, y + top, 3, row - 1 - top);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = colours.line;
      pen.fillRect(LABEL_WIDTH, y + row - 1, width - LABEL_WIDTH, 0.5);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LABEL_WIDTH, 0, width - LABEL_WIDTH, height);
    pen.clip();
    pen.fillStyle = colours.away;
    for (const [instance, begin_s, end_s] of this.absences) {
      const number = this.rows.get(instance);
      if (number === undefined || end_s < from_s || begin_s > to_s) continue;
      const left = x(Math.max(begin_s, from_s)), right = x(Math.min(end_s, to_s));
      pen.fillRect(left, number * row + top, Math.max(right - left, 1), row - 1 - top);
    }
    for (const kind of ["decode", "mixed", "prefill", "urgent"]) {
      pen.fillStyle = colours[kind];
      pen.beginPath();
      for (const [instance, begin_s, end_s, tokens, decodes, urgent] of this.steps) {
        if (end_s < from_s || begin_s > to_s) continue;
        const is = urgent ? "urgent" : decodes ? (tokens ? "mixed" : "decode") : "prefill"; // of a dropped chunk no tokens
        const number = this.rows.get(instance);
        if (is !== kind || number === undefined) continue;
        const left = x(begin_s);
        pen.rect(left, number * row + top, Math.max(x(end_s) - left - 0.5, 0.8), row - 1 - top);
      }
      pen.fill();
    }
    for (const [source, destination, begin_s, end_s, , request] of this.moves) {
      const above = this.rows.get(source), below = this.rows.get(destination);
      if (end_s < from_s || begin_s > to_s || above === undefined || below === undefined) continue;
      pen.strokeStyle = colours.move;
      pen.globalAlpha = request === this.chosen ? 1 : 0.45;
      pen.lineWidth = request === this.chosen ? 2 : 1;
      pen.beginPath();
      pen.moveTo(x(begin_s), middle(above));
      pen.lineTo(x(end_s), middle(below));
      pen.stroke();
      pen.globalAlpha = 1;
    }
    for (const [instance, at_s, what, request] of this.marks) {
      const number = this.rows.get(instance);
      if (at_s < from_s || at_s > to_s || number === undefined) continue;
      pen.fillStyle = GOOD.has(what) ? colours.decode : colours.bad;
      const size = request === this.chosen ? 4 : 2.5;
      pen.beginPath();
      pen.arc(x(at_s), middle(number), size, 0, 7);
      pen.fill();
    }
    pen.restore();
    pen.fillStyle = colours.quiet;
    pen.textBaseline = "alphabetic";
    pen.font = "11px system-ui, sans-serif";
    for (let back = 0; back <= 4; back += 1) {
      const at_s = to_s - (this.span_s * back) / 4;
      const text = back ? `−${((this.span_s * back) / 4).toFixed(this.span_s < 8 ? 1 : 0)} s` : "now";
      pen.textAlign = back ? "center" : "right";
      pen.fillText(text, Math.max(x(at_s), LABEL_WIDTH + 14), height - 4);
    }
    pen.textAlign = "left";
    this.explain();
  }

  // What lies under a pixel of the canvas: marks before transfers, steps and absences.
  linesAt(x, y) {
    if (this.geometry === null) return [];
    const { row, top, middle, x: xOf, from_s, to_s } = this.geometry;
    const number = Math.floor(y / row), at_s = from_s + ((x - LABEL_WIDTH) / (xOf(to_s) - LABEL_WIDTH)) * (to_s - from_s);
    const name = [...this.rows].find(([, place]) => place === number)?.[0];
    if (name === undefined || x < LABEL_WIDTH) return [];
    const ago = (then_s) => `${Math.max(to_s - then_s, 0).toFixed(1)} s ago`;
    const lines = [];
    for (const [instance, then_s, what, request] of this.marks) {
      const near = instance === name && Math.hypot(xOf(then_s) - x, middle(number) - y) < NEAR;
      if (near && lines.length < 5) lines.push([what, request, ago(then_s)].filter(Boolean).join(" "));
    }
    for (const [source, destination, begin_s, end_s, bytes, request] of this.moves) {
      const above = this.rows.get(source), below = this.rows.get(destination);
      if (lines.length || above === undefined || below === undefined) continue;
      if (toSegment(x, y, xOf(begin_s), middle(above), xOf(end_s), middle(below)) > NEAR) continue;
      const rate = bytes / Math.max(end_s - begin_s, 1e-6);
      lines.push(`KV ${source} → ${destination}`, `${size(bytes)} in ${seconds(end_s - begin_s)} (${size(rate)}/s), ${ago(end_s)}`, `request ${request}`);
    }
    if (lines.length || y < number * row + top) return lines;
    const slack_s = (to_s - from_s) / (xOf(to_s) - xOf(from_s)); // a short step is one pixel wide
    const step = this.steps.findLast(([instance, begin_s, end_s]) => instance === name && begin_s <= at_s && at_s <= Math.max(end_s, begin_s + slack_s));
    if (step !== undefined) {
      const [, begin_s, end_s, tokens, decodes, urgent] = step;
      const work = [tokens && `${tokens} prompt tokens`, decodes && `${decodes} decodes`].filter(Boolean).join(" and ") || "a dropped chunk";
      return [`${name}: ${urgent ? "urgent, " : ""}${work}`, `${seconds(end_s - begin_s)}, ended ${ago(end_s)}`];
    }
    const absence = this.absences.find(([instance, begin_s, end_s]) => instance === name && begin_s <= at_s && at_s <= end_s);
    return absence === undefined ? [`${name}: idle`] : [`${name}: away`, absence[3]];
  }
}

const GOOD = new Set(["joined", "reports again"]);

function size(bytes) {
  return bytes >= 1e9 ? `${(bytes / 1e9).toFixed(2)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${Math.ceil(bytes / 1e3)} KB`;
}

// Distance of a point from a line between two others, in pixels.
function toSegment(x, y, x1, y1, x2, y2) {
  const dx = x2 - x1, dy = y2 - y1;
  const share = Math.max(0, Math.min(1, ((x - x1) * dx + (y - y1) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(x1 + share * dx - x, y1 + share * dy - y);
}
