// A box to talk to the model. Each question is a request of its own, so that one can watch it travel.

import { events, reason, request } from "./feed.js";

export function openChat({ form, question, log, model, choose }) {
  const turns = [];

  function say(text, kind) {
    const line = document.createElement("p");
    line.className = kind;
    line.textContent = text;
    log.append(line);
    log.scrollTop = log.scrollHeight;
    return line;
  }

  async function ask(text) {
    turns.push({ role: "user", content: text });
    say(text, "you");
    const line = say("", "model");
    let answer = "", shown = null;
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model: model(), messages: turns, stream: true }),
      });
      if (!response.ok) throw new Error(await reason(response));
      for await (const chunk of events(response)) {
        if (chunk.error) throw new Error(chunk.error.message);
        if (!shown) {
          shown = document.createElement("button");
          shown.type = "button";
          shown.textContent = "its way";
          shown.onclick = () => choose(chunk.id);
          choose(chunk.id);
        }
        answer += chunk.choices[0]?.delta?.content ?? "";
        line.textContent = answer;
        log.scrollTop = log.scrollHeight;
      }
      turns.push({ role: "assistant", content: answer });
      if (shown) line.append(shown);
    } catch (error) {
      turns.pop();
      line.className = "failed";
      line.textContent = error.message;
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text) return;
    question.value = "";
    const button = form.querySelector("button");
    button.disabled = true;
    await ask(text);
    button.disabled = false;
    question.focus();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}
