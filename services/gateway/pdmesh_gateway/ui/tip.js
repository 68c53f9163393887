// The one box that says what is under the pointer.

const tip = document.getElementById("tip");

export function hideTip() { tip.hidden = true; }

// Shows lines of text beside a point of the window; without lines, hides the box.
function showTip(lines, left, top) {
  tip.hidden = lines.length === 0;
  if (tip.hidden) return;
  const text = lines.join("\n");
  if (tip.textContent !== text) tip.textContent = text;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(left + 12, innerWidth - width - 4))}px`;
  tip.style.top = `${top + 16 + height > innerHeight ? top - height - 8 : top + 16}px`;
}

// Calls `linesAt(x, y)` for the pointer over an element, in its pixels. The returned function repeats that: things move.
export function explain(element, linesAt) {
  let place = null; // of the pointer in the window
  const update = () => {
    if (place === null) return;
    const box = element.getBoundingClientRect();
    showTip(linesAt(place[0] - box.left, place[1] - box.top), ...place);
  };
  element.addEventListener("pointermove", (event) => { place = [event.clientX, event.clientY]; update(); });
  for (const name of ["pointerleave", "pointercancel"]) element.addEventListener(name, () => { place = null; hideTip(); });
  return update;
}
