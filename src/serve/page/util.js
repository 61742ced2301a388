// Helpers for all modules: DOM construction, number formats, browser storage and the clipboard.

export const $ = id => document.getElementById(id);

// Creates an element. `properties` may contain attributes, `class`, and event handlers such as onclick. Children are nodes or
// strings; null, undefined and false are skipped.
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"),
    use = document.createElementNS(SVG, "use");
  use.setAttribute("href", "#icon-" + name);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick) {
  return element("button", {type: "button", class: "icon small", "aria-label": label, title: label, onclick}, icon(name));
}

export function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000) return (unit === "B" || n >= 100 ? Math.round(n) : n.toPrecision(n < 10 ? 2 : 3)) + " " + unit;
    n /= 1000;
  }
  return n.toFixed(1) + " TB";
}

// Integer with thousands separators.
export const integer = n => Math.round(n).toLocaleString("en-US");

// Short number for small spaces: 950, 12.3K, 4.5M.
export const short = n => (n >= 1e6 ? (n / 1e6).toFixed(1) + "M" : n >= 1e4 ? (n / 1e3).toFixed(1) + "K" : String(Math.round(n)));

export const seconds = s => (s < 1 ? Math.round(s * 1000) + " ms" : s < 100 ? s.toFixed(1) + " s" : Math.round(s) + " s");

export const plural = (n, noun) => integer(n) + " " + noun + (n === 1 ? "" : "s");

// Storage of small values. The page also works if the browser blocks storage.
export const small = {
  get(storage, name) {
    try {
      return window[storage].getItem(name);
    } catch {
      return null;
    }
  },
  set(storage, name, value) {
    try {
      if (value === null) window[storage].removeItem(name);
      else window[storage].setItem(name, value);
    } catch {
      /* not stored */
    }
  },
};

// The clipboard API exists only on https and localhost. On other addresses the text is copied from a temporary text field.
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      /* permission denied: use the text field */
    }
  }
  const field = element("textarea", {class: "unseen", readonly: true});
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], {type}));
  element("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

let toastTimer = 0;

// Shows a message at the bottom of the page for 8 s, optionally with one action.
export function toast(text, action, act) {
  const box = $("toast");
  box.replaceChildren(element("span", {}, text));
  if (action)
    box.append(
      element(
        "button",
        {
          type: "button",
          class: "plain",
          onclick: () => {
            box.hidden = true;
            act();
          },
        },
        action,
      ),
    );
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => {
    box.hidden = true;
  }, 8000);
}

// Reports an event to screen readers only.
export const announce = text => {
  $("announce").textContent = text;
};
