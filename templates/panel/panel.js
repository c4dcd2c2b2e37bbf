// Brings a page with data-live up to date in place; without it every page still works.
"use strict";

const main = document.querySelector("main[data-live]");

function focusOf(element) {
  const { tagName, href, id } = element;
  const label = element.getAttribute("aria-label");
  return { tagName, href, id, label, text: element.textContent };
}

function focusAgain(mark, root) {
  const same = [...root.querySelectorAll(mark.tagName)].find((element) =>
    ["href", "id"].every((name) => element[name] === mark[name]) &&
    element.getAttribute("aria-label") === mark.label &&
    (mark.label || element.textContent === mark.text));
  if (same) same.focus({ preventScroll: true });
}

function scrollsOf(root) {
  return [...root.querySelectorAll(".scroll, pre")].map((box) => ({
    left: box.scrollLeft,
    top: box.scrollTop,
    end: box.scrollHeight - box.scrollTop - box.clientHeight < 8,
  }));
}

function show(fresh) {
  if (fresh.innerHTML === main.innerHTML) return;
  const active = document.activeElement;
  const mark = main.contains(active) && active !== main ? focusOf(active) : null;
  const scrolls = scrollsOf(main);
  main.replaceChildren(...fresh.childNodes);
  [...main.querySelectorAll(".scroll, pre")].forEach((box, i) => {
    const was = scrolls[i];
    if (!was) return;
    box.scrollLeft = was.left;
    box.scrollTop = box.hasAttribute("data-tail") && was.end ? box.scrollHeight : was.top;
  });
  if (mark) focusAgain(mark, main);
}

async function refresh() {
  if (!document.hidden && !window.getSelection().toString()) {
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.querySelector("main");
      if (answer.ok && fresh) {
        show(fresh);
        document.title = page.title;
        document.body.classList.remove("stale");
        if (!fresh.hasAttribute("data-live")) return;
      }
    } catch {
      document.body.classList.add("stale");
    }
  }
  setTimeout(refresh, Number(main.dataset.live));
}

for (const box of document.querySelectorAll("[data-tail]")) box.scrollTop = box.scrollHeight;
if (main) setTimeout(refresh, Number(main.dataset.live));
