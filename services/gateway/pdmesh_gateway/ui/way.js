// One request's way through the mesh: a Gantt chart, one row for waiting and one for each instance, above the lines of its record.

const ROW = 18;
const LABEL_WIDTH = 78;
const AXIS = 14;

// Bars {row, from_s, to_s, kind, text} of a request's record. Entries are [at_s, what, instance, detail, figures].
export function barsOf(steps, end_s) {
  const bars = [];
  let waits_from_s = 0;
  const decoding = new Map(); // instance → since when
  const granted = new Map(); // instance that receives → since when
  for (const [at_s, what, where, detail, figures] of steps) {
    if (what.startsWith("queued")) waits_from_s = at_s;
    if (what === "chunk") {
      const from_s = Math.max(at_s - figures.step_s - figures.waited_s, 0);
      if (waits_from_s !== null) bars.push({ row: "queue", from_s: waits_from_s, to_s: from_s, kind: "wait", text: "waits" });
      waits_from_s = null;
      if (figures.waited_s) bars.push({ row: where, from_s, to_s: from_s + figures.waited_s, kind: "wait", text: "waits for KV of other instances" });
      bars.push({ row: where, from_s: from_s + figures.waited_s, to_s: at_s, kind: figures.num_decodes ? "mixed" : "prefill", text: detail });
      if (detail.includes("token")) decoding.set("", at_s);
    }
    if (what === "granted") granted.set(detail.replace(/^to /, "").split(", ")[0], at_s);
    if (what === "landed") {
      const from_s = Math.max(granted.get(where) ?? at_s - figures.duration_s, 0);
      bars.push({ row: where, from_s, to_s: at_s, kind: "move", text: `KV: ${detail}` });
      decoding.set(where, at_s);
    }
    if (what === "placed" || what === "stays to decode") decoding.set(where, null); // from its first token on
    if (what === "finished" || what === "moved away" || what === "retracted" || what === "restarted" || what === "cancelled") {
      for (const [instance, since_s] of decoding) {
        if (!instance || (where && instance !== where)) continue;
        const from_s = since_s ?? decoding.get("") ?? at_s;
        bars.push({ row: instance, from_s, to_s: at_s, kind: "decode", text: `decodes; ${detail || what}` });
        decoding.delete(instance);
      }
      if (what === "retracted" || what === "restarted") waits_from_s = at_s;
    }
  }
  for (const [instance, since_s] of decoding) {
    const from_s = since_s ?? decoding.get("");
    if (instance && from_s !== undefined) bars.push({ row: instance, from_s, to_s: end_s, kind: "decode", text: "decodes" });
  }
  if (waits_from_s !== null) bars.push({ row: "queue", from_s: waits_from_s, to_s: end_s, kind: "wait", text: "waits" });
  return bars;
}

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function label(value_s) {
  return value_s < 1 ? `${(value_s * 1000).toFixed(value_s < 0.01 ? 1 : 0)} ms` : `${value_s.toFixed(1)} s`;
}

// Draws the bars into an SVG as wide as `width` pixels.
export function drawWay(svg, steps, width) {
  const end_s = Math.max(...steps.map((step) => step[0]), 1e-3);
  const bars = barsOf(steps, end_s);
  const rows = [...new Set(bars.map((bar) => bar.row))];
  const height = rows.length * ROW + AXIS;
  const x = (at_s) => LABEL_WIDTH + (at_s / end_s) * (width - LABEL_WIDTH - 4);
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  for (const [number, name] of rows.entries()) {
    svg.append(shape("text", { x: 0, y: number * ROW + 13, class: "row" }, name));
    svg.append(shape("line", { x1: LABEL_WIDTH, x2: width, y1: (number + 1) * ROW - 0.5, y2: (number + 1) * ROW - 0.5 }));
  }
  for (const { row, from_s, to_s, kind, text } of bars) {
    const bar = shape("rect", { x: x(from_s), y: rows.indexOf(row) * ROW + 3, width: Math.max(x(to_s) - x(from_s), 1.5), height: ROW - 6, rx: 1.5, class: kind });
    bar.append(shape("title", {}, `${row}, ${label(from_s)} to ${label(to_s)}: ${text}`));
    svg.append(bar);
  }
  for (const share of [0, 0.5, 1]) {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    svg.append(shape("text", { x: x(share * end_s), y: height - 3, "text-anchor": anchor, class: "axis" }, label(share * end_s)));
  }
}
