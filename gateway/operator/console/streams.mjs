// The live streams: who waits for what, for how long, and where its bytes are. The server sorts and chooses.

import {Gauge} from "./charts.mjs";
import {ask, setPaused} from "./contact.mjs";
import {PARTS} from "./figures.mjs";
import {html} from "./html.mjs";
import {changed, phase, state} from "./state.mjs";
import {NONE, bytes, count, duration, rate} from "./units.mjs";
import {Card, Cell, PartsBar, Table, confirm} from "./widgets.mjs";

const MOST = 1000, STEP = 100; // rows that the server lists, and that are drawn at once
const WAITS = ["slot", "model", "input", "room", "end", "gateway"];
const WIRES = ["http/1.1", "http/2", "websocket", "asgi"];
const HOPS = {received: "input", queued: "flush", socket: "room", window: "model"};
const HOP_WORDS = {received: "received, not taken by the model", queued: "queued for the client", socket: "in the socket", window: "in the client's window"};
const ENDS = {
  room: "A client that takes nothing is cut after limits.write_stall.",
  input: "A client that sends less than limits.body_rate over limits.body_silence is cut.",
};

let asking = false;

/** Asks for the rows of the filters that the address has; called each second while the page is shown. */
export async function askStreams() {
  const {streams, query} = state;
  if (asking || state.paused || !["live", "polling", "loading"].includes(phase())) return;
  asking = true;
  const wanted = new URLSearchParams({sort: query.get("sort") || "waited", limit: String(MOST)});
  for (const name of ["waits_for", "model", "peer"]) if (query.get(name)) wanted.set(name, query.get(name));
  try {
    const told = await ask("GET", "streams?" + wanted);
    Object.assign(streams, {rows: told.streams, live: told.live, matched: told.matched, at: performance.now(), error: ""});
  } catch (error) {
    streams.error = error.message;
  }
  asking = false;
  changed();
}

const filtered = (name, value) => {
  const query = new URLSearchParams(state.query);
  if (value) query.set(name, value);
  else query.delete(name);
  history.replaceState(null, "", "#/streams" + (query.size ? "?" + query : ""));
  state.query = query; // at once: what is typed next is added to it
  askStreams();
  changed();
};

const Select = ({name, label, options, all}) => html`<label class="field">${label}
  <select value=${state.query.get(name) || ""} onChange=${event => filtered(name, event.target.value)}>
    <option value="">${all}</option>${options.map(option => html`<option key=${option} value=${option} selected=${state.query.get(name) === option}>${option}</option>`)}</select></label>`;

export function Streams() {
  const {streams, query} = state;
  const text = (query.get("text") || "").toLowerCase(), wire = query.get("wire");
  const rows = (streams.rows || []).filter(row => (!wire || row.wire === wire) && (!text || [row.id, row.client_request_id || "", row.peer, row.path, row.model].some(has => has.toLowerCase().includes(text))));
  const models = [...new Set([...(state.models || []).map(model => model.name), ...(query.get("model") ? [query.get("model")] : [])])];
  const drawn = rows.slice(0, streams.shown), sort = query.get("sort") || "waited";
  const head = (key, name) => html`<button type="button" class="sort" onClick=${() => filtered("sort", key === "waited" ? "" : key)}>${name}${sort === key ? " ↓" : ""}</button>`;
  const columns = [
    {key: "id", name: "Stream"}, {key: "model", name: "Model"}, {key: "wire", name: "Wire"},
    {key: "waited", name: "Waits for", head: head("waited", "Waits for"), sort: sort === "waited" ? "descending" : "none"},
    {key: "age", name: "Age", num: 1, head: head("age", "Age"), sort: sort === "age" ? "descending" : "none"},
    {key: "items", name: "Items out", num: 1}, {key: "rate", name: "Rate", num: 1}, {key: "in", name: "In", num: 1}, {key: "out", name: "Out", num: 1},
    {key: "hops", name: "Received · queued · socket · window"}, {key: "peer", name: "Peer"}, {key: "end", name: "End", head: html`<span class="sr">End</span>`},
  ];
  return html`<${Card} label="Live streams">
    <div class="filters"><${Select} name="waits_for" label="Waits for" options=${WAITS} all="anything" /><${Select} name="model" label="Model" options=${models} all="all" />
      <${Select} name="wire" label="Wire" options=${WIRES} all="all" />
      <label class="field">Search<input id="search" type="search" placeholder="id, client's id, path or peer ( / )" value=${query.get("text") || ""} onInput=${event => filtered("text", event.target.value)} /></label>
      ${query.get("peer") && html`<button type="button" onClick=${() => filtered("peer", "")}>Address ${query.get("peer")} ×</button>`}
      <span class="grow"></span><p class="muted" data-figure="streams">${told(rows, drawn, sort)}</p>
      <button type="button" aria-pressed=${state.paused ? "true" : "false"} onClick=${() => setPaused(!state.paused)}>${state.paused ? "Go on" : "Pause"}</button></div>
    ${streams.error && html`<p class="refused" role="alert">${streams.error}</p>`}
    ${!streams.rows ? html`<p>–</p>` : !rows.length ? html`<p class="muted">${streams.live ? "No live stream is like that." : "No stream is live. Each request is one while it is answered: call a model to see it here."}</p>`
    : html`<${Table} caption="Live streams" columns=${columns}>${drawn.map(row => html`<${Row} key=${row.id} row=${row} />`)}<//>`}
    ${drawn.length < rows.length && html`<p><button type="button" onClick=${more}>Show ${Math.min(STEP, rows.length - drawn.length)} more</button></p>`}<//>`;
}

const told = (rows, drawn, sort) => {
  const {live, matched} = state.streams;
  if (!state.streams.rows) return "–";
  const cut = matched > MOST ? ` of the ${count(MOST)} that ${sort === "waited" ? "have waited longest" : "are oldest"}` : "";
  return `${live} live, ${drawn.length} shown${cut} · sorted by ${sort === "waited" ? "wait" : "age"}`;
};

function more() {
  state.streams.shown += STEP;
  changed();
}

function Row({row}) {
  const {streams} = state, open = streams.opened === row.id;
  const toggle = () => {
    streams.opened = open ? "" : row.id;
    changed();
  };
  return html`<tr role="row" class=${open ? "opened" : ""}>
      <${Cell} name=""><button type="button" class="link mono" aria-expanded=${open ? "true" : "false"} onClick=${toggle}>${row.id}</button><//>
      <${Cell} name="model"><b class="clip">${row.model || NONE}</b><//><${Cell} name="wire" kind="muted">${row.wire} · ${row.dialect || NONE}<//>
      <${Cell} name="waits for"><b class=${"part-" + row.waits_for}>${row.waits_for}</b> ${duration(row.waited)}<//><${Cell} name="age" num>${duration(row.age)}<//>
      <${Cell} name="items" num>${count(row.items_out)}<//><${Cell} name="rate" num>${row.items_out && row.age ? rate(row.items_out / row.age) + "/s" : NONE}<//>
      <${Cell} name="in" num>${bytes(row.bytes_in)}<//><${Cell} name="out" num>${bytes(row.bytes_out)}<//>
      <${Cell} name="hops"><span class="hops">${Object.keys(HOPS).map(name => html`<${Hop} key=${name} name=${name} hop=${(row.hops || []).find(hop => hop.name === name)} />`)}</span><//>
      <${Cell} name="peer"><span class="mono clip">${row.peer}</span><//>
      <${Cell} name=""><button type="button" class="danger small" aria-label=${`End stream ${row.id}`} onClick=${() => end(row)}>End…</button><//></tr>
    ${open && html`<tr role="row" class="more"><td role="cell" colspan="12"><${Opened} row=${row} /></td></tr>`}`;
}

const Hop = ({name, hop}) => html`<${Gauge} kind=${HOPS[name]} held=${hop ? hop.held : 0} limit=${hop ? hop.limit : 0}
  title=${hop ? `${name}: ${bytes(hop.held)} of ${bytes(hop.limit)}` : `${name}: not of this wire`} />`;

function Opened({row}) {
  const all = PARTS.reduce((n, part) => n + (row.spent[part] || 0), 0);
  return html`<p class="sub">Where its ${duration(all)} went</p><${PartsBar} spent=${row.spent} seconds height="16" />
    <ul class="legend"><li>first item after <b>${duration(row.first)}</b></li><li>items in <b>${count(row.items_in)}</b></li><li>no bytes for <b>${duration(row.idle)}</b></li>
      ${(row.hops || []).map(hop => html`<li key=${hop.name}>${HOP_WORDS[hop.name] || hop.name} <b>${bytes(hop.held)}</b> of ${bytes(hop.limit)}</li>`)}
      <li>${row.method} <span class="mono clip">${row.path}</span></li><li>status <b>${row.status || NONE}</b></li><li class="mono">${row.id}</li>
      ${row.client_request_id && html`<li>the client's id <span class="mono clip">${row.client_request_id}</span></li>`}</ul>
    ${ENDS[row.waits_for] && html`<p class="muted">${ENDS[row.waits_for]}</p>`}`;
}

function end(row) {
  confirm({
    title: `End stream ${row.id}?`,
    text: `${row.model || "It"} has answered ${count(row.items_out)} items to ${row.peer} in ${duration(row.age)}. The client is told that the server ended it, and may ask again.`,
    verb: "End stream",
    run: async () => {
      await ask("POST", `streams/${encodeURIComponent(row.id)}/end`);
      askStreams();
    },
  });
}
