// What happened: sentences about instances that do not serve, and the list of events.

export function duration(seconds_) {
  const whole = Math.max(0, Math.floor(seconds_));
  const minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function noteText(note, at) {
  return `${note.cause} ${duration(at - note.at)} ago${note.next ? `; ${note.next}` : ""}`;
}

// Sentences about the instances of a frame, as [name, text].
export function notesOf(frame) {
  const notes = [];
  for (const item of frame.instances) {
    if (item.note) notes.push([item.id, noteText(item.note, frame.at)]);
    if (item.draining) notes.push([item.id, safetyText(item)]);
  }
  return notes;
}

export function safetyText(item) {
  return `is safe to delete: ${item.safe_to_delete ? "yes" : "no"}, ${item.safe_to_delete_why}`;
}

// Times in which instances did not serve, as [name, from_s, to_s] on the mesh's clock.
export function absencesOf(frame) {
  const here = (at) => frame.now_s - (frame.at - at);
  const absences = [];
  for (const event of frame.events ?? []) {
    if (event.away_s) absences.push([event.name, here(event.at) - event.away_s, here(event.at), event.detail]);
  }
  for (const item of frame.instances) {
    if (item.gone) absences.push([item.id, here(item.note.at), Infinity, noteText(item.note, frame.at)]);
  }
  return absences;
}

const BAD = new Set(["lost", "start failed", "ended", "gateway lost", "supervisor lost"]);
const WATCH = new Set(["restarted", "joined again"]);

export function kindOf(what) { return BAD.has(what) ? "bad" : WATCH.has(what) ? "urgent" : ""; }

export function timeOf(at) { return new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23" }); }
