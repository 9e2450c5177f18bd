// Markdown as nodes, of lines. No text ever becomes HTML.

const FENCE = /^\s*(```+|~~~+)[^`]*$/, HEADING = /^(#{1,6})\s+/, RULE = /^\s*([-*_])(\s*\1){2,}\s*$/, QUOTE = /^\s?>\s?/;
const ITEM = /^\s*([-*+]|\d{1,9}[.)])\s+/, COLUMNS = /^[\s|:-]*-[\s|:-]*$/;
const INLINE = new RegExp([/\\([\\`*_{}[\]()#+.!|-])/, /(`+)(.+?)\2/, /\*\*(?=\S)(.+?)\*\*/, /\*(?=\S)(.+?)\*/,
  /(?<!\w)_(?=\S)(.+?)_(?!\w)/, /\[([^\]]+)\]\((https?:\/\/[^)\s]+)\)/].map((kind) => kind.source).join("|"));
const TAGS = [[3, "code"], [4, "strong"], [5, "em"], [6, "em"], [7, "a"]];  // by their group of INLINE
const DEEPEST = 10;  // lists and quotes in each other
const indent = (text) => text.search(/\S|$/);

function inline(into, line) {
  for (let found; (found = INLINE.exec(line)); line = line.slice(found.index + found[0].length)) {
    into.append(line.slice(0, found.index));
    const [group, tag] = TAGS.find(([group]) => found[group] !== undefined) ?? [1];
    const element = tag ? make(tag) : into;
    if (tag === "a") Object.assign(element, { href: found[8], title: found[8], target: "_blank", rel: "noopener noreferrer" });
    if (tag && tag !== "code") inline(element, found[group]);
    else element.append(found[group]);
    if (tag) into.append(element);
  }
  into.append(line);
}

function markdown(lines, depth = 0) {
  const made = document.createDocumentFragment();
  let at = 0;
  const take = (test) => {
    const first = at;
    while (at < lines.length && test(lines[at])) at += 1;
    return lines.slice(first, at);
  };
  const next = (from) => {  // line that is not empty
    while (from < lines.length && !lines[from].trim()) from += 1;
    return lines[from] ?? "";
  };
  while (at < lines.length) {
    const text = lines[at];
    let found, element;
    if (!text.trim()) {
      at += 1;
      continue;
    }
    if ((found = FENCE.exec(text))) {
      at += 1;
      const code = make("code");
      for (const line of take((other) => !other.trim().startsWith(found[1]))) code.append(line, "\n");
      at += 1;
      element = make("pre");
      element.append(button("Copy", () => copy(code.textContent)), code);
    } else if ((found = HEADING.exec(text))) {
      element = make(`h${Math.min(4, found[1].length + 1)}`);
      inline(element, lines[at++].slice(found[0].length));
    } else if (RULE.test(text)) {
      element = make("hr");
      at += 1;
    } else if (QUOTE.test(text) && depth < DEEPEST) {
      element = make("blockquote");
      const inside = take((other) => QUOTE.test(other));
      element.append(markdown(inside.map((line) => line.replace(QUOTE, "")), depth + 1));
    } else if ((found = ITEM.exec(text)) && depth < DEEPEST) {
      const ordered = /\d/.test(found[1]), edge = indent(text);
      const sibling = (other) => indent(other) <= edge && /\d/.test(ITEM.exec(other)?.[1] ?? "") === ordered && ITEM.test(other);
      element = make(ordered ? "ol" : "ul");
      if (ordered) element.start = parseInt(found[1], 10);
      while (sibling(next(at))) {
        take((other) => !other.trim());
        const item = make("li"), width = ITEM.exec(lines[at])[0].length;
        inline(item, lines[at++].slice(width));
        const inside = take(() => indent(next(at)) > edge);
        item.append(markdown(inside.map((line) => line.slice(Math.min(width, indent(line)))), depth + 1));
        element.append(item);
      }
    } else if (text.includes("|") && lines[at + 1]?.includes("|") && COLUMNS.test(lines[at + 1])) {
      element = make("table");
      take((other) => other.includes("|")).forEach((row, place) => {
        const line = make("tr");
        for (const cell of place === 1 ? [] : row.matchAll(/[^|\s]([^|]*[^|\s])?/g)) {
          const box = make(place ? "td" : "th");
          inline(box, cell[0]);
          line.append(box);
        }
        if (place !== 1) element.append(line);
      });
    } else {
      element = make("p");
      inline(element, lines[at++]);
      const more = take((other) => other.trim() && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(other)));
      for (const line of more) {
        element.append("\n");
        inline(element, line);
      }
    }
    made.append(element);
  }
  return made;
}

function fill(body, { role, content }) {
  const plain = role !== "assistant" || /^\s*[{[]/.test(content);  // JSON keeps its lines
  body.className = plain ? "body plain" : "body";
  body.replaceChildren(plain ? content : markdown(content.split("\n")));
}
