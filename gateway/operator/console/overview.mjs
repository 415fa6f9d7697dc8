// The first page: one sentence that names the culprit, what proves it, and everything else at a glance.

import {Areas, Bar, Lines, Sparkline} from "./charts.mjs";
import {change, changes, quantile, series, sum} from "./figures.mjs";
import {html} from "./html.mjs";
import {state, changed} from "./state.mjs";
import {NONE, bytes, count, duration, rate, roughly, several, share} from "./units.mjs";
import {Card, Cell, PartsBar, StateBadge, Table, Badge} from "./widgets.mjs";

const SECONDS = 300, SMOOTH = 10; // of the charts, and of the span that a point of one is about
const KINDS = ["model", "slot", "input", "flush", "begin"];
const HOPS = {send: "room", bodies: "model", received: "input", assembling: "flush", large: "begin"};
const TARGETS = {model: "#/models/", peer: "#/streams?peer=", incident: "#/incidents/"};
const HOP_WORDS = {send: "send queues", bodies: "bodies", received: "received", assembling: "assembling", large: "large parts"};

export function Overview({figures}) {
  if (!figures) return html`<${Card} label="Verdict"><p class="verdict">–</p><//><${Numbers} /><${Models} figures=${null} />`;
  const told = state.stats.verdict, empty = told.kind === "empty";
  const links = ["model", "peer", "incident"].filter(of => told[of]);
  return html`
    <${Card} level=${told.level} label="Verdict">
      <p class="verdict" role="status" data-rule=${told.kind}>${told.sentence}</p>
      ${empty ? html`<${First} />` : html`<p class="muted">${told.detail}${links.map(of => html` <a href=${TARGETS[of] + encodeURIComponent(told[of])}>${of} ${told[of]}</a>`)}</p>
        ${sum(told.spent) > 0 && html`<${PartsBar} spent=${told.spent} />`}`}
    <//>
    <${Numbers} figures=${figures} />
    ${!empty && html`<div class="two"><${Items} /><${Durations} figures=${figures} /><${Memory} figures=${figures} /><${Recent} /></div>`}
    <${Models} figures=${figures} />`;
}

function First() {
  const {stats, models} = state;
  const ready = (models || []).filter(model => model.state === "ready");
  const url = stats.address[0] || "http://127.0.0.1:8080";
  const name = ready.length ? ready[0].name : "MODEL";
  return html`<p class="muted">${several(ready.length, "model")} ${ready.length === 1 ? "answers" : "answer"} on ${stats.address.join(", ") || "no address"}. Try one:</p>
    <pre tabindex="0">${`everywire call --url ${url} ${name} "hello every wire"\ncurl -N ${url}/predictions/${name} -H 'content-type: application/json' -d '{"inputs": "hello every wire", "stream": true}'`}</pre>
    <p><a href="#/models">See the models</a></p>`;
}

function Numbers({figures}) {
  const {points, stats} = state;
  const total = figures && figures.total, q = (figures && figures.model && figures.quantiles(figures.model)) || {};
  const of = figures && figures.model ? ` of ${figures.model}` : "";
  const some = total && (figures.ever || figures.live);
  const waiting = points.length ? points.at(-1).waiting : {};
  const by = read => series(points, SECONDS, SMOOTH, read);
  const histogram = (kind, at) => by(span => {
    const one = change(span, figures.model);
    return one && quantile(one[kind], stats.bounds[kind], at);
  });
  const per = seconds => (some ? seconds / figures.seconds : null);
  const cells = !some ? ["Requests", "Errors", "Output items", "First item" + of, "Duration" + of, "Live streams"].map(name => ({name})) : [
    {name: "Requests", value: rate(per(total.ended)), unit: "/s", note: `${count(figures.ever + figures.live)} since start`, line: by(s => changes(s).ended / s.seconds)},
    {name: "Errors", value: total.ended ? share(total.failed / total.ended) : NONE, note: `${count(total.failed)} failed · ${count(Math.max(figures.refused, total.refused))} refused`,
      line: by(s => (c => (c.ended ? c.failed / c.ended : 0))(changes(s))), kind: "bad"},
    {name: "Output items", value: rate(per(total.items_out)), unit: "/s", note: `${bytes(per(total.bytes_out))}/s out, ${bytes(per(total.bytes_in))}/s in`, line: by(s => changes(s).items_out / s.seconds)},
    {name: "First item" + of, value: duration(q.first50), unit: "p50", note: `p99 ≈ ${duration(q.first99)}`, line: figures.model && histogram("first", 0.5)},
    {name: "Duration" + of, value: duration(q.duration99), unit: "p99", note: `p50 ≈ ${duration(q.duration50)}`, line: figures.model && histogram("duration", 0.99), kind: "room"},
    {name: "Live streams", value: count(figures.live), note: `${count(waiting.room || 0)} wait for room · ${count(waiting.slot || 0)} for a slot`,
      line: points.filter(p => p.at >= points.at(-1).at - SECONDS).map(p => ({at: p.at, value: p.live}))},
  ];
  return html`<section class="card numbers" aria-label="Figures of the last minute">${cells.map(cell => html`<div key=${cell.name} class="number">
    <h2>${cell.name}</h2><p><b data-figure=${cell.name.split(" of ")[0]}>${cell.value || NONE}</b> ${cell.value && cell.value !== NONE && cell.unit}</p>
    <p class="muted small">${cell.note || "no data yet"}</p>
    ${cell.line && html`<${Sparkline} values=${cell.line} kind=${cell.kind} title=${`${cell.name} in the last five minutes; now ${cell.value}`} />`}</div>`)}</section>`;
}

const nameOf = name => name || "others";

function Items() {
  const {points} = state;
  if (!points.length) return html`<${Card} title="Output items per second" />`;
  const totals = Object.entries(points.at(-1).models).map(([name, m]) => [name, m.items_out]).sort((a, b) => b[1] - a[1]);
  const names = totals.slice(0, 4).map(([name]) => name), rest = totals.slice(4).map(([name]) => name);
  const per = chosen => series(points, SECONDS, SMOOTH, span => chosen.reduce((n, name) => n + (change(span, name)?.items_out || 0), 0) / span.seconds);
  const areas = names.map((name, i) => ({key: nameOf(name), kind: KINDS[i], values: per([name])}));
  if (rest.length) areas.push({key: "all others", kind: KINDS[4], values: per(rest)});
  const last = area => rate(area.values.at(-1)?.value);
  return html`<${Card} title="Output items per second" note="by model">
    <${Areas} areas=${areas} now=${points.at(-1).at} seconds=${SECONDS} text=${rate} title=${"Output items per second: " + areas.map(a => `${a.key} ${last(a)}`).join(", ")} />
    <ul class="legend">${areas.map(area => html`<li key=${area.key}><i class=${"dot back-" + area.kind}></i>${area.key} <b>${last(area)}</b></li>`)}</ul><//>`;
}

function Durations({figures}) {
  const {points, stats} = state, names = Object.keys(stats.models).filter(name => name);
  const of = at => series(points, SECONDS, SMOOTH, span => {
    const one = change(span, figures.model);
    return one && quantile(one.duration, stats.bounds.duration, at);
  });
  const lines = figures.model ? [{key: "p99", kind: "room", values: of(0.99)}, {key: "p50", kind: "model", values: of(0.5)}] : [];
  const last = line => duration(line.values.at(-1)?.value);
  const chosen = event => {
    state.chosen = event.target.value;
    changed();
  };
  const select = names.length > 0 && html`<select aria-label="Model whose latency is shown" value=${figures.model} onChange=${chosen}>
    ${names.map(name => html`<option key=${name} value=${name} selected=${name === figures.model}>${name}</option>`)}</select>`;
  return html`<${Card} title="Duration" note="of requests that ended in each 10 s" right=${select}>
    <${Lines} lines=${lines} now=${points.length ? points.at(-1).at : 0} seconds=${SECONDS} text=${duration} title=${`Duration of ${figures.model}: ` + lines.map(l => `${l.key} ${last(l)}`).join(", ")} />
    <ul class="legend">${lines.map(line => html`<li key=${line.key}><i class=${"dot back-" + line.kind}></i>${line.key} ≈ <b>${last(line)}</b></li>`)}</ul><//>`;
}

function Memory({figures}) {
  const {memory} = state.stats, parts = Object.entries(memory.held).map(([hop, value]) => ({key: HOPS[hop] || "begin", hop, value}));
  const shown = parts.filter(part => part.value > 0);
  return html`<${Card} title="Memory budget" note=${`${bytes(memory.used)} of ${bytes(memory.limit)}`} right=${html`<small>loop lag p99 ${duration(figures.lag99)}</small>`}>
    <${Bar} parts=${parts} whole=${memory.limit} title=${`Memory budget: ${bytes(memory.used)} of ${bytes(memory.limit)}`} />
    <ul class="legend">${shown.map(part => html`<li key=${part.hop}><i class=${"dot back-" + part.key}></i>${HOP_WORDS[part.hop] || part.hop} <b>${bytes(part.value)}</b></li>`)}
      <li>refuses above ${bytes(memory.refuse)}, resets above ${bytes(memory.reset)}</li>
      <li>process ${bytes(memory.process)} of ${bytes(memory.process_limit)}</li></ul><//>`;
}

function Recent() {
  const groups = state.incidents || [], now = state.stats.at;
  return html`<${Card} title="Recent incidents" right=${groups.length > 0 && html`<a href="#/incidents">all ${groups.length}</a>`}>
    ${groups.length ? html`<ul class="plain">${groups.slice(0, 3).map(group => html`<li key=${group.id} class="recent"><span class="muted">${roughly(Math.max(now - group.last, 0))} ago</span>
      <span class="clip">${group.model}</span><a class="clip" href=${"#/incidents/" + encodeURIComponent(group.id)}>${group.error}</a><span>×${count(group.count)}</span></li>`)}</ul>`
    : html`<p class="muted">None since the server began.</p>`}<//>`;
}

function Models({figures}) {
  const models = state.models || [];
  const served = models.filter(model => model.capacity !== undefined).length;
  const columns = [["Model"], ["State"], ["Slots"], ["Queued", 1], ["Req/s", 1], ["Items/s", 1], ["First item p50 / p99", 1], ["Duration p99", 1], ["Errors", 1]];
  return html`<${Card} title="Models" note=${state.models ? `${served} in service, ${models.length - served} not` : "–"}>
    ${state.models && !models.length ? html`<p class="muted">No model is configured. Start the server with --model NAME=MODULE:ATTR.</p>` : html`
    <${Table} caption="Models" columns=${columns.map(([name, num]) => ({key: name, name, num}))}>
      ${models.map(model => html`<${Model} key=${model.name} model=${model} figures=${figures} />`)}<//>`}<//>`;
}

function Model({model, figures}) {
  const one = figures && figures.byModel[model.name], q = (figures && figures.quantiles(model.name)) || {};
  const per = n => (one && figures.seconds ? rate(n(one) / figures.seconds) : NONE);
  const failed = one && one.ended ? one.failed / one.ended : null;
  return html`<tr role="row"><${Cell} name=""><a class="name clip" href=${"#/models/" + encodeURIComponent(model.name)}>${model.name}</a><//>
    <${Cell} name="state"><${StateBadge} model=${model} />${model.versions && model.versions.length > 1 && html` <small>${model.versions.length} versions</small>`}<//>
    <${Cell} name="slots"><${Slots} model=${model} /><//>
    <${Cell} name="queued" num>${count(model.queued)}<//><${Cell} name="req/s" num>${per(m => m.ended)}<//><${Cell} name="items/s" num>${per(m => m.items_out)}<//>
    <${Cell} name="first p50 / p99" num>${q.first50 == null ? NONE : `${duration(q.first50)} / ${duration(q.first99)}`}<//>
    <${Cell} name="p99" num>${duration(q.duration99)}<//>
    <${Cell} name="errors" num kind=${failed >= 0.05 ? "bad" : ""}>${share(failed)}<//></tr>`;
}

/** The slots of a model: those that are held by clients that do not read apart from the others. */
export function Slots({model}) {
  if (model.capacity === undefined) return NONE;
  const blocked = Math.min(model.slots_blocked || 0, model.slots_in_use), full = model.slots_in_use >= model.capacity;
  const title = `${model.slots_in_use} of ${model.capacity} slots in use` + (blocked ? `, ${blocked} by clients that do not read` : "");
  return html`<span class="slots"><${Bar} height="8" whole=${model.capacity} title=${title} parts=${[
    {key: "room", value: blocked}, {key: full ? "slot" : "model", value: model.slots_in_use - blocked}]} /> ${model.slots_in_use}/${model.capacity}</span>`;
}
