// Conversations with the model, kept in this browser: one entry of its storage each. The least recent is dropped first.

const MAX_CONVERSATIONS = 100;
const MAX_CHARACTERS = 2_000_000; // of all entries; browsers keep about five million

export class Conversations {
  // `storage` is null where the browser allows none.
  constructor(storage, prefix) {
    this.storage = storage;
    this.prefix = prefix;
    this.all = new Map();
    this.sizes = new Map(); // conversation id → characters of its entry
    for (const name of Object.keys(storage ?? {})) this.load(name);
  }

  // Reads an entry, which another tab may have written. Forgets the conversation if the entry is gone.
  load(name) {
    if (!name.startsWith(this.prefix)) return;
    const id = name.slice(this.prefix.length), text = this.storage.getItem(name);
    this.forget(id);
    if (text === null) return;
    try {
      const conversation = JSON.parse(text);
      for (const turn of conversation.turns) turn.end ??= "stopped"; // the page was closed during the answer
      this.all.set(id, conversation);
      this.sizes.set(id, text.length);
    } catch { /* of another version: ignored */ }
  }

  list() { return [...this.all.values()].sort((a, b) => b.at - a.at); }

  create(settings = {}) {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    const conversation = { id, title: "", at: Date.now(), settings, turns: [] };
    this.all.set(id, conversation);
    return conversation;
  }

  // Writes a conversation. Returns false if the browser refuses.
  save(conversation) {
    if (this.all.get(conversation.id) !== conversation || !conversation.turns.length) return true; // deleted, or empty
    const text = JSON.stringify(conversation);
    this.sizes.set(conversation.id, text.length);
    const size = () => [...this.sizes.values()].reduce((sum, each) => sum + each, 0);
    while ((this.sizes.size > MAX_CONVERSATIONS || size() > MAX_CHARACTERS) && this.dropOldest(conversation));
    do {
      try {
        this.storage.setItem(this.prefix + conversation.id, text);
        return true;
      } catch { /* full, or not allowed */ }
    } while (this.dropOldest(conversation));
    return false;
  }

  dropOldest(except) {
    const oldest = this.list().findLast((each) => each !== except && this.sizes.has(each.id));
    if (oldest) this.remove(oldest.id);
    return oldest !== undefined;
  }

  remove(id) {
    this.forget(id);
    this.storage?.removeItem(this.prefix + id);
  }

  forget(id) {
    this.all.delete(id);
    this.sizes.delete(id);
  }
}
