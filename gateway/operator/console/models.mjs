// The models: a list, and of one of them its state, its slots, its queue, its versions, and what can be done with it.

import {Bar, Lines} from "./charts.mjs";
import {ask} from "./contact.mjs";
import {PARTS, PART_WORDS} from "./figures.mjs";
import {html} from "./html.mjs";
import {Slots} from "./overview.mjs";
import {changed, phase, state} from "./state.mjs";
import {NONE, clock, count, duration, rate, roughly, several, share} from "./units.mjs";
import {Badge, Card, Cell, Fact, PartsBar, StateBadge, Table, age, confirm, levelOf} from "./widgets.mjs";

const STATE_KINDS = {good: "good", warn: "warn", bad: "bad", none: "begin"};

let asking = false;

/** Asks for what is told of one model alone: its history, and its batches. */
export async function askModel() {
  const shown = chosen();
  if (asking || !shown || state.paused || !["live", "polling"].includes(phase())) return;
  asking = true;
  try {
    state.model = await ask("GET", "models/" + encodeURIComponent(shown.name));
  } catch {
    state.model = null; // the list says what has become of it
  }
  asking = false;
  changed();
}

/** The model that the address names; the first where it names none. */
function chosen() {
  const models = state.models || [];
  const found = state.of ? models.find(model => model.name === state.of) : models[0];
  return found && state.model && state.model.name === found.name ? {...found, history: state.model.history, batches: state.model.batches} : found;
}

export function Models({figures}) {
  const models = state.models || [];
  if (!state.models) return html`<${Card} label="Models"><p>–</p><//>`;
  if (!models.length) return html`<${Card} title="Models"><p class="muted">No model is configured. Start the server with <code>--model NAME=MODULE:ATTR</code>.</p><//>`;
  const shown = chosen();
  return html`<div class="side"><nav class="card list" aria-label="Models"><ul class="plain">${models.map(model => html`
      <li key=${model.name}><a href=${"#/models/" + encodeURIComponent(model.name)} aria-current=${shown && model.name === shown.name ? "true" : undefined}>
        <span class="pair"><b class="clip">${model.name}</b><${StateBadge} model=${model} /></span>
        <span class="muted">${model.capacity === undefined ? "not in service" : `${model.slots_in_use}/${model.capacity} slots · ${count(model.queued)} queued`}</span></a></li>`)}</ul></nav>
    <div class="stack">${shown ? html`<${Model} key=${shown.name} model=${shown} figures=${figures} />`
      : html`<${Card} label="Model"><p>There is no model <b class="clip">${state.of}</b>.</p><//>`}</div></div>`;
}

function Model({model, figures}) {
  const served = model.capacity !== undefined;
  const one = figures && figures.byModel[model.name], q = (figures && figures.quantiles(model.name)) || {};
  const per = n => (one && figures.seconds ? rate(n / figures.seconds) : NONE);
  const error = model.last_error;
  return html`
    <${Card} label=${model.name}>
      <div class="top"><h2 class="big"><span class="clip">${model.name}</span> <${StateBadge} model=${model} />
        ${model.seconds !== undefined && html`<small>for ${roughly(model.seconds + age())}</small>`}</h2>
        <span class="buttons">${served ? html`<a class="drain" href=${"#/playground/" + encodeURIComponent(model.name)}>Call it</a><button type="button" onClick=${() => reload(model)}>Reload…</button>
          <button type="button" class="danger" onClick=${() => unload(model)}>Unload…</button>`
          : html`<button type="button" onClick=${() => load(model)}>Load…</button>`}</span></div>
      ${model.reason && html`<p class=${levelOf(model.state) === "good" ? "muted" : "refused"}>${model.reason}</p>`}
      ${model.history && html`<${History} model=${model} />`}
      ${served && html`<dl class="facts">
        <${Fact} name="Slots"><${Slots} model=${model} /><//>
        <${Fact} name="Queued">${count(model.queued)}<//>
        <${Fact} name="Requests">${per(one && one.ended)} /s<//>
        <${Fact} name="Items">${per(one && one.items_out)} /s<//>
        <${Fact} name="First item p50 / p99">${duration(q.first50)} / ${duration(q.first99)}<//>
        <${Fact} name="Duration p50 / p99">${duration(q.duration50)} / ${duration(q.duration99)}<//>
        <${Fact} name="Errors">${one && one.ended ? share(one.failed / one.ended) : NONE}<//>
        <${Fact} name="Restarts">${count(model.restarts)} (${several(model.crashes, "crash", "crashes")})<//>
        <${Fact} name="Stuck">${count(model.stuck)}<//>
        <${Fact} name="Version">${model.version}<//>
        ${model.stopping && html`<${Fact} name="Stop time">${stopTimes(model.stopping)}<//>`}
        ${error && html`<${Fact} name="Last error"><a class="clip" href=${"#/incidents/" + encodeURIComponent(error.incident)}>${error.error}</a> ${roughly(error.ago + age())} ago<//>`}
      </dl>`}
      ${one && PARTS.some(part => one.spent[part] > 0) && html`<h3>Where the last minute went</h3><${PartsBar} spent=${one.spent} />`}
    <//>
    ${model.versions && model.versions.length > 0 && html`<${Versions} model=${model} />`}
    ${model.batches && batchesOf(model).length > 0 && html`<${Batches} model=${model} />`}
    ${model.instances && html`<${Instances} model=${model} />`}`;
}

const stopTimes = stopping => (stopping.count ? `p99 ${duration(stopping.p99)} (allowed ${duration(stopping.within)})` : NONE);

/** The changes of state as a bar of time, and as words. */
function History({model}) {
  const now = state.stats ? state.stats.at : 0, changes = model.history;
  if (!changes.length) return null;
  const parts = changes.map((change, i) => ({
    key: STATE_KINDS[levelOf(change.state)], value: Math.max((i + 1 < changes.length ? changes[i + 1].at : now) - change.at, 0.001),
  }));
  const told = changes.slice(-6);
  return html`<h3>State, last ${duration(Math.max(now - changes[0].at, 0))}</h3>
    <${Bar} parts=${parts} title=${"State: " + told.map(change => `${clock(change.at)} ${change.state}`).join(", ")} />
    <ul class="legend">${told.map((change, i) => html`<li key=${change.at + change.state + i}>${clock(change.at)} <b class=${levelOf(change.state)}>${change.state}</b>${change.front !== undefined && ` (process ${change.front})`}${change.reason && html` <span class="clip">(${change.reason})</span>`}</li>`)}</ul>`;
}

function Versions({model}) {
  const columns = [["Version"], ["State"], ["Sessions", 1]];
  return html`<${Card} title="Versions" note=${model.versions.length > 1 ? "a reload is under way" : ""}>
    <${Table} caption="Versions" columns=${columns.map(([name, num]) => ({key: name, name, num}))}>${model.versions.map((one, i) => html`
      <tr role="row" key=${one.version + i}><${Cell} name="version"><b>${one.version}</b><//><${Cell} name="state"><${Badge} level=${levelOf(one.state)}>${one.state}<//><//>
      <${Cell} name="sessions" num>${count(one.sessions)}<//></tr>`)}<//><//>`;
}

const batchesOf = model => Object.entries(model.batches).map(([size, n]) => [Number(size), n]).filter(([, n]) => n > 0);

function Batches({model}) {
  const batches = batchesOf(model), most = Math.max(...batches.map(([, n]) => n));
  const all = batches.reduce((n, [, times]) => n + times, 0), mean = batches.reduce((n, [size, times]) => n + size * times, 0) / all;
  return html`<${Card} title="Batch sizes" note=${`mean ${mean.toFixed(1)} of ${several(all, "batch", "batches")}`}>
    <ul class="plain sizes">${batches.map(([size, n]) => html`<li key=${size}><span class="num">${size}</span>
      <${Bar} height="10" whole=${most} title=${`${n} batches of ${size}`} parts=${[{key: "model", value: n}]} /> <span class="num">${count(n)}</span></li>`)}</ul><//>`;
}

function Instances({model}) {
  const plain = value => (value === null || value === undefined ? NONE : typeof value === "object" ? JSON.stringify(value) : String(value));
  const names = Object.keys(model.instances[0] || {});
  return html`<${Card} title="Processes"><${Table} caption="Processes" columns=${names.map(name => ({key: name, name: name.replaceAll("_", " ")}))}>
    ${model.instances.map((one, i) => html`<tr role="row" key=${i}>${names.map(name => html`<${Cell} key=${name} name=${name}><span class="clip">${plain(one[name])}</span><//>`)}</tr>`)}<//><//>`;
}

const at = (model, what) => `models/${encodeURIComponent(model.name)}/${what}`;

const sessions = model => (model.slots_in_use === 1 ? "1 session runs" : `${model.slots_in_use} sessions run`);

function reload(model) {
  confirm({
    title: `Reload ${model.name}?`,
    text: `The new version loads beside the old one, which serves until then: no request is refused. ${sessions(model)} on the old one; they have their time to end, then they are cut.${model.instances ? "" : " Changed code is read only for a model folder; else start the server anew."}`,
    verb: "Reload",
    run: () => ask("POST", at(model, "reload"), {}),
  });
}

function unload(model) {
  confirm({
    title: `Unload ${model.name}?`,
    text: `${sessions(model)} and ${several(model.queued, "request waits", "requests wait")}. New requests are refused at once, and it stays unloaded until it is loaded again.`,
    verb: "Unload",
    run: () => ask("POST", at(model, "unload"), {}),
  });
}

function load(model) {
  confirm({title: `Load ${model.name}?`, text: "It takes memory beside the models that are in service.", verb: "Load", run: () => ask("POST", at(model, "load"), {})});
}
