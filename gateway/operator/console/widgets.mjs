// What several pages are made of: states as words with a shape, facts, tables that become cards, and the one dialog.

import {html} from "./html.mjs";
import {changed, state} from "./state.mjs";
import {PARTS, PART_WORDS} from "./figures.mjs";
import {Bar} from "./charts.mjs";
import {duration, share} from "./units.mjs";

const SHAPES = {good: "●", warn: "◐", bad: "▲", none: "○"};
const LEVELS = {ready: "good", serving: "good", loading: "warn", restarting: "warn", unloading: "warn", stopping: "warn", unloaded: "none", ended: "none"};

/** good, warn, bad or none: how it is with a model in this state. */
export const levelOf = word => LEVELS[word] || "bad";

export const Badge = ({level, children}) =>
  html`<span class=${"badge " + level}><span aria-hidden="true">${SHAPES[level]}</span> ${children}</span>`;

/** A model's state, and when it is tried again. */
export function StateBadge({model}) {
  const left = model.restart_in === null || model.restart_in === undefined ? null : model.restart_in - age();
  const soon = left === null ? "" : ` in ${Math.max(Math.round(left), 0)} s`;
  return html`<${Badge} level=${levelOf(model.state)}>${model.state}${soon}<//>`;
}

/** Seconds since the models were told. */
export const age = () => (performance.now() - state.modelsAt) / 1000;

/** Where time went: a bar and its legend. */
export function PartsBar({spent, height, seconds}) {
  const total = PARTS.reduce((n, part) => n + (spent[part] || 0), 0);
  const parts = PARTS.map(part => ({key: part, value: spent[part] || 0})).filter(part => part.value > 0);
  const amount = part => (seconds ? duration(part.value) : share(part.value / total));
  const title = "Where the time went: " + (parts.map(part => `${PART_WORDS[part.key]} ${amount(part)}`).join(", ") || "nowhere yet");
  return html`<${Bar} parts=${parts} title=${title} height=${height} />
    <ul class="legend">${parts.map(part => html`<li key=${part.key}><i class=${"dot back-" + part.key}></i>${PART_WORDS[part.key]} <b>${amount(part)}</b></li>`)}
    ${!seconds && html`<li>of ${duration(total)} of exchanges</li>`}</ul>`;
}

export const Fact = ({name, children, mono}) => html`<div class="fact"><dt>${name}</dt><dd class=${mono ? "mono" : ""}>${children}</dd></div>`;

export const Card = ({title, note, right, children, level, label}) => html`<section class=${"card " + (level ? "edge " + level : "")} aria-label=${label || title}>
  ${title && html`<div class="top"><h2>${title}${note && html` <small>${note}</small>`}</h2>${right}</div>`}${children}</section>`;

/** Roles are written, since a table drawn as cards would lose them. `columns`: [{key, name, num, sort, wide}]. */
export const Table = ({columns, caption, children}) => html`<table role="table" class="rows"><caption class="sr">${caption}</caption>
  <thead role="rowgroup"><tr role="row">${columns.map(column => html`<th key=${column.key} role="columnheader" scope="col" class=${column.num ? "num" : ""}
    aria-sort=${column.sort}>${column.head || column.name}</th>`)}</tr></thead>
  <tbody role="rowgroup">${children}</tbody></table>`;

export const Cell = ({name, num, children, kind}) =>
  html`<td role="cell" class=${(num ? "num " : "") + (kind || "")} data-name=${name}>${children}</td>`;

/** Opens the dialog: {title, text, verb, run, word}. `run` is awaited, and what it raises is shown beside the button. */
export function confirm(dialog) {
  state.dialog = {typed: "", error: "", busy: false, ...dialog};
  changed();
}

export function Dialog() {
  const {dialog} = state;
  if (!dialog) return null;
  const opened = element => {
    if (element && !dialog.shown) element.showModal();
    dialog.shown = true;
  };
  const close = event => event.currentTarget.closest("dialog").close();
  const closed = () => {
    if (state.dialog === dialog) state.dialog = null; // not another one that was asked for meanwhile
    changed();
  };
  const run = async event => {
    const element = event.currentTarget.closest("dialog");
    Object.assign(dialog, {busy: true, error: ""});
    changed();
    try {
      await dialog.run(dialog.typed, dialog.number);
      element.close();
    } catch (error) {
      dialog.error = error.message;
    }
    dialog.busy = false;
    changed();
  };
  const typed = event => {
    dialog.typed = event.target.value;
    changed();
  };
  const ready = !dialog.word || dialog.typed.trim() === dialog.word;
  // Cancel has the focus: a key that was meant for something else confirms nothing
  return html`<dialog key=${dialog.title} ref=${opened} onClose=${closed} aria-labelledby="asked">
    <h2 id="asked">${dialog.title}</h2><p>${dialog.text}</p>
    ${dialog.body}
    ${dialog.word && html`<label class="field">Type “${dialog.word}” to confirm<input id="word" value=${dialog.typed} onInput=${typed} autocomplete="off" autofocus /></label>`}
    ${dialog.error && html`<p class="refused" role="alert">${dialog.error}</p>`}
    <div class="buttons">
      <button type="button" onClick=${close} autofocus=${!dialog.word}>${dialog.verb ? "Cancel" : "Close"}</button>
      ${dialog.verb && html`<button type="button" class="danger" disabled=${!ready || dialog.busy} onClick=${run}>${dialog.busy ? "Working…" : dialog.verb}</button>`}
    </div></dialog>`;
}
