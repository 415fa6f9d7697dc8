// The end of a server: asked for with a word, watched while it lasts, and its report when the server is gone.

import {Bar} from "./charts.mjs";
import {ask} from "./contact.mjs";
import {sum} from "./figures.mjs";
import {html} from "./html.mjs";
import {state} from "./state.mjs";
import {bytes, clock, count, duration, roughly, several} from "./units.mjs";
import {Card, Cell, Table, confirm} from "./widgets.mjs";

/** Members of a stream that was cut: key, name, how it is shown, 1 for a number. @type {[string, string, (value: any) => any, number?][]} */
const CUT = [
  ["id", "stream", value => html`<span class="mono">${value}</span>`], ["model", "model", value => value], ["wire", "wire", value => value],
  ["ending", "ending", value => value], ["age", "age", duration, 1], ["bytes_out", "out", bytes, 1],
];

export const isDraining = () => Boolean(state.draining) || (state.stats ? state.stats.reasons.includes("draining") : false);

export function Drain() {
  if (state.report) return html`<${Report} report=${state.report} />`;
  if (isDraining()) return html`<${Progress} />`;
  const live = state.stats ? sum(state.stats.live) : null;
  return html`<${Card} title="Drain this server">
    <p>A drain refuses new requests with 503 and lets those that are live end. What is live at the deadline is cut, and its client is told so. Then the server ends.</p>
    <p class="muted">${live === null ? "–" : `${several(live, "stream")} ${live === 1 ? "is" : "are"} live now.`} A drain cannot be taken back; it can be shortened.</p>
    <p><button type="button" class="danger" onClick=${() => begin(live)}>Drain…</button></p><//>`;
}

const begin = live => confirm({
  title: "Drain this server?",
  text: `${several(live || 0, "stream")} ${live === 1 ? "is" : "are"} live and may end; new requests are refused from now on.`,
  word: "drain", verb: "Drain", run: () => ask("POST", "drain", {}),
});

const shorten = () => confirm({
  title: "Cut what is live now?", text: "Every stream that is live is cut at once, and its client is told so.", word: "drain", verb: "Cut now",
  run: () => ask("POST", "drain", {timeout: 0}),
});

/** The two bars of a drain that is under way. */
function Progress() {
  const {draining, stats, points} = state;
  const live = draining ? draining.live - sum(draining.ended) : stats ? sum(stats.live) : 0;
  const waiting = points.length ? points.at(-1).waiting : {};
  const begun = draining ? draining.live : live, left = draining && stats ? Math.max(draining.deadline - stats.at, 0) : null;
  const whole = draining ? draining.deadline - draining.began : 0;
  return html`<${Card} level="warn" label="Drain">
    <div class="top"><p class="verdict">Draining: ${count(live)} of ${several(begun, "stream")} ${live === 1 ? "is" : "are"} left.</p><button type="button" onClick=${shorten}>Shorten…</button></div>
    <p>New requests get 503 with Retry-After.${draining && ` What is live has until ${clock(draining.deadline)}, ${roughly(left)} from now; then it is cut and told so.`}</p>
    <${Bar} height="10" whole=${begun} parts=${[{key: "good", value: Math.max(begun - live, 0)}]} title=${`${Math.max(begun - live, 0)} of ${begun} streams have ended`} />
    ${draining && html`<${Bar} height="10" whole=${whole} parts=${[{key: "slot", value: Math.max(whole - left, 0)}]} title=${`${duration(whole - left)} of ${duration(whole)} are over`} />
    <ul class="legend">${Object.entries(draining.ended).map(([ending, n]) => html`<li key=${ending}><b>${count(n)}</b> ${ending}</li>`)}
      <li><b>${count(draining.refused)}</b> refused since the drain began</li>
      ${waiting.room > 0 && html`<li>${count(waiting.room)} ${waiting.room === 1 ? "waits" : "wait"} for room: they are cut unless their clients read</li>`}</ul>`}<//>`;
}

function Report({report}) {
  const cut = report.cut.slice(0, 100);
  return html`<${Card} level=${report.clean ? "good" : "warn"} title="Drained" note=${`in ${duration(report.seconds)}`}>
    <p>The server has ended. This report stays until the page is left.</p>
    <ul class="legend"><li><b>${count(report.live)}</b> were live</li><li><b>${count(report.finished)}</b> ended by themselves</li>
      <li><b>${count(report.refused)}</b> refused meanwhile</li>
      ${Object.entries(report.endings).map(([ending, n]) => html`<li key=${ending}>${ending} <b>${count(n)}</b></li>`)}</ul>
    ${cut.length > 0 && html`<p class="sub">Cut: ${several(report.cut.length, "stream")}</p>
      <${Table} caption="Streams that were cut" columns=${CUT.map(([key, name, , num]) => ({key, name, num}))}>${cut.map(one => html`
        <tr role="row" key=${one.id}>${CUT.map(([key, name, shown, num]) => html`<${Cell} key=${key} name=${name} num=${num}>${shown(one[key])}<//>`)}</tr>`)}<//>`}<//>`;
}
