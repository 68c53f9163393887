// The page's one connection: server-sent events, read with fetch so that a key can go with the request.

const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 8000;

let key = sessionStorage.getItem("pdmesh-key") ?? "";

// The key that a person types into the page's dialog; empty if none.
function askForKey() {
  const dialog = document.getElementById("ask-key");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(document.getElementById("key").value), { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

// A fetch with the key, which asks for one when there is none or it is refused.
export async function request(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    key = await askForKey();
    if (!key) return response;
    sessionStorage.setItem("pdmesh-key", key);
  }
}

// The data of each event of a response, parsed; comments and the end mark are skipped.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const block = rest.slice(0, end);
        rest = rest.slice(end + 2);
        for (const line of block.split("\n")) {
          if (!line.startsWith("data:")) continue;
          const data = line.slice(5).trim();
          if (data === "[DONE]") return;
          yield JSON.parse(data);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Calls `take` for each frame of the mesh's activity and `lost` whenever the stream breaks; connects again for good.
export async function follow(path, take, lost) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    try {
      const response = await request(path);
      if (!response.ok) throw new Error(await reason(response));
      for await (const frame of events(response)) {
        pause = FIRST_PAUSE_MS;
        take(frame);
      }
      lost("the stream ended");
    } catch (error) {
      lost(error.message);
    }
    await new Promise((resume) => setTimeout(resume, pause * (0.5 + Math.random() / 2)));
    pause = Math.min(2 * pause, LAST_PAUSE_MS);
  }
}

export async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
