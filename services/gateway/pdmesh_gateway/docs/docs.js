// /openapi.json for people: each endpoint with its fields, an example, and a form that sends it.

const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const spec = await (await fetch("openapi.json")).json();
const schemas = spec.components.schemas;
const nameOf = (reference) => reference.split("/").pop();

// --- fields ---

// A schema's type in words; names of object types stay names.
function typeOf(schema) {
  if (schema.$ref) return nameOf(schema.$ref);
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.filter((choice) => choice.type !== "null").map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return schema.items ? `list of ${typeOf(schema.items)}` : "list";
  if (schema.type === "object" && schema.additionalProperties?.type) return `object of ${typeOf(schema.additionalProperties)}`;
  return schema.type ?? "anything";
}

// Names of the object types within a schema.
function namesIn(schema) {
  if (schema.$ref) return [nameOf(schema.$ref)];
  const parts = [...(schema.anyOf ?? schema.oneOf ?? []), schema.items, schema.additionalProperties];
  return parts.filter((part) => part && typeof part === "object").flatMap(namesIn);
}

function limitsOf(schema) {
  const parts = [schema, ...(schema.anyOf ?? [])];
  const words = { minimum: "≥", maximum: "≤", exclusiveMinimum: ">", exclusiveMaximum: "<", minItems: "items ≥", maxItems: "items ≤", minLength: "length ≥", maxLength: "length ≤" };
  return parts.flatMap((part) => Object.entries(words).filter(([name]) => name in part).map(([name, sign]) => `${sign} ${part[name]}`)).join(", ");
}

function noteOf(schema) { return [schema.description, limitsOf(schema)].filter(Boolean).join("; "); }

// Text whose parts between backticks are code.
function marked(text) {
  return text.split(/`+/).map((part, index) => (index % 2 ? element("code", { textContent: part }) : part));
}

// A table of an object type's fields. Types within it unfold on demand: some contain themselves.
function fieldsOf(name) {
  const schema = schemas[name], needed = new Set(schema.required ?? []);
  const fields = Object.entries(schema.properties ?? {}).sort(([one], [other]) => needed.has(other) - needed.has(one));
  const hasNotes = fields.some(([, inner]) => noteOf(inner));
  const rows = fields.flatMap(([field, inner]) => {
    const names = [...new Set(namesIn(inner))];
    const isSet = inner.default !== undefined && inner.default !== null;
    const value = isSet ? JSON.stringify(inner.default) : needed.has(field) ? "required" : "";
    const row = element("tr", {},
      element("td", {}, element("code", { textContent: field })),
      element("td", {}, element("code", { textContent: typeOf(inner) })),
      element("td", { className: needed.has(field) ? "needed" : "" }, isSet ? element("code", { textContent: value }) : value),
      ...(hasNotes ? [element("td", { className: "quiet" }, ...marked(noteOf(inner)))] : []));
    const below = names.map((other) => unfolding(other, () => [fieldsOf(other)]));
    return below.length ? [row, element("tr", {}, element("td", { colSpan: hasNotes ? 4 : 3 }, ...below))] : [row];
  });
  const head = element("tr", {}, ...["field", "type", "default", ...(hasNotes ? [""] : [])].map((text) => element("th", { textContent: text })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

function unfolding(title, content) {
  const box = element("details", {}, element("summary", { textContent: title }));
  box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(element("div", {}, ...content())); });
  return box;
}

// --- trying it ---

function tryIt(method, path, operation, body) {
  const inputs = (operation.parameters ?? []).map(({ name }) => element("input", { placeholder: name, ariaLabel: name }));
  const area = element("textarea", { value: body, rows: Math.min(body.split("\n").length + 1, 16), ariaLabel: "request body", spellcheck: false });
  const status = element("span", { className: "quiet" }), answer = element("pre", { hidden: true }), command = element("pre");
  const send = element("button", { textContent: "send" }), stop = element("button", { textContent: "stop", hidden: true });
  const place = () => inputs.reduce((text, input) => text.replace(`{${input.placeholder}}`, encodeURIComponent(input.value)), path).slice(1);
  const showCommand = () => {
    const given = $("key").value ? " \\\n  -H \"Authorization: Bearer $PDMESH_API_KEY\"" : "";
    const data = body ? ` \\\n  -H 'Content-Type: application/json' -d '${area.value.replaceAll("'", "'\\''")}'` : "";
    command.textContent = `curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${new URL(place(), location.href)}${given}${data}`;
  };
  send.onclick = async () => {
    const ending = new AbortController(), began = performance.now();
    const took = () => `${((performance.now() - began) / 1000).toFixed(2)} s`;
    const headers = { ...(body && { "Content-Type": "application/json" }), ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) };
    stop.onclick = () => ending.abort();
    [send.disabled, stop.hidden, answer.hidden, answer.textContent, status.textContent] = [true, false, false, "", "sent"];
    try {
      const response = await fetch(place(), { method: method.toUpperCase(), headers, body: body ? area.value : undefined, signal: ending.signal });
      status.textContent = `${response.status} ${response.statusText}`;
      for await (const text of texts(response)) answer.textContent += text;
      if (response.headers.get("content-type")?.includes("json")) answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
      status.textContent = `${response.status} ${response.statusText}, ${took()}`;
    } catch (error) {
      status.textContent = `${error.message}, ${took()}`;
    }
    [send.disabled, stop.hidden] = [false, true];
  };
  for (const input of [area, ...inputs, $("key")]) input.addEventListener("input", showCommand);
  showCommand();
  return element("div", {}, element("h3", { textContent: "Try it" }), ...inputs, ...(body ? [area] : []), element("div", {}, send, stop, status), answer, element("h3", { textContent: "As a command" }), command);
}

async function* texts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}

// --- the page ---

function contentOf(method, path, operation) {
  const asked = operation.requestBody?.content["application/json"], given = operation.responses["200"].content;
  const example = asked?.example ?? null, parts = [];
  if (asked?.schema) {
    const name = nameOf(asked.schema.$ref);
    parts.push(element("h3", { textContent: "Body" }), element("p", { className: "quiet" }, ...marked(schemas[name].description ?? "")), fieldsOf(name));
  }
  if (given) {
    parts.push(element("h3", { textContent: `Answer: ${Object.keys(given).join(" or ")}` }));
    for (const name of namesIn(given["application/json"].schema)) parts.push(unfolding(name, () => [fieldsOf(name)]));
  }
  parts.push(unfolding("Errors", () => [fieldsOf("ErrorResponse")]));
  return [tryIt(method, path, operation, example === null ? "" : JSON.stringify(example, null, 2)), ...parts];
}

const title = `${spec.info.title} ${spec.info.version}`;
$("title").textContent = document.title = title;
for (const [path, methods] of Object.entries(spec.paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const box = unfolding("", () => contentOf(method, path, operation));
    box.id = `${method}${path}`;
    box.firstChild.append(element("b", { className: method, textContent: method.toUpperCase() }), element("code", { textContent: path }), element("span", { textContent: operation.summary }));
    $("operations").append(box);
  }
}
const refused = spec["x-refused-fields"].map((name) => element("code", { textContent: name }));
$("ignored").textContent = spec["x-ignored-fields-header"];
$("refused").append(...refused.flatMap((node, index) => (index ? [", ", node] : [node])));
$("others").hidden = false;
const linked = document.getElementById(decodeURIComponent(location.hash.slice(1)));
if (linked) { linked.open = true; linked.scrollIntoView(); }
