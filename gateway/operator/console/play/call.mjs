// One call of the playground: how it began, what came, and how it ended; and what every kind of call shows of it.

import {html} from "../html.mjs";
import {changed, state} from "../state.mjs";
import {duration} from "../units.mjs";
import {Badge, Card, Fact, PartsBar} from "../widgets.mjs";

const MOST = 256 * 1024; // characters of an answer that are kept
const SHORT = 50; // milliseconds: what comes within them has no rate

/** What the page remembers while it is open. */
export const play = {call: null, off: "", example: "curl", prompt: "Return the", tokens: "64", temperature: "", metadata: {}, given: {}, file: null};

export const running = () => Boolean(play.call && play.call.stop);

/** Begins a call; `run` is awaited with it, and `stop` ends it early. */
export async function begin(model, stop, run) {
  if (running()) return;
  const call = {model, stop, began: performance.now(), text: "", cut: false, items: 0, first: null, last: null, ended: null, status: 0, id: "", word: "waiting", error: "", facts: [],
    sent: 0, held: 0, lost: 0, buffered: 0};
  play.call = call;
  Object.assign(state, {watched: "", row: null});
  changed();
  try {
    await run(call);
    call.word = "complete";
  } catch (error) {
    call.word = call.stopped ? "stopped" : "failed";
    if (!call.stopped) Object.assign(call, {error: error.message, status: error.status || call.status});
  }
  Object.assign(call, {stop: null, ended: performance.now()});
  changed();
}

export function stop() {
  const {call} = play;
  if (!running()) return;
  call.stopped = true;
  call.stop();
}

/** An item of the answer has come: this much text of it is shown. */
export function came(call, text, items = 1) {
  call.last = performance.now();
  call.first ??= call.last;
  call.items += items;
  call.word = "streaming";
  if (call.text.length < MOST) call.text += text;
  else call.cut = true;
  changed();
}

const since = (call, at) => (at === null ? null : (at - call.began) / 1000);

/** `name` is what an item of the answer is, and `of` how many may come. */
export function Answer({model, name, of}) {
  const {call} = play;
  if (!call || call.model !== model.name) return html`<${Card} title="Answer"><p class="muted">Nothing has been asked yet.</p><//>`;
  const row = state.row, now = call.ended ?? performance.now(), good = call.status > 0 && call.status < 400 && call.word !== "failed";
  const per = call.last - call.first >= SHORT ? ((call.items - 1) / (call.last - call.first)) * 1000 : null;
  return html`<${Card} title="Answer" note=${call.word} right=${call.status > 0 && html`<${Badge} level=${good ? "good" : "bad"}>${call.status}<//>`}>
    <p class="sr" role="status">${call.word}</p>
    ${call.error && html`<p class="refused" role="alert">${call.error}</p>`}
    <pre class="answer" tabindex="0" role="region" aria-label="Text of the answer">${call.text}${call.cut && "\n… more came, and is not kept"}</pre>
    <dl class="facts"><${Fact} name=${"First " + name.toLowerCase()}><span data-play="first">${duration(since(call, call.first))}</span><//>
      <${Fact} name=${name + "s"}><span data-play="items">${call.items}</span>${of && ` of ${of}`}<//>
      <${Fact} name=${name + "s/s"}><span data-play="rate">${per === null ? "–" : per.toFixed(1)}</span><//>
      <${Fact} name="Total">${duration(since(call, now))}<//>
      ${call.facts.map(([fact, value]) => html`<${Fact} key=${fact} name=${fact}>${value}<//>`)}
      ${call.id && html`<${Fact} name="Stream" mono><span class="clip">${call.id}</span><//>`}
      ${row && row.ending && html`<${Fact} name="Ending"><span data-play="ending">${row.ending}</span><//>`}</dl>
    ${row && html`<h3>Where its time went</h3><${PartsBar} spent=${row.spent} seconds /><p class="muted small">Waiting for the client to read: that is this page.</p>`}<//>`;
}

/** The same call by other programs: {name: text}. */
export function Examples({examples}) {
  const names = Object.keys(examples), name = names.includes(play.example) ? play.example : names[0];
  const choose = chosen => () => {
    play.example = chosen;
    changed();
  };
  return html`<h2 id="same" class="sub">The same call</h2><div class="buttons" role="group" aria-labelledby="same">${names.map(one => html`
      <button type="button" key=${one} class="tab" aria-pressed=${one === name ? "true" : "false"} onClick=${choose(one)}>${one}</button>`)}</div>
    <pre class="example" tabindex="0" role="region" aria-label=${"The same call by " + name}>${examples[name]}</pre>`;
}

export const Buttons = ({ready = true, word = "Run"}) => html`<div class="buttons run"><button type="button" class="danger" disabled=${!running()} onClick=${stop}>Stop</button>
  <button type="submit" class="main" disabled=${running() || !ready}>${word} <kbd aria-hidden="true">⌃↵</kbd></button></div>`;

/** The keys of a form: Control and Enter begin, Escape stops. */
export function keys(event) {
  if (event.key === "Escape") stop();
  else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    event.currentTarget.requestSubmit();
  }
}

export const set = name => event => {
  play[name] = event.target.value;
  changed();
};
