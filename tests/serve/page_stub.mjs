// Runs the page's script on a stub of the DOM, with a server that wants an API key and answers by a
// script of its own: `node page_stub.mjs page.html` prints what happened as JSON.
import fs from "fs";

class Element {
  constructor() {
    this.children = [];
    this.listeners = {};
    this.style = {};
    this.value = this.className = this.own = "";
  }
  get textContent() { return this.own + this.children.map((each) => each.textContent ?? each).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  get valueAsNumber() { return Number(this.value); }
  add(option) { this.children.push(option); this.value ||= option.textContent; }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.own = ""; this.children = parts; }
  addEventListener(name, call) { this.listeners[name] = call; }
}

const elements = {};
const byId = (id) => (elements[id] ??= new Element());
const option = (name) => Object.assign(new Element(), { textContent: name });
const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
globalThis.document = { getElementById: byId, addEventListener() {}, createElement: () => new Element() };
globalThis.Option = function (name) { return option(name); };

const methods = { none: 0, draft_model: 4, prompt_lookup: 6, own: 3 };
const speculation = { default: "draft_model", methods };
const card = { id: "tiny", max_model_len: 512, has_chat_template: false, speculation };
const posted = [];
const numLoads = { all: 0 };

function chunk(text, source, drafter = null) {
  const choice = { index: 0, text, sources: [source], drafters: [drafter], finish_reason: null };
  return `data: ${JSON.stringify({ choices: [choice] })}\n\n`;
}

globalThis.fetch = async (path, options) => {
  await later(5);
  if (!options.headers.Authorization) {
    return { ok: false, status: 401, json: async () => ({ error: { message: "an API key" } }) };
  }
  if (path === "v1/models") {
    numLoads.all += 1;
    return { ok: true, json: async () => ({ data: [card] }) };
  }
  const { method } = JSON.parse(options.body).speculation;
  posted.push(JSON.parse(options.body).speculation);
  const drafted = method === "none" ? [] : [chunk("b", "draft", method), chunk("c", "bonus"), chunk("d", "draft", method)];
  const body = [chunk("a", "target"), ...drafted, "data: [DONE]\n\n"];
  return { ok: true, body: new Blob(body).stream() };
};

for (const [id, value] of Object.entries({ k: 5, "max-tokens": 4, temperature: 0, seed: 0, prompt: "x" })) {
  byId(id).value = String(value);
}
byId("compare").checked = false;
const html = fs.readFileSync(process.argv[2], "utf8");
(0, eval)(html.match(/<script>([\s\S]*?)<\/script>/)[1]);
await later(30);
const asked = byId("error").textContent;
byId("key").value = "one";
byId("key").listeners.change(); // Enter in the key field: change, then submit
byId("form").listeners.submit({ preventDefault() {} });
await later(60);
const runs = [];
const remember = () => runs.push({
  classes: byId("speculative").children.map((each) => each.className),
  status: byId("status").textContent,
  legend: byId("legend").children.map((each) => each.textContent),
  title: byId("speculative-title").textContent,
});
remember();
for (const method of ["prompt_lookup", "own", "draft_model"]) {
  byId("method").value = method;
  byId("method").listeners.change();
  byId("form").listeners.submit({ preventDefault() {} });
  await later(60);
  remember();
}
const offered = byId("method").children.map((each) => each.textContent);
const error = byId("error").textContent;
console.log(JSON.stringify({ asked, numLoads: numLoads.all, offered, posted, runs, error }));
