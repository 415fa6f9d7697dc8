// What models and the server have raised, grouped by type and place, with the traceback of one.

import {ask} from "./contact.mjs";
import {html} from "./html.mjs";
import {changed, state} from "./state.mjs";
import {NONE, clock, count, roughly} from "./units.mjs";
import {Card, Fact} from "./widgets.mjs";

let asked = ""; // for which incident
let copied = "";

/** Asks once for the incident that the address names: its traceback is that of the first of its group. */
export async function askIncident() {
  const group = shown(), id = group ? group.id : state.of;
  if (!id || id === asked) return;
  asked = id;
  try {
    state.incident = await ask("GET", "incidents/" + encodeURIComponent(id));
  } catch (error) {
    state.incident = {id, numbers: [id], refused: error.message};
  }
  changed();
}

/** The group that the address names by any of its numbers; the newest where it names none. */
function shown() {
  const groups = state.incidents || [];
  return state.of ? groups.find(group => group.id === state.of || group.numbers.includes(state.of)) : groups[0];
}

export function Incidents() {
  const groups = state.incidents, chosen = shown(), now = state.stats ? state.stats.at : 0;
  if (!groups) return html`<${Card} label="Incidents"><p>–</p><//>`;
  if (!groups.length && !state.of) return html`<${Card} title="No incidents"><p class="muted">When a model or the server raises, the error and its traceback are here, under the number that the client was told.</p><//>`;
  return html`<div class="side"><nav class="card list" aria-label="Incidents"><ul class="plain">${groups.map(group => html`
      <li key=${group.id}><a href=${"#/incidents/" + encodeURIComponent(group.id)} aria-current=${group === chosen ? "true" : undefined}>
        <b class="three">${group.error}</b><span class="muted clip">${group.model || "server"} · ${roughly(Math.max(now - group.last, 0))} ago · ${group.count === 1 ? "once" : count(group.count) + " times"}</span></a></li>`)}</ul></nav>
    <div class="stack"><${Incident} group=${chosen} now=${now} /></div></div>`;
}

function Incident({group, now}) {
  const whole = state.incident, id = group ? group.id : state.of;
  const known = whole && (whole.id === id || whole.numbers.includes(id)) ? whole : null;
  if (known && known.refused) return html`<${Card} label="Incident"><p class="refused">${known.refused}</p><//>`;
  const told = group || known;
  if (!told) return html`<${Card} label="Incident"><p>–</p><//>`;
  const traceback = known && known.traceback;
  return html`<${Card} label=${told.error}>
    <div class="top"><h2 class="three">${told.error}</h2>${traceback && html`<button type="button" onClick=${() => copy(told, traceback)}>${copied === told.id ? "Copied" : "Copy"}</button>`}</div>
    <dl class="facts"><${Fact} name="Incident" mono>${told.id}<//><${Fact} name="Model">${told.model ? `${told.model}, version ${told.version}` : "the server itself"}<//>
      <${Fact} name="When">${clock(told.last)}, ${roughly(Math.max(now - told.last, 0))} ago<//><${Fact} name="Stream" mono>${told.stream || NONE}<//>
      <${Fact} name="Raised at" mono>${told.place || NONE}<//><${Fact} name="Client was told">${told.told || NONE}<//>
      <${Fact} name="Same error">${told.count === 1 ? "once" : `${count(told.count)} times since ${clock(told.first)}`}<//></dl>
    ${!known ? html`<p>–</p>` : traceback ? html`<pre tabindex="0" aria-label="Traceback">${traceback}</pre>` : html`<p>Its traceback is in the server's log alone (operator.tracebacks = false).</p>`}
    <p class="muted">The last 100 distinct errors are kept in memory. Tracebacks hold no local variables, request bodies or headers.</p><//>`;
}

async function copy(group, traceback) {
  try {
    await navigator.clipboard.writeText(`${group.error}\nincident ${group.id}, ${group.model} ${group.version}, ${group.place}, ${group.count} times\n${traceback}`);
    copied = group.id;
  } catch {
    copied = ""; // the browser allows it on localhost and over HTTPS alone: the text can be selected
  }
  changed();
}
