// Markdown of answers. Model output is untrusted: marked produces HTML, raw HTML in the text is escaped, and DOMPurify keeps only
// the elements and attributes listed here. Images are never loaded; they become links.
//
// MarkdownStream renders a text that arrives in parts. All blocks but the last one are final, so only the last block is rendered
// again. A code block, which can be long, is extended in place. The time that marked needs can grow with the square of the size of
// a block, and deep nesting can exhaust the stack, so the size of a block is limited: a larger block is displayed as plain text. The
// limit is lowered after a slow parse. A parse can also be slow because the machine is busy, so its result is used in any case.
// drawScheduler() limits the rate of draws. The cost of a long answer therefore grows linearly.

import {Lexer, Marked} from "./vendor/marked.esm.js";
import {copyText, element, icon} from "./util.js";

const MAX_BLOCK = 16384; // maximum number of characters in a block
const MIN_BLOCK = 4096; // the limit after slow parses
const SLOW_MS = 250; // a parse that takes longer lowers the limit
const MAX_PLAIN = 4; // after this many blocks beyond the limit, the rest of the text is displayed as plain text
const PART = 4096; // a stored text is rendered in parts of this size

// ---- text to HTML

const ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"};
const escape = text => text.replace(/[&<>"']/g, c => ENTITIES[c]);
const HARMLESS_TAG = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: token => (HARMLESS_TAG.test(token.text.trim()) ? token.text : escape(token.text)),
    image: token => `<a href="${escape(token.href)}">${escape("image: " + (token.text || token.href))}</a>`,
    checkbox: token => (token.checked ? "☑ " : "☐ "),
  },
});

// ---- HTML to DOM nodes

const RULES = {
  ALLOWED_TAGS: [
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "kbd",
    "li",
    "ol",
    "p",
    "pre",
    "strong",
    "sub",
    "sup",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // these attributes are not URLs, so the following pattern does not apply to them
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

window.DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.hasAttribute("class") && !/^language-[\w+#.-]{1,30}$/.test(node.getAttribute("class"))) node.removeAttribute("class");
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
  if (node.hasAttribute("href")) node.setAttribute("title", node.getAttribute("href")); // the target of a link is never hidden
});

export const sanitize = html => window.DOMPurify.sanitize(html, RULES);

// Adds a copy button to code blocks, and a scrollable frame to tables.
function decorate(fragment) {
  for (const code of fragment.querySelectorAll("pre > code")) {
    const pre = code.parentElement,
      frame = codeFrame(code, code.className.replace(/^language-/, ""));
    pre.replaceWith(frame);
    frame.append(pre);
    pre.tabIndex = 0;
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", {class: "table", tabindex: "0"});
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function codeFrame(code, language) {
  const label = element("span", {}, "Copy");
  const button = element("button", {type: "button", class: "plain copy-code", "aria-label": "Copy code"}, icon("copy"), label);
  button.addEventListener("click", async () => {
    label.textContent = (await copyText(code.textContent.replace(/\n$/, ""))) ? "Copied" : "Failed";
    setTimeout(() => {
      label.textContent = "Copy";
    }, 2000);
  });
  return element("div", {class: "code"}, element("div", {class: "code-head"}, element("span", {}, language || "text"), button));
}

// ---- streams

const FENCE = /^(?:(`{3,})([^`\n]*)|(~{3,})([^\n]*))\n/;

// Returns the index of the first block that more text can change: the last block, or the one before it while the last line is
// incomplete. For example, "2" after a list becomes part of the list if "2. text" follows.
function firstOpenBlock(tokens) {
  const previous = from => {
    let at = from;
    while (at > 0 && tokens[at].type === "space") at--;
    return Math.max(0, at);
  };
  const last = previous(tokens.length - 1);
  return last > 0 && !tokens[last].raw.includes("\n") && last === tokens.length - 1 ? previous(last - 1) : last;
}

export class MarkdownStream {
  #tail = ""; // text that is not final
  #end; // the nodes after this comment belong to the tail and are replaced by the next draw
  #fence = null; // open code block: {closing, complete, partial}
  #links = {}; // link definitions, which apply to the following blocks
  #nPlain = 0; // number of blocks displayed as plain text
  #maxBlock = MAX_BLOCK;

  constructor(container) {
    this.container = container;
    this.#end = container.appendChild(document.createComment(""));
  }

  // Adds text without drawing it.
  append(part) {
    this.#tail += part.replaceAll("\r", "");
  }

  // Draws the text received so far.
  draw() {
    while (this.#tail) {
      const isDone = this.#fence ? this.#extendFence() : this.#drawBlocks();
      if (isDone) break;
    }
  }

  // Makes the first `length` characters of the tail final. node: their rendering.
  #settle(node, length) {
    this.#end.before(node);
    this.#tail = this.#tail.slice(length);
  }

  #settlePlain(length) {
    this.#settle(element("p", {class: "plain-text"}, this.#tail.slice(0, length)), length);
    this.#nPlain++;
  }

  // Returns the blocks of a text, or null if they are nested too deeply.
  #blocksOf(text) {
    const lexer = new Lexer(marked.defaults),
      start = performance.now();
    lexer.tokens.links = {...this.#links};
    try {
      const tokens = lexer.lex(text);
      if (performance.now() - start > SLOW_MS) this.#maxBlock = MIN_BLOCK;
      return tokens;
    } catch {
      return null;
    }
  }

  // Renders the blocks of the tail. Returns true if nothing is left to do until more text arrives.
  #drawBlocks() {
    const text = this.#tail.slice(0, 2 * this.#maxBlock),
      isAll = text.length === this.#tail.length;
    const tokens = this.#nPlain < MAX_PLAIN ? this.#blocksOf(text) : null;
    while (this.#end.nextSibling) this.#end.nextSibling.remove();
    if (!tokens) {
      this.#settlePlain(text.length);
      return false;
    }
    const last = firstOpenBlock(tokens);
    for (const token of tokens.slice(0, last)) {
      if (token.type === "def") this.#links[token.tag] ??= {href: token.href, title: token.title};
      this.#settle(this.#render(token), token.raw.length);
    }
    const fence = FENCE.exec(this.#tail);
    if (fence) {
      this.#openFence(fence);
      return false;
    }
    if (tokens.slice(last).reduce((sum, token) => sum + token.raw.length, 0) > this.#maxBlock) {
      this.#settlePlain(this.#maxBlock);
      return false;
    }
    if (!isAll) return false;
    for (const token of tokens.slice(last)) this.container.append(this.#render(token));
    return true;
  }

  #render(token) {
    return decorate(sanitize(marked.parser([token])));
  }

  #openFence([whole, ticks, tickInfo, tildes, tildeInfo]) {
    const marker = ticks ?? tildes,
      word = (tickInfo ?? tildeInfo).trim().split(/\s/)[0],
      language = /^[\w+#.-]{1,30}$/.test(word) ? word : "";
    const complete = document.createTextNode(""),
      partial = document.createTextNode("");
    const code = element("code", {class: (language && "language-" + language) || null}, complete, partial),
      frame = codeFrame(code, language);
    frame.append(element("pre", {tabindex: "0"}, code));
    this.#settle(frame, whole.length);
    this.#fence = {closing: new RegExp(`^ {0,3}\\${marker[0]}{${marker.length},} *$`), complete, partial};
  }

  // Moves complete lines into the open code block. Returns true if the block is still open.
  #extendFence() {
    const {closing, complete, partial} = this.#fence,
      lines = this.#tail.split("\n"),
      rest = lines.pop();
    const end = lines.findIndex(line => closing.test(line)),
      isOpen = end < 0;
    const added = (isOpen ? lines : lines.slice(0, end)).map(line => line + "\n").join("");
    complete.appendData(added);
    partial.data = isOpen && !closing.test(rest) ? rest : "";
    this.#tail = this.#tail.slice(added.length + (isOpen ? 0 : lines[end].length + 1));
    if (!isOpen) this.#fence = null;
    return isOpen;
  }
}

// Renders a complete text into the container.
export function renderMarkdown(container, text) {
  const stream = new MarkdownStream(container);
  for (let from = 0; from < text.length; from += PART) {
    stream.append(text.slice(from, from + PART));
    stream.draw();
  }
}

// Draws a stream at most once per frame, and limits the rate so that drawing takes at most a tenth of the time.
export function drawScheduler(draw) {
  let pending = false,
    idleUntil = 0;
  return () => {
    if (pending) return;
    pending = true;
    setTimeout(
      () =>
        requestAnimationFrame(() => {
          pending = false;
          const start = performance.now();
          draw();
          idleUntil = performance.now() + 9 * (performance.now() - start);
        }),
      Math.max(0, idleUntil - performance.now()),
    );
  };
}
