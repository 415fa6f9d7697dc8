// A model of text: a prompt, its tokens as they come, and what the call was made of.

import {request} from "../contact.mjs";
import {html} from "../html.mjs";
import {state} from "../state.mjs";
import {Card} from "../widgets.mjs";
import {Answer, Buttons, Examples, begin, came, keys, play, set} from "./call.mjs";
import {textExamples} from "./examples.mjs";

function asked() {
  const parameters = {max_new_tokens: Number(play.tokens) || 64, details: true, output_formatter: "jsonlines"};
  if (play.temperature !== "") Object.assign(parameters, {temperature: Number(play.temperature), do_sample: true});
  return {inputs: play.prompt, parameters, stream: true};
}

function run(model) {
  const abort = new AbortController();
  begin(model, () => abort.abort(), async call => {
    const answer = await request("POST", "play/predictions/" + encodeURIComponent(model), asked(), abort.signal);
    Object.assign(call, {status: answer.status, id: answer.headers.get("x-request-id") || ""});
    state.watched = call.id;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) take(call, line);
    }
    take(call, rest);
  });
}

function take(call, line) {
  if (!line.trim()) return;
  let said = null;
  try {
    said = JSON.parse(line);
  } catch {
    // a model's own form of answer
  }
  if (!said || typeof said !== "object" || !("token" in said || "error" in said || "details" in said)) return came(call, line + "\n");
  if (said.error) throw new Error(said.error);
  const text = said.token?.text ?? "";
  if (text) came(call, text);
  if (said.details?.generated_tokens) call.items = said.details.generated_tokens;
  if (said.details?.finish_reason) call.facts = [["Finished by", said.details.finish_reason]];
  if (said.details?.finish_reason === "error") throw new Error("the model has failed: see the incidents");
}

export function Text({model, url}) {
  const submit = event => {
    event.preventDefault();
    run(model.name);
  };
  return html`<div class="two"><${Card} label="Call"><form class="stack" onSubmit=${submit} onKeyDown=${keys}>
      <label class="field wide">Prompt<textarea id="prompt" rows="5" required value=${play.prompt} onInput=${set("prompt")}></textarea></label>
      <div class="filters"><label class="field">max_new_tokens<input type="number" min="1" max="262144" required value=${play.tokens} onInput=${set("tokens")} /></label>
        <label class="field">temperature<input type="number" min="0" step="any" placeholder="greedy" value=${play.temperature} onInput=${set("temperature")} /></label>
        <${Buttons} /></div></form>
      <${Examples} examples=${textExamples(url, model.name, asked())} /><//>
    <${Answer} model=${model} name="Token" of=${Number(play.tokens) || 64} /></div>`;
}
