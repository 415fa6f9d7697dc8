// The playground: calls of the real models from this page, by their family. Loaded when it is first opened.

import {ask} from "../contact.mjs";
import {html} from "../html.mjs";
import {changed, state} from "../state.mjs";
import {Card} from "../widgets.mjs";
import {Audio} from "./audio.mjs";
import {play, running} from "./call.mjs";
import {Tensors, describe} from "./tensors.mjs";
import {Text} from "./text.mjs";

const KINDS = {text: Text, tensor: Tensors, parts: Audio};
let asked = false, asking = false;

const served = () => (state.models || []).filter(model => model.capacity !== undefined);

const chosen = () => served().find(model => model.name === state.of) || (state.of ? undefined : served()[0]);

/** Asks once whether there is a playground, and of a model of tensors what it takes; called each second while the page is shown. */
export async function look() {
  const model = chosen();
  if (asking || !state.stats) return;
  asking = true;
  if (!asked) {
    try {
      await ask("GET", "play/v2");
      asked = true;
    } catch (error) {
      asked = error.status === 404 || error.status === 409;
      if (asked && error.message.includes("playground")) play.off = error.message;
    }
  }
  if (asked && !play.off && model && model.family === "tensor") await describe(model);
  asking = false;
  changed();
}

export function Playground() {
  if (play.off) return html`<${Card} title="No playground"><p>${play.off}</p><//>`;
  const models = served(), model = chosen();
  if (!state.models) return html`<${Card} label="Playground"><p>–</p><//>`;
  if (!models.length) return html`<${Card} title="No model is in service"><p class="muted">Start the server with <code>--model NAME=MODULE:ATTR</code>, or load one on <a href="#/models">the models page</a>.</p><//>`;
  const choose = event => {
    location.hash = "#/playground/" + encodeURIComponent(event.target.value);
  };
  const Kind = model && KINDS[model.family], url = state.stats && state.stats.address[0];
  return html`<link rel="stylesheet" href="console/play/play.css" />
    <${Card} label="Model"><div class="top"><label class="field">Model
        <select id="playing" value=${model ? model.name : ""} disabled=${running()} onChange=${choose}>${!model && html`<option value="">choose one</option>`}
          ${models.map(one => html`<option key=${one.name} value=${one.name} selected=${one === model}>${one.name} (${one.family})</option>`)}</select></label>
      <p class="note muted small">You call the real models, as their clients do. hypercorn carries these calls, with buffers of its own: backpressure
        and endings are told a little later than on the data port (reference/asgi.md).</p></div><//>
    ${Kind ? html`<${Kind} key=${model.name} model=${model} url=${url || "http://127.0.0.1:8080"} />` : html`<${Card} label="Call"><p>There is no model <b class="clip">${state.of}</b> in service.</p><//>`}`;
}
