// Conversations. Each is an entry of its own in the browser's store, so that two tabs do not undo each other.

const TALK = "ladder.talk.", MOST_TALKS = 50, TITLE = 60;
const OPEN = "ladder.open";  // of this tab: the conversation that a reload shows again
const names = () => Object.keys(stores.local).filter((name) => name.startsWith(TALK))
  .sort((one, other) => other.slice(TALK.length) - one.slice(TALK.length));
const fresh = () => ({ id: Date.now(), system: "", messages: [] });
let talk = fresh(), editing = -1, stopping = null, alone = 0;

function keep(kept) {
  if (kept.deleted) return;  // while its last answer was on its way
  try {
    stores.local[TALK + kept.id] = JSON.stringify(kept);
    for (const name of names().slice(MOST_TALKS)) delete stores.local[name];
  } catch { /* the store is full: the conversation lives as long as the page */ }
  list();
}

function stored(name) {
  try {
    const found = JSON.parse(stores.local[name]);
    return Array.isArray(found.messages) && found.messages.length ? found : null;
  } catch {
    return null;
  }
}

function title({ messages }) {
  const text = String(messages[0].content);
  return text.length > TITLE ? `${text.slice(0, TITLE)}…` : text;
}

function list() {
  const entries = names().map((name) => [name, stored(name)]).filter(([, found]) => found);
  const options = entries.map(([name, found]) => new Option(title(found), name));
  const first = talk.messages.length ? title(talk) : entries.length ? "A new conversation" : "No conversation is kept yet";
  const isKept = Boolean(stores.local[TALK + talk.id]);
  $("kept").replaceChildren(new Option(isKept ? "A new conversation" : first, ""), ...options);
  $("kept").value = isKept ? TALK + talk.id : "";
  stores.session[OPEN] = talk.id;
}

/** Show a conversation, which may be a fresh one. */
function begin(next) {
  stopping?.abort();
  talk = next;
  editing = -1;
  $("system").value = talk.system ?? "";
  $("speed").textContent = "";
  redraw();
  list();
}

function redraw() {
  $("tints").hidden = !talk.messages.some((message) => message.marks?.length);
  $("talk").replaceChildren(...(talk.messages.length ? talk.messages.map(shown) : [greeting()]));
  $("talk").scrollTop = $("talk").scrollHeight;
}

const EXAMPLES = [
  ["Why is the sky blue?", ""],
  ["Say five times: never say never again.", ""],
  ["Describe a city as JSON.", JSON.stringify({ type: "object", additionalProperties: false,
    required: ["name", "country", "coastal"], properties: { name: { type: "string", maxLength: 20 },
      country: { type: "string", maxLength: 20 }, coastal: { type: "boolean" } } }, null, 1)],
];

function button(text, act, name = "") {
  const made = make("button", name, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    $("speed").textContent = "copied";
  } catch {
    $("speed").textContent = "this browser copies only on https and localhost";
  }
}

function greeting() {
  const empty = make("div", "empty", "Say something, and watch the engine serve it.");
  const buttons = make("div");
  for (const [text, schema] of EXAMPLES) {
    buttons.append(button(text, () => {
      $("schema").value = schema;
      $("settings").open = Boolean(schema);
      say(text);
    }, "quiet"));
  }
  empty.append(buttons);
  return empty;
}

const ENDS = { length: "Cut off at max_tokens.", stopped: "Stopped before its end." };

/** A message as an element, with how it ended, and what can be done to it. */
function shown(message) {
  const turn = make("div", `turn ${message.role}`), body = make("div", "body"), tools = make("div", "tools");
  fill(body, message);
  const place = () => talk.messages.indexOf(message);
  if (message.role !== "error") tools.append(button("Copy", () => copy(message.content)));
  if (message.role === "user") {
    tools.append(button("Edit", () => {
      if (stopping) return;
      editing = place();
      $("say").value = message.content;
      $("speed").textContent = "what follows it is replaced; Escape keeps it";
      $("say").focus();
    }));
  }
  if (message.role === "assistant") {
    tools.append(button("Regenerate", () => {
      if (stopping) return;
      talk.messages.length = place();
      redraw();
      answer();
    }));
  }
  if (message.retry) tools.append(button("Try again", () => $("form").requestSubmit()));
  turn.append(body, make("div", "soft note", ENDS[message.ended]), tools);
  return turn;
}

/** Append a turn; scroll along only if the reader is at the end. */
function show(turn) {
  $("talk").querySelector(".empty")?.remove();
  $("talk").append(turn);
  $("talk").scrollTop = $("talk").scrollHeight;
}

function following(change) {
  const view = $("talk"), follows = view.scrollHeight - view.scrollTop - view.clientHeight < 40;
  change();
  if (follows) view.scrollTop = view.scrollHeight;
}

function request(messages) {
  const system = $("system").value.trim(), said = messages.map(({ role, content }) => ({ role, content }));
  const body = { messages: system ? [{ role: "system", content: system }, ...said] : said,
    stream: true, stream_options: { include_usage: true }, return_token_marks: true };
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") body[name] = Number($(name).value);
  }
  const schema = $("schema").value.trim();
  if (schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  }
  return body;
}

/** Events of a completion. Throws what the server says is wrong. */
async function* completion(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
  throw new Error("The server ended before its answer did.");
}

/** Run `work(signal)`, which Stop ends; what goes wrong is a turn of its own. Returns true at its own end. */
async function stoppable(work) {
  const mine = stopping = new AbortController();
  const busy = (is) => {
    for (const id of ["send", "many"]) $(id).disabled = is;
    $("stop").disabled = !is;
  };
  busy(true);
  $("speed").textContent = "";
  try {
    await work(mine.signal);
    return true;
  } catch (error) {
    // A question without an answer goes back to its field, from where it can be sent again.
    if (error.name !== "AbortError") show(shown({ role: "error", content: inWords(error), retry: true }));
    return false;
  } finally {
    if (stopping === mine) {
      stopping = null;
      busy(false);
      $("say").focus();
    }
  }
}

const SECONDS_A_PICTURE = 0.1;  // an answer is drawn so often: the browser is the engine's neighbour
async function answer() {
  const mine = talk, message = { role: "assistant", content: "", marks: [] };
  const turn = shown(message), started = performance.now();
  let first = 0, last = 0, count = 0, drawn = 0, reason = "stopped";
  turn.classList.add("busy");
  turn.ariaBusy = "true";
  show(turn);
  const ended = await stoppable(async (signal) => {
    for await (const event of completion(request(mine.messages), signal)) {
      if (event.usage) count = event.usage.completion_tokens;
      const choice = event.choices[0], piece = choice?.delta.content;
      reason = choice?.finish_reason ?? reason;
      if (!piece) continue;
      last = performance.now();
      first ||= last;
      const marks = choice.token_marks ?? [[piece, ""]];
      if (!event.usage) count += marks.length;
      for (const [part, mark] of marks) {
        const from = message.content.length, to = from + part.length, before = message.marks.at(-1);
        if (mark && before?.[1] === from && before[2] === mark) before[1] = to;
        else if (mark && part) message.marks.push([from, to, mark]);
        message.content += part;
      }
      if (last - drawn < SECONDS_A_PICTURE * 1e3) continue;
      drawn = last;
      following(() => fill(turn.querySelector(".body"), message));
    }
  });
  turn.classList.remove("busy");
  turn.ariaBusy = "false";
  if (ENDS[reason]) message.ended = reason;
  if (message.content) {
    mine.messages.push(message);
    keep(mine);
  } else {  // the question goes back to its field
    const asked = mine.messages.pop();
    if (mine === talk && !$("say").value) $("say").value = asked.content;
  }
  if (mine !== talk) return;
  if (message.content) following(() => turn.replaceWith(shown(message)));
  else turn.remove();
  if (message.marks.length) $("tints").hidden = false;
  if (ended && !first) $("speed").textContent = "the answer has no text";
  if (!first) return;
  alone = count > 1 ? (count - 1) / Math.max(1e-3, (last - first) / 1e3) : 0;
  $("speed").textContent = `${several(count, "token")}: the first after ${Math.round(first - started)} ms`
    + (alone ? `, then ${alone.toFixed(1)} a second` : "");
}

const MANY = 20, SUBJECT = "Write a few sentences about a place by the sea.";
/** One request with `n` answers: a browser opens no more than six connections, and the engine serves each alike. */
async function many() {
  const text = $("say").value.trim() || SUBJECT, mine = talk, cells = Array.from({ length: MANY }, () => make("div"));
  const crowd = make("div", "crowd");
  for (const cell of cells) cell.append(make("span"));
  crowd.append(...cells);
  show(shown({ role: "user", content: text }));
  show(crowd);
  let first = 0, last = 0, count = 0;
  await stoppable(async (signal) => {
    for await (const event of completion({ ...request([{ role: "user", content: text }]), n: MANY }, signal)) {
      for (const choice of event.choices) {
        const cell = cells[choice.index];
        if (choice.finish_reason) cell.className = "done";
        if (!choice.delta.content) continue;
        last = performance.now();
        first ||= last;
        count += choice.token_marks?.length ?? 1;
        cell.firstChild.append(choice.delta.content);
      }
      if (event.usage) count = event.usage.completion_tokens;
    }
  });
  if (mine !== talk || !first) return;
  const rate = count / Math.max(1e-3, (last - first) / 1e3);
  $("speed").textContent = `${MANY} answers, ${several(count, "token")}: ${rate.toFixed(1)} a second together`
    + (alone ? `; one alone had ${alone.toFixed(1)}` : "");
}

/** Return true if the schema is JSON, or show it. */
function readable() {
  try {
    const schema = $("schema").value.trim();
    if (schema) JSON.parse(schema);
    $("schema").classList.remove("bad");
    $("schema_says").textContent = "";
    return true;
  } catch (error) {
    $("schema").classList.add("bad");
    $("settings").open = true;
    $("schema").focus();
    $("schema_says").textContent = `This is no JSON: ${error.message}`;
    return false;
  }
}

function say(text) {
  if (!readable()) return;
  if (editing >= 0) talk.messages.length = editing;
  editing = -1;
  $("say").value = "";
  talk.system = $("system").value.trim();
  talk.messages.push({ role: "user", content: text });
  redraw();
  list();
  answer();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("say").value.trim();
  if (text && !stopping) say(text);
});
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("many").addEventListener("click", () => { if (!stopping && readable()) many(); });
$("stop").addEventListener("click", () => stopping?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  stopping?.abort();
  if (editing < 0) return;
  editing = -1;
  $("say").value = $("speed").textContent = "";
});
$("clear").addEventListener("click", () => {
  begin(fresh());
  $("say").focus();
});
$("kept").addEventListener("change", () => begin(stored($("kept").value) ?? fresh()));
$("forget").addEventListener("click", () => {
  stopping?.abort();
  talk.deleted = true;
  delete stores.local[TALK + talk.id];
  begin(fresh());
});
