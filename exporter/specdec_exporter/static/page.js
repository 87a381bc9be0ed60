// Keeps the page up to date: told that there is news, it asks for the cards that are looked at.
"use strict";

const RETRY_MS = 15000;
const MOST_CARDS = 100; // of one request
const REORDER_WITHIN = 120; // pixels from the top, where nothing that is read jumps away

const cards = document.getElementById("cards");
const only = "only" in cards.dataset;
const filter = document.getElementById("filter");
const visible = new Set();
let news = null; // what the exporter said last
let source = null;
let timer = 0;
let watchdog = 0;
let asking = false;

document.documentElement.classList.add("js");

function text(id, value) {
  const element = document.getElementById(id);
  // Written only when it changes, since a reader would say it again.
  if (element.textContent !== value) element.textContent = value;
}

function lost(why) {
  const since = document.getElementById("at").textContent;
  text("lost", `Not live: ${why}. What is shown is of ${since}.`);
  text("live", "As of");
}

// Makes `mine` like `theirs`, and leaves alone what is the same: focus, selection, what is open.
function morph(mine, theirs) {
  if (mine.nodeName !== theirs.nodeName || (mine.id || "") !== (theirs.id || "")) {
    mine.replaceWith(theirs);
    return;
  }
  if (mine.nodeType === Node.TEXT_NODE) {
    if (mine.data !== theirs.data) mine.data = theirs.data;
    return;
  }
  const own = ["open", "hidden"];
  for (const { name } of [...mine.attributes]) {
    if (!own.includes(name) && !theirs.hasAttribute(name)) mine.removeAttribute(name);
  }
  for (const { name, value } of theirs.attributes) {
    if (!own.includes(name) && mine.getAttribute(name) !== value) mine.setAttribute(name, value);
  }
  const wanted = [...theirs.childNodes];
  const named = new Set(wanted.map((child) => child.id).filter(Boolean));
  wanted.forEach((child, i) => {
    const same = child.id && [...mine.children].find((one) => one.id === child.id);
    // What stood before it goes, since moving it would take the focus from it.
    while (same && mine.childNodes[i] !== same && !named.has(mine.childNodes[i].id)) {
      mine.childNodes[i].remove();
    }
    if (same && mine.childNodes[i] !== same) mine.insertBefore(same, mine.childNodes[i]);
    const there = mine.childNodes[i];
    if (there && (there === same || !named.has(there.id))) morph(there, child);
    else mine.insertBefore(child, there || null);
  });
  while (mine.childNodes.length > wanted.length) mine.lastChild.remove();
}

function stale(card) {
  if (card.open) return card.dataset.at !== news.at;
  return card.dataset.digest !== news.digests.get(card.id);
}

async function ask() {
  if (asking || !news) return;
  const known = new Map([...cards.children].map((card) => [card.id, card]));
  const wanted = [...known.values()].filter((card) => visible.has(card.id) && stale(card));
  const whole = wanted.filter((card) => card.open).map((card) => card.id);
  const rows = wanted.filter((card) => !card.open).map((card) => card.id);
  if (!only) rows.push(...[...news.digests.keys()].filter((id) => !known.has(id)));
  const log = document.getElementById("audit");
  const audit = log.dataset.digest !== news.audit;
  if (!whole.length && !rows.length && !audit) return;
  asking = true;
  const of = news;
  try {
    const query = new URLSearchParams({
      whole: whole.slice(0, MOST_CARDS).join("."),
      rows: rows.slice(0, MOST_CARDS).join("."),
      audit: audit ? "1" : "",
    });
    const answer = await fetch(`cards?${query}`);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const theirs of [...fresh.querySelectorAll(".card")]) {
      theirs.dataset.at = of.at;
      const mine = document.getElementById(theirs.id);
      if (!mine) {
        cards.append(theirs);
        looked.observe(theirs);
      } else if (theirs.open) {
        morph(mine, theirs);
      } else {
        morph(mine.querySelector("summary"), theirs.querySelector("summary"));
        mine.className = theirs.className;
        Object.assign(mine.dataset, { ...theirs.dataset, at: mine.dataset.at || "" });
      }
    }
    const entries = fresh.getElementById("audit");
    if (entries) {
      morph(log, entries);
      log.dataset.digest = of.audit;
    }
    sift();
    order();
  } catch (error) {
    lost(`the cards cannot be had (${error.message})`);
    asking = false;
    return;
  }
  asking = false;
  if (news !== of || whole.length > MOST_CARDS || rows.length > MOST_CARDS) ask();
}

// The worst first, as long as nobody is reading further down or has a card in hand.
function order() {
  if (window.scrollY > REORDER_WITHIN || cards.contains(document.activeElement)) return;
  const wanted = [...news.digests.keys()].map((id) => document.getElementById(id)).filter(Boolean);
  wanted.forEach((card, i) => {
    if (cards.children[i] !== card) cards.insertBefore(card, cards.children[i] || null);
  });
}

function sift() {
  const find = filter ? filter.elements.q.value.trim().toLowerCase() : "";
  const trouble = filter ? filter.elements.trouble.checked : false;
  let shown = 0;
  for (const card of cards.children) {
    card.hidden =
      !card.dataset.find.includes(find) || (trouble && card.dataset.tone !== "bad");
    shown += !card.hidden;
  }
  document.getElementById("none").hidden = shown > 0;
}

function take(message) {
  news = message;
  news.digests = new Map(news.cards);
  text("lost", "");
  text("live", "Live, as of");
  text("at", news.at);
  text("summary", news.summary);
  text("notice", news.notice);
  document.title = `${news.summary} · specdec-exporter`;
  if (!only) {
    for (const card of [...cards.children]) if (!news.digests.has(card.id)) card.remove();
  }
  clearTimeout(watchdog);
  watchdog = setTimeout(() => lost("nothing new has come"), 4000 * Math.max(news.every, 5));
  order();
  ask();
}

async function poll() {
  try {
    const answer = await fetch("state");
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    take(await answer.json());
  } catch (error) {
    lost(`the exporter does not answer (${error.message})`);
  }
  timer = setTimeout(connect, RETRY_MS);
}

function connect() {
  clearTimeout(timer);
  if (document.hidden || source) return;
  if (!window.EventSource) {
    poll();
    return;
  }
  source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    if (source.readyState === EventSource.CLOSED) {
      // Refused, since too many are listening: asked now and then, it answers all the same.
      source = null;
      poll();
    } else {
      lost("the exporter does not answer");
    }
  };
}

const looked = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) visible.add(target.id);
      else visible.delete(target.id);
    }
    ask();
  },
  { rootMargin: "200px" },
);
for (const card of cards.children) {
  if (!card.querySelector(".later")) card.dataset.at = document.getElementById("at").textContent;
  looked.observe(card);
}

cards.addEventListener(
  "toggle",
  (event) => {
    if (event.target.open && event.target.classList.contains("card")) ask();
  },
  true,
);

if (filter) {
  filter.addEventListener("input", () => {
    sift();
    const query = new URLSearchParams(new FormData(filter));
    for (const [name, value] of [...query]) if (!value) query.delete(name);
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  });
  filter.addEventListener("submit", (event) => event.preventDefault());
}

// A page that nobody sees holds none of the few streams.
document.addEventListener("visibilitychange", () => {
  if (document.hidden && source) {
    source.close();
    source = null;
  }
  clearTimeout(watchdog);
  connect();
});
connect();
