// What the page asks of its server: events of a stream, and the key.

const $ = (id) => document.getElementById(id);
const make = (tag, name = "", text = "") => {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;  // never as HTML: a model may say anything
  return made;
};

// Server-sent events of a fetch: EventSource can neither POST nor tell what a status was.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
  }
}

// The key, where the server wants one. The page itself needs none; all that it asks for does.

const stores = { local: {}, session: {} };  // a browser that forbids them keeps nothing
try { Object.assign(stores, { local: localStorage, session: sessionStorage }); } catch { /* as above */ }

async function ask(path, options = {}) {
  const key = stores.session["ladder.key"];
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401 && $("door").hidden) {
    $("door").hidden = false;
    $("door_says").textContent = key ? "The key is wrong." : "It is kept until this tab is closed.";
    $("key").focus();
  }
  return response;
}

/** What went wrong, in words: browsers say "Failed to fetch" where no server answers. */
const inWords = (error) => error instanceof TypeError ? "The server cannot be reached. Your message is kept; try again." : error.message;

const unlocked = () => new Promise((done) => addEventListener("unlocked", done, { once: true }));
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    $("door_says").textContent = "No key has such characters.";
    return;
  }
  stores.session["ladder.key"] = key;
  $("key").value = "";
  $("door").hidden = true;
  dispatchEvent(new Event("unlocked"));
  showModel();
  $("say").focus();
});

async function showModel() {
  try {
    const card = (await (await ask("v1/models")).json()).data[0];
    $("model").textContent = card.id;
    for (const [name, value] of Object.entries(card.default_sampling_params ?? {})) {  // what an empty field means
      if ($(name)) $(name).placeholder = value;
    }
  } catch { /* the state says so */ }
}
