// Markdown as nodes, of lines { text, at }: where they stand in the message, because its tokens have tints.
// `leaf(text, at)` makes the nodes of a text without markup. No text ever becomes HTML.

const FENCE = /^\s*(```+|~~~+)[^`]*$/, HEADING = /^(#{1,6})\s+/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/, QUOTE = /^\s?>\s?/;
const ITEM = /^\s*([-*+]|\d{1,9}[.)])\s+/, COLUMNS = /^(?=[^-]*-)[\s|:-]+$/;
// No markup is longer than 300 characters: each place of a line is looked at once, however many marks it has.
const INLINE = new RegExp([/\\([\\`*_{}[\]()#+.!|-])/, /(`{1,3})(.{1,300}?)\2/, /\*\*(?=\S)(.{1,300}?)\*\*/,
  /\*(?=\S)(.{1,300}?)\*/, /(?<!\w)_(?=\S)(.{1,300}?)_(?!\w)/,
  /\[([^\][]{1,300})\]\((https?:\/\/[^)\s]{1,300})\)/].map((kind) => kind.source).join("|"), "g");
const TAGS = [[3, "code"], [4, "strong"], [5, "em"], [6, "em"], [7, "a"]];  // by their group of INLINE
const DEEPEST = 10;  // lists and quotes in each other
const cut = ({ text, at }, count) => ({ text: text.slice(count), at: at + count });
const indent = (text) => text.search(/\S|$/);

function inline(into, line, leaf) {
  let done = 0;
  for (const found of line.text.matchAll(INLINE)) {
    into.append(...leaf(line.text.slice(done, found.index), line.at + done));
    done = found.index + found[0].length;
    const [group, tag] = TAGS.find(([group]) => found[group] !== undefined) ?? [1];
    const before = found.index + (found[2]?.length ?? (tag === "strong" ? 2 : 1));
    const inside = { text: found[group], at: line.at + before };
    const element = tag ? make(tag) : into;
    if (tag === "a") Object.assign(element, { href: found[8], title: found[8], target: "_blank", rel: "noopener noreferrer" });
    if (tag && tag !== "code") inline(element, inside, leaf);
    else element.append(...leaf(inside.text, inside.at));
    if (tag) into.append(element);
  }
  into.append(...leaf(line.text.slice(done), line.at + done));
}

function markdown(lines, leaf, depth = 0) {
  const made = document.createDocumentFragment();
  let at = 0;
  const take = (test) => {
    const first = at;
    while (at < lines.length && test(lines[at].text)) at += 1;
    return lines.slice(first, at);
  };
  const after = new Array(lines.length + 1).fill("");  // of each line, the first from there that is not empty
  for (let from = lines.length - 1; from >= 0; from -= 1) {
    after[from] = lines[from].text.trim() ? lines[from].text : after[from + 1];
  }
  const next = (from) => after[from];
  while (at < lines.length) {
    const { text } = lines[at];
    let found, element;
    if (!text.trim()) {
      at += 1;
      continue;
    }
    if ((found = FENCE.exec(text))) {
      at += 1;
      const code = make("code");
      for (const line of take((other) => !other.trim().startsWith(found[1]))) code.append(...leaf(line.text, line.at), "\n");
      at += 1;
      element = make("pre");
      element.append(button("Copy", () => copy(code.textContent)), code);
    } else if ((found = HEADING.exec(text))) {
      element = make(`h${Math.min(4, found[1].length + 1)}`);
      inline(element, cut(lines[at++], found[0].length), leaf);
    } else if (RULE.test(text)) {
      element = make("hr");
      at += 1;
    } else if (QUOTE.test(text) && depth < DEEPEST) {
      element = make("blockquote");
      const inside = take((other) => QUOTE.test(other));
      element.append(markdown(inside.map((line) => cut(line, QUOTE.exec(line.text)[0].length)), leaf, depth + 1));
    } else if ((found = ITEM.exec(text)) && depth < DEEPEST) {
      const ordered = /\d/.test(found[1]), edge = indent(text);
      const sibling = (other) => indent(other) <= edge && /\d/.test(ITEM.exec(other)?.[1] ?? "") === ordered && ITEM.test(other);
      element = make(ordered ? "ol" : "ul");
      if (ordered) element.start = parseInt(found[1], 10);
      while (sibling(next(at))) {
        take((other) => !other.trim());
        const item = make("li"), width = ITEM.exec(lines[at].text)[0].length;
        inline(item, cut(lines[at++], width), leaf);
        const inside = take(() => indent(next(at)) > edge);
        item.append(markdown(inside.map((line) => cut(line, Math.min(width, indent(line.text)))), leaf, depth + 1));
        element.append(item);
      }
    } else if (text.includes("|") && lines[at + 1]?.text.includes("|") && COLUMNS.test(lines[at + 1].text)) {
      element = make("table");
      take((other) => other.includes("|")).forEach((row, place) => {
        const line = make("tr");
        for (const cell of place === 1 ? [] : row.text.matchAll(/[^|\s]([^|]*[^|\s])?/g)) {
          const box = make(place ? "td" : "th");
          inline(box, { text: cell[0], at: row.at + cell.index }, leaf);
          line.append(box);
        }
        if (place !== 1) element.append(line);
      });
    } else {
      element = make("p");
      inline(element, lines[at++], leaf);
      const more = take((other) => other.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(other)));
      for (const line of more) {
        element.append("\n");
        inline(element, line, leaf);
      }
    }
    made.append(element);
  }
  return made;
}

/** Makes the nodes of a part of a text, tinted by `marks`: [from, to, name]. */
const tinted = (marks) => (text, at) => {
  const nodes = [], end = at + text.length;
  let done = at;
  for (const [from, to, mark] of marks) {
    if (to <= done || from >= end) continue;
    if (from > done) nodes.push(text.slice(done - at, from - at));
    const until = Math.min(to, end);
    nodes.push(make("span", mark, text.slice(Math.max(from, done) - at, until - at)));
    done = until;
  }
  if (done < end) nodes.push(text.slice(done - at));
  return nodes;
};

function fill(body, { role, content, marks }) {
  const leaf = tinted(marks ?? []), plain = role !== "assistant" || /^\s*[{[]/.test(content);  // JSON keeps its lines
  body.className = plain ? "body plain" : "body";
  let at = 0;
  const lines = content.split("\n").map((text) => ({ text, at: (at += text.length + 1) - text.length - 1 }));
  body.replaceChildren(...(plain ? leaf(content, 0) : [markdown(lines, leaf)]));
}
