// The last two minutes as four small charts: tokens a second, TTFT and TPOT of each request, and the share of KV in use.

import { explain } from "./tip.js";

const KEPT_S = 120;
const WINDOW_S = 10; // percentiles are over the requests of so long
const TICK_S = 1;
const FIRST_S = 15; // a page that was just opened shows so long
const GUTTER = 44; // pixels for the labels of the scale
const NEAR_S = 2; // a point of a line is explained from so far

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.1) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

const whole = (value) => (value < 10000 ? String(Math.round(value)) : `${(value / 1000).toFixed(0)}K`);
const percent = (value) => `${Math.round(100 * value)} %`;

function percentile(sorted, share) { return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]; }

// Points [at_s, value], the oldest first; of a line a null value is a gap.
class Series {
  constructor(colour, name, { dots = false } = {}) { Object.assign(this, { colour, name, dots, points: [] }); }

  add(at_s, value) {
    this.points.push([at_s, value]);
    while (this.points.length && this.points[0][0] < at_s - KEPT_S) this.points.shift();
  }

  since(at_s) { return this.points.filter((point) => point[0] >= at_s).map((point) => point[1]); }
}

class Chart {
  constructor(list, title, hint, series, { format, isLog = false, top = null }) {
    Object.assign(this, { series, format, isLog, top });
    const item = document.createElement("li");
    const head = document.createElement("h2");
    this.value = document.createElement("output");
    this.window = document.createElement("small");
    this.canvas = document.createElement("canvas");
    item.title = hint;
    head.append(title, this.window, this.value);
    item.append(head, this.canvas);
    list.append(item);
    this.canvas.setAttribute("role", "img");
    this.title = title;
    this.shown = null; // how points lie on the canvas that was drawn last
    this.update = explain(this.canvas, (x, y) => this.linesAt(x, y));
  }

  // Says a value, and over which time it was taken.
  say(text, window) {
    if (this.value.textContent === text && this.window.textContent === window) return;
    this.value.textContent = text;
    this.window.textContent = window;
    this.canvas.setAttribute("aria-label", `${this.title}, ${window}: ${text}`);
  }

  // What lies under a pixel: the nearest dot, or each line's value then.
  linesAt(x, y) {
    if (this.shown === null) return [];
    const { now_s, atX, xOf, yOf } = this.shown, at_s = atX(x);
    const ago = (then_s) => `${Math.max(now_s - then_s, 0).toFixed(1)} s ago`;
    const lines = [];
    for (const { name, dots, points } of this.series) {
      const [distance, point] = nearest(points, ([then_s, value]) =>
        value === null ? Infinity : dots ? Math.hypot(xOf(then_s) - x, yOf(value) - y) : Math.abs(then_s - at_s));
      if (distance < (dots ? 8 : NEAR_S)) lines.push(`${name} ${this.format(point[1])}, ${ago(point[0])}`);
    }
    return lines;
  }

  draw(from_s, now_s, colours) {
    const box = this.canvas.getBoundingClientRect();
    const ratio = devicePixelRatio || 1, { width, height } = box;
    if (!width || !height) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const values = this.series.flatMap((series) => series.points.map((point) => point[1])).filter((value) => value !== null);
    const [low, high] = this.bounds(values);
    const scale = this.isLog ? Math.log : (value) => value;
    const y = (value) => height - 2 - ((scale(Math.max(value, low)) - scale(low)) / (scale(high) - scale(low))) * (height - 14);
    const span_s = Math.min(Math.max(now_s - from_s, FIRST_S), KEPT_S);
    const right = width - GUTTER;
    const x = (at_s) => right - ((now_s - at_s) / span_s) * right;
    this.shown = { now_s, xOf: x, yOf: y, atX: (pixel) => now_s - ((right - pixel) / right) * span_s };
    pen.font = "10px system-ui, sans-serif";
    pen.fillStyle = colours.quiet;
    pen.strokeStyle = colours.line;
    pen.textAlign = "left";
    for (const value of this.isLog ? powersOf10(low, high) : [high]) {
      pen.beginPath();
      pen.moveTo(0, y(value));
      pen.lineTo(right, y(value));
      pen.stroke();
      if (value === high || y(value) - y(high) > 12 && value === low * 10) pen.fillText(this.format(value), right + 4, y(value) + 4);
    }
    for (const { points, colour, dots } of this.series) {
      pen.fillStyle = pen.strokeStyle = colours[colour];
      if (dots) {
        pen.globalAlpha = 0.6;
        for (const [at_s, value] of points) pen.fillRect(x(at_s) - 1, y(value) - 1, 2.5, 2.5);
        pen.globalAlpha = 1;
        continue;
      }
      pen.lineWidth = 1.5;
      pen.beginPath();
      let isDown = false;
      for (const [at_s, value] of points) {
        if (value !== null) pen[isDown ? "lineTo" : "moveTo"](x(at_s), y(value));
        isDown = value !== null;
      }
      pen.stroke();
    }
    this.update();
  }

  bounds(values) {
    const most = Math.max(...values, 0);
    if (!this.isLog) return [0, this.top ?? Math.max(nice(most), 10)];
    const least = Math.min(...values, most || 0.01);
    return [10 ** Math.floor(Math.log10(least)), 10 ** Math.ceil(Math.log10((most || 0.1) * 1.01))];
  }
}

// The next of 1, 2, 5, 10, 20, … that is not below `value`.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

function powersOf10(low, high) {
  const count = Math.round(Math.log10(high / low));
  return Array.from({ length: count }, (_, number) => (number === count - 1 ? high : low * 10 ** (number + 1)));
}

// The item with the least `distance`, and that; without items an infinite one.
function nearest(items, distance) {
  return items.reduce((best, item) => { const far = distance(item); return far < best[0] ? [far, item] : best; }, [Infinity, null]);
}

export class Charts {
  constructor(list, colours) {
    this.colours = colours;
    this.output = new Series("decode", "output tokens/s");
    this.prompt = new Series("prefill", "prompt tokens/s");
    this.ttft = [new Series("prefill", "TTFT", { dots: true }), new Series("prefill", "median TTFT")];
    this.tpot = [new Series("decode", "TPOT", { dots: true }), new Series("decode", "median TPOT")];
    this.kv = Object.fromEntries(["prefill", "decode", "mixed"].map((role) => [role, new Series(role, `KV in use, ${role}`)]));
    const latency = { format: seconds, isLog: true };
    this.charts = {
      rate: new Chart(list, "tokens/s", "output tokens that this gateway delivered (green), prompt tokens that the mesh computed (blue)", [this.prompt, this.output], { format: whole }),
      ttft: new Chart(list, "TTFT p50 / p99", `time to first token: a dot for each request of this gateway, a line for the median of ${WINDOW_S} s`, this.ttft, latency),
      tpot: new Chart(list, "TPOT p50 / p99", `time per output token: a dot for each request of this gateway, a line for the median of ${WINDOW_S} s`, this.tpot, latency),
      kv: new Chart(list, "KV in use", "share of KV blocks held, by role of the instances", Object.values(this.kv), { format: percent, top: 1 }),
    };
    this.first_s = null;
    this.last = null; // [now_s, output tokens] of the last tick
    this.num_prompt_tokens = 0;
  }

  take(frame) {
    const now_s = frame.now_s;
    if (this.first_s === null || now_s < this.first_s) this.first_s = now_s;
    for (const value of frame.ttfts_s) this.ttft[0].add(now_s, value);
    for (const value of frame.tpots_s) this.tpot[0].add(now_s, value);
    for (const step of frame.steps) this.num_prompt_tokens += step[3];
    if (this.last !== null && now_s >= this.last[0] && now_s < this.last[0] + TICK_S) return;
    if (this.last !== null && now_s > this.last[0]) {
      const elapsed_s = now_s - this.last[0];
      const rate = Math.max(frame.num_output_tokens - this.last[1], 0) / elapsed_s;
      this.output.add(now_s, rate);
      this.prompt.add(now_s, this.num_prompt_tokens / elapsed_s);
      this.charts.rate.say(`${whole(rate)} out, ${whole(this.num_prompt_tokens / elapsed_s)} in`, `last ${Math.round(elapsed_s)} s`);
    }
    this.last = [now_s, frame.num_output_tokens];
    this.num_prompt_tokens = 0;
    for (const [name, [dots, line]] of [["ttft", this.ttft], ["tpot", this.tpot]]) {
      const recent = dots.since(now_s - WINDOW_S).sort((a, b) => a - b);
      line.add(now_s, recent.length ? percentile(recent, 0.5) : null);
      const all = recent.length ? recent : dots.since(0).sort((a, b) => a - b);
      const window = recent.length ? `last ${WINDOW_S} s` : `last ${KEPT_S / 60} min`;
      this.charts[name].say(all.length ? `${seconds(percentile(all, 0.5))} / ${seconds(percentile(all, 0.99))}` : "–", window);
    }
    const shares = [];
    for (const [role, series] of Object.entries(this.kv)) {
      const those = frame.instances.filter((instance) => instance.role === role);
      const total = those.reduce((sum, instance) => sum + instance.num_blocks, 0);
      const held = those.reduce((sum, instance) => sum + instance.num_held_blocks, 0);
      series.add(now_s, total ? held / total : null);
      if (total) shares.push(`${role} ${percent(held / total)}`);
    }
    this.charts.kv.say(shares.join(", ") || "–", "now");
    this.draw();
  }

  draw() {
    if (this.last === null) return;
    for (const chart of Object.values(this.charts)) chart.draw(this.first_s, this.last[0], this.colours());
  }
}
