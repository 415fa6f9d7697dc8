// The console: its frame, its pages by address, its keys, and when it is drawn.

import {again, setPaused, unlock, watch} from "./contact.mjs";
import {Drain, isDraining} from "./drain.mjs";
import {summary} from "./figures.mjs";
import {html, render} from "./html.mjs";
import {Incidents, askIncident} from "./incidents.mjs";
import {Models, askModel} from "./models.mjs";
import {Overview} from "./overview.mjs";
import {changed, drawnBy, phase, silence, state} from "./state.mjs";
import {Streams, askStreams} from "./streams.mjs";
import {clock, duration, several} from "./units.mjs";
import {Badge, Card, Dialog, confirm} from "./widgets.mjs";

const PAGES = {overview: Overview, models: Models, streams: Streams, incidents: Incidents, playground: Play};
const NAMES = {overview: "Overview", models: "Models", streams: "Streams", incidents: "Incidents", playground: "Playground", drain: "Drain"};
const DOTS = {live: ["good", "live"], paused: ["warn", "paused"], stale: ["warn", "stale"], lost: ["bad", "lost"], polling: ["warn", "every 5 s"],
  locked: ["bad", "locked"], loading: ["none", "connecting"], drained: ["none", "ended"]};

function App() {
  const {page, stats} = state, now = phase();
  const figures = stats && state.points.length ? summary(state.points, stats, state.chosen) : null;
  const Page = PAGES[page] || Drain;
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <${Header} now=${now} />
    <main id="main" tabindex="-1" class=${now === "lost" ? "dim" : ""}><h1 class="sr">${NAMES[page]}</h1>
      ${now === "locked" ? html`<${Token} />` : html`<${Banners} now=${now} /><div class="page stack"><${Page} figures=${figures} /></div>`}</main>
    <${Dialog} />`;
}

let playground = null; // its modules, once the page was opened

function Play() {
  return playground ? html`<${playground.Playground} />` : html`<${Card} label="Playground"><p>–</p><//>`;
}

async function askPlay() {
  playground ??= await import("./play/playground.mjs").catch(() => null); // again in a second
  playground?.look();
}

function Header({now}) {
  const {stats, page} = state, [level, word] = DOTS[now];
  const fresh = (state.incidents || []).filter(group => stats && stats.at - group.last < 600).length;
  return html`<header><span class="brand">everywire</span><${Health} />
    <span class="about muted">${stats && `${stats.address[0] || "no port"} · ${stats.version} · up ${duration(stats.uptime)}`}</span>
    <nav class="tabs" aria-label="Pages">${Object.keys(PAGES).map(name => html`<a key=${name} href=${"#/" + name} aria-current=${name === page ? "page" : undefined}>${NAMES[name]}
      ${name === "incidents" && fresh > 0 && html`<span class="count" aria-label=${several(fresh, "error") + " in ten minutes"}>${fresh}</span>`}</a>`)}</nav>
    <span class="grow"></span><span class=${"contact " + level} data-phase=${now}><i class="dot" aria-hidden="true"></i>${word}</span>
    <a class="drain" href="#/drain" aria-current=${page === "drain" ? "page" : undefined}>Drain…</a></header>`;
}

function Health() {
  const {stats, models} = state;
  if (!stats) return html`<${Badge} level="none">–<//>`;
  if (isDraining()) return html`<${Badge} level="warn">draining<//>`;
  if (!stats.ready) return html`<${Badge} level="bad">not ready<//>`;
  const wrong = (models || []).filter(model => model.capacity !== undefined && model.state !== "ready");
  if (wrong.length) return html`<${Badge} level="warn">ready, ${several(wrong.length, "model")} ${wrong.length === 1 ? wrong[0].state : "not ready"}<//>`;
  return html`<${Badge} level="good">ready<//>`;
}

function Banners({now}) {
  const {contact, stats, page} = state;
  const left = Math.max(Math.ceil((contact.retryAt - performance.now()) / 1000), 0);
  return html`${now === "lost" && html`<div class="banner" role="alert"><${Card} level="warn" label="No contact">
      <div class="top"><p class="verdict">No contact with the server for ${duration(Math.floor(silence()))}. ${stats ? `What you see is from ${clock(stats.at)}.` : ""}</p>
        <button type="button" onClick=${again}>Try now</button></div>
      <p class="muted">${contact.error || "It says nothing"}. ${left > 0 ? `Trying again in ${left} s.` : "Trying now."} The server may have ended, or the tunnel to it.</p><//></div>`}
    ${now === "polling" && html`<div class="banner" role="status"><${Card} level="warn" label="Readers"><p>${contact.polling}. This page asks every 5 s instead.</p><//></div>`}
    ${isDraining() && now !== "drained" && page !== "drain" && html`<div class="banner" role="status"><${Card} level="warn" label="Draining"><p>The server drains: new requests are refused. <a href="#/drain">See how far it is</a>.</p><//></div>`}
    ${now === "drained" && page !== "drain" && html`<div class="banner" role="status"><${Card} level="warn" label="Drained"><p>The server has drained and ended. <a href="#/drain">Its report</a> is kept here.</p><//></div>`}`;
}

function Token() {
  const submit = event => {
    event.preventDefault();
    unlock(event.target.elements.token.value);
  };
  return html`<form class="card token" onSubmit=${submit}><h2>This server asks for a token</h2>
    <p class="muted">It is <code>operator.token</code> of the server, or one of <code>operator.token_file</code>. This tab keeps it until it is closed.</p>
    <label class="field">Token<input id="token" name="token" type="password" autocomplete="off" required autofocus aria-describedby=${state.contact.wrong ? "wrong" : undefined} /></label>
    ${state.contact.wrong && html`<p id="wrong" class="refused" role="alert">The server does not know this token.</p>`}
    <button type="submit">Open</button></form>`;
}

const skip = event => {
  event.preventDefault();
  document.getElementById("main").focus();
};

function arrive() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [page, ...of] = path.split("/");
  let named = of.join("/");
  try {
    named = decodeURIComponent(named);
  } catch {
    // an address that somebody has typed: it is the name of nothing
  }
  Object.assign(state, {page: page in NAMES ? page : "overview", of: named, query: new URLSearchParams(query || "")});
  document.title = `${NAMES[state.page]} · everywire`;
  look();
  changed();
}

/** Asks for what the page alone needs. */
function look() {
  if (state.page === "streams" || (state.page === "drain" && isDraining())) askStreams();
  if (state.page === "models") askModel();
  if (state.page === "playground") askPlay();
}

function help() {
  confirm({
    title: "Keys", text: "They work where nothing is typed.",
    body: html`<dl class="keys"><dt><kbd>1</kbd> – <kbd>5</kbd></dt><dd>pages</dd><dt><kbd>/</kbd></dt><dd>search the streams</dd><dt><kbd>p</kbd></dt><dd>pause, and go on</dd>
      <dt><kbd>?</kbd></dt><dd>this help</dd><dt><kbd>Esc</kbd></dt><dd>close, cancel</dd></dl>`,
  });
}

function key(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || state.dialog || event.target.closest("input, select, textarea")) return;
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  if (page) location.hash = "#/" + page;
  else if (event.key === "p") setPaused(!state.paused);
  else if (event.key === "?") help();
  else if (event.key === "/") {
    event.preventDefault();
    if (state.page !== "streams") location.hash = "#/streams";
    setTimeout(() => document.getElementById("search")?.focus(), 50);
  }
}

function draw() {
  render(html`<${App} />`, document.getElementById("app"));
  if (state.page === "incidents" && phase() !== "locked") askIncident();
}

document.getElementById("app").replaceChildren();
drawnBy(draw);
addEventListener("hashchange", arrive);
addEventListener("keydown", key);
arrive();
watch();
setInterval(() => {
  if (document.hidden) return;
  look();
  changed(); // ages, and whether the server has said anything
}, 1000);
