// Steps as bars, one row an instance, and KV transfers as lines between rows. Only what is in sight is drawn. The rows fill
// the panel, and the list of instances beside them has rows of the same height (--row).

const LABEL_WIDTH = 8;
const AXIS = 18;
const MIN_ROW = 22;
const MAX_ROW = 180;
const KEPT_S = 70;
const BEHIND_S = 0.4; // frames come a few times a second: draw a little behind, so that time runs smoothly

export const KINDS = [
  ["prefill", "prompt chunks"],
  ["mixed", "chunks and decodes"],
  ["decode", "decodes"],
  ["urgent", "urgent chunk"],
  ["move", "KV transfer"],
  ["bad", "preempted, retracted, restarted or lost"],
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
    for (const name of ["prefill", "mixed", "decode", "urgent", "move", "bad", "line", "text", "quiet", "panel"]) {
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
    const row = Math.max(MIN_ROW, Math.min(MAX_ROW, Math.floor((panel.clientHeight - AXIS) / count)));
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

    for (const [name, number] of this.rows) {
      const y = number * row;
      if (this.decoding.get(name)) { // residents decode between the planned steps: a thin line says that there are some
        pen.fillStyle = colours.decode;
        pen.globalAlpha = 0.55;
        pen.fillRect(LABEL_WIDTH - 5, y + 1, 3, row - 2);
        pen.globalAlpha = 1;
      }
      pen.fillStyle = colours.line;
      pen.fillRect(LABEL_WIDTH, y + row - 1, width - LABEL_WIDTH, 0.5);
    }
    pen.save();
    pen.beginPath();
    pen.rect(LABEL_WIDTH, 0, width - LABEL_WIDTH, height);
    pen.clip();
    for (const kind of ["decode", "mixed", "prefill", "urgent"]) {
      pen.fillStyle = colours[kind];
      pen.beginPath();
      for (const [instance, begin_s, end_s, tokens, decodes, urgent] of this.steps) {
        if (end_s < from_s || begin_s > to_s) continue;
        const is = urgent ? "urgent" : decodes ? (tokens ? "mixed" : "decode") : "prefill"; // of a dropped chunk no tokens
        const number = this.rows.get(instance);
        if (is !== kind || number === undefined) continue;
        const left = x(begin_s);
        pen.rect(left, number * row + 1, Math.max(x(end_s) - left - 0.5, 0.8), row - 2);
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
      pen.moveTo(x(begin_s), above * row + row / 2);
      pen.lineTo(x(end_s), below * row + row / 2);
      pen.stroke();
      pen.globalAlpha = 1;
    }
    for (const [instance, at_s, , request] of this.marks) {
      const number = this.rows.get(instance);
      if (at_s < from_s || at_s > to_s || number === undefined) continue;
      pen.fillStyle = colours.bad;
      const size = request === this.chosen ? 4 : 2.5;
      pen.beginPath();
      pen.arc(x(at_s), number * row + row / 2, size, 0, 7);
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
  }
}
