// The engine: numbers and pictures, at most ten times a second.

const FREE = -1, CACHED = -2, SHARED = -3;
const STEP_WIDTH = 4, LEAF = 15, MOST_ROWS = 20, TYPICAL = 0.95;
const steps = [];  // [number, milliseconds, tokens computed, running, tokens that came out]
let seen = null, pointed = null;
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(name);
const ownColour = (row) => `hsl(${(row * 137.5) % 360} 45% ${colour("--row-light")})`;
const number = (value) => value.toLocaleString("en");
const several = (count, thing) => `${number(count)} ${thing}${count === 1 ? "" : "s"}`;

function canvas(id) {
  const element = $(id), scale = devicePixelRatio || 1;
  const width = element.clientWidth, height = element.clientHeight;
  if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
  }
  const context = element.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui";
  return [context, width, height];
}

function drawSteps() {
  const [context, width, height] = canvas("steps");
  const shown = steps.slice(-Math.floor(width / STEP_WIDTH));
  // A percentile, so that one slow step does not flatten all others; what is higher is cut off and capped.
  const sorted = shown.map((step) => step[1]).sort((a, b) => a - b);
  const tallest = sorted.at(-1) ?? 0;
  const most = Math.max(1, Math.min(tallest, 1.25 * (sorted[Math.floor(TYPICAL * (sorted.length - 1))] ?? 0)));
  const start = width - shown.length * STEP_WIDTH, room = height - 18;
  context.fillStyle = colour("--line");
  context.fillRect(0, height - 1, width, 1);
  context.fillRect(0, 17, width, 1);
  shown.forEach(([, ms, tokens, running], place) => {
    context.fillStyle = tokens > running ? colour("--prompt") : colour("--accent");
    const high = Math.max(1.5, Math.min(1, ms / most) * room);
    context.fillRect(start + place * STEP_WIDTH, height - 1 - high, STEP_WIDTH - 1, high);
    if (ms > most) {
      context.fillStyle = colour("--bad");
      context.fillRect(start + place * STEP_WIDTH, height - 1 - high, STEP_WIDTH - 1, 3);
    }
  });
  context.fillStyle = colour("--soft");
  const above = tallest > most ? `; the slowest, cut off: ${tallest.toFixed(1)} ms` : "";
  context.fillText(shown.length ? `${most.toFixed(1)} ms${above}` : "", 0, 11);
  const at = pointed?.id === "steps" ? Math.floor((pointed.x - start) / STEP_WIDTH) : shown.length - 1;
  const step = shown[Math.min(Math.max(0, at), shown.length - 1)];
  if (step) {
    $("step").textContent = `${number(step[0])}: ${step[1].toFixed(1)} ms, ${several(step[2], "token")}, ${step[3]} running`;
  }
}

function drawBlocks({ blocks, stride }, size) {
  const [context, width, height] = canvas("blocks");
  let side = Math.min(14, Math.max(3, Math.floor(Math.sqrt((width * height) / Math.max(1, blocks.length)))));
  while (side > 3 && Math.ceil(blocks.length / Math.floor(width / side)) * side > height) side -= 1;
  const across = Math.max(1, Math.floor(width / side));
  const fixed = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--shared") };
  blocks.forEach((owner, block) => {
    context.fillStyle = fixed[owner] ?? ownColour(owner);
    context.fillRect((block % across) * side, Math.floor(block / across) * side, side - 1, side - 1);
  });
  $("stride").textContent = stride > 1 ? `of ${size} tokens; one of ${stride} is drawn` : `of ${size} tokens each`;
  const high = Math.ceil(blocks.length / across) * side;
  if (blocks.length) $("blocks").style.height = `${Math.max(24, Math.min(132, high))}px`;
}

/** Blocks to the right, one line for each leaf: a parent is as high as all that begins with it. */
function drawTree(tree, size) {
  if (!tree) {
    $("tree").hidden = true;
    $("tree_says").textContent = "this index keeps none";
    return;
  }
  const nodes = tree.nodes.map(([above, blocks, pins]) => ({ above, blocks, pins, start: 0, top: 0, high: 0, kids: [] }));
  for (const node of nodes) {
    const parent = nodes[node.above];
    if (parent) {
      parent.kids.push(node);
      node.start = parent.start + parent.blocks;
    }
  }
  for (const node of [...nodes].reverse()) {  // parents stand before their children
    node.high = Math.max(1, node.kids.reduce((sum, kid) => sum + kid.high, 0));
  }
  let leaves = 0;
  for (const node of nodes) {
    if (node.above < 0) {
      node.top = leaves;
      leaves += node.high;
    }
    let top = node.top;
    for (const kid of node.kids) {
      kid.top = top;
      top += kid.high;
    }
  }
  $("tree").style.height = `${Math.max(1, leaves) * LEAF}px`;
  const [context, width] = canvas("tree");
  const unit = width / Math.max(8, ...nodes.map((node) => node.start + node.blocks));
  for (const { start, blocks, top, high, pins } of nodes) {
    context.fillStyle = pins ? colour("--accent") : colour("--cached");
    context.beginPath();
    context.roundRect(start * unit, top * LEAF, Math.max(2, blocks * unit - 1.5), high * LEAF - 2, 2);
    context.fill();
    const text = number(blocks * size);
    if (blocks * unit > context.measureText(text).width + 10) {
      context.fillStyle = pins ? colour("--on-accent") : colour("--ink");
      context.fillText(text, start * unit + 5, top * LEAF + (high * LEAF) / 2 + 3.5);
    }
  }
  const used = nodes.filter((node) => node.pins).length;
  $("tree_says").textContent = nodes.length
    ? `${several(nodes.length + tree.more, "node")}, ${used} in use${tree.more ? `; ${nodes.length} are drawn` : ""}`
    : "nothing is cached yet";
}

function drawRows(rows, running) {
  $("rows").className = rows.length > 8 ? "many" : "";
  $("rows").replaceChildren(...rows.slice(0, MOST_ROWS).map((row) => {
    const line = make("li"), bar = make("span", "bar"), found = make("b"), part = make("i");
    const share = (tokens) => `${(100 * tokens) / row.limit}%`;
    found.style.width = share(Math.min(row.cached, row.computed));
    part.style.width = share(Math.max(0, row.computed - row.cached));
    part.style.background = ownColour(row.row);
    bar.append(found, part);
    const says = make("span", "", `${number(row.tokens)} of ${number(row.limit)}`);
    if (row.cached) says.append(make("span", "more", `, ${number(row.cached)} found`));
    line.append(make("span", "", String(row.row)), bar, says);
    return line;
  }));
  const more = running - Math.min(rows.length, MOST_ROWS);
  $("rows_say").textContent = !running ? "no request runs" : more > 0 ? `and ${more} more` : "tokens there are, and may be";
}

function rate() {
  const last = steps.at(-1);
  if (!last) return 0;
  const recent = steps.slice(-30);
  const spent = recent.reduce((sum, step) => sum + step[1], 0) / 1e3;
  return recent.reduce((sum, step) => sum + step[4], 0) / Math.max(spent, 1e-6);
}

function draw(event) {
  const fresh = event.steps.length > 0;
  seen = event;
  $("state").textContent = event.state;
  $("state").className = event.state === "ready" ? "ready" : "";
  $("engine").classList.remove("stale");
  if (event.state === "ready" && !$("model").textContent) showModel();
  $("running").textContent = event.running;
  $("rows_all").textContent = event.max_rows ? `of ${number(event.max_rows)}` : "";
  $("waiting").textContent = number(event.waiting);
  $("used").textContent = number(event.blocks - event.free_blocks);
  $("total").textContent = event.blocks ? `of ${number(event.blocks)}` : "";
  $("hits").textContent = event.lookup_tokens ? `${Math.round((100 * event.hit_tokens) / event.lookup_tokens)} %` : "–";
  $("preemptions").textContent = number(event.preemptions);
  steps.push(...event.steps);
  if (steps.length > 2000) steps.splice(0, steps.length - 1000);
  $("rate").textContent = event.running && fresh ? number(Math.round(rate())) : event.running ? $("rate").textContent : "0";
  picture();
}

/** All that is drawn, from the last event. */
function picture() {
  drawSteps();
  if (!seen?.picture) return;
  const { picture: shown, block_size: size, running } = seen;
  drawBlocks(shown, size);
  drawTree(shown.tree, size);
  drawRows(running ? shown.rows : [], running);
}

async function watch() {
  for (;;) {
    try {
      const response = await ask("events");
      if (response.status === 401) {
        $("state").textContent = "needs a key";
        await unlocked();
        continue;
      }
      if (!response.ok) throw new Error();
      for await (const data of events(response)) draw(JSON.parse(data));
    } catch { /* the server is away: try again */ }
    $("state").textContent = "not reached; trying again";
    $("engine").classList.add("stale");  // what it shows is no longer so
    $("state").className = "";
    await new Promise((done) => setTimeout(done, 2000));
  }
}

$("steps").addEventListener("pointermove", (event) => {
  pointed = { id: "steps", x: event.offsetX };
  drawSteps();
});
$("steps").addEventListener("pointerleave", () => { pointed = null; drawSteps(); });
addEventListener("resize", picture);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", picture);
begin(stored(TALK + stores.session[OPEN]) ?? fresh());
watch();
showModel();
