// A model of tensors: a form made of what the model declares, checked before anything is sent.

import {ask, request} from "../contact.mjs";
import {html} from "../html.mjs";
import {changed, state} from "../state.mjs";
import {Card} from "../widgets.mjs";
import {Answer, Buttons, Examples, begin, came, keys, play} from "./call.mjs";
import {tensorExamples} from "./examples.mjs";
import {anyShape, rows, sample, shown, tensor} from "./shapes.mjs";

const TYPES = ["INT32", "INT64", "FP32", "FP64", "INT8", "INT16", "UINT8", "UINT16", "UINT32", "UINT64", "BOOL", "BYTES"];
const LARGEST = 4 * 1024 * 1024, SHOWN = 4000; // bytes of a file, and characters of an output

const keyOf = model => model.name + " " + model.version;

/** Asks once what a version of a model takes; again in a second where that cannot be told. */
export async function describe(model) {
  const key = keyOf(model), known = play.metadata[key];
  if (known && !known.error) return;
  try {
    const told = await ask("GET", "play/v2/models/" + encodeURIComponent(model.name));
    play.metadata[key] = told;
    play.given[key] = Object.fromEntries(told.inputs.map(input => [input.name, {datatype: input.datatype || TYPES[0], text: optional(input) ? "" : sample(input)}]));
  } catch (error) {
    play.metadata[key] = {error: error.message, inputs: []};
  }
  changed();
}

const optional = input => Boolean(input.parameters?.optional);

/** What would be sent; `problem` in an input that cannot be. */
const filled = (told, given) => told.inputs.filter(input => !optional(input) || given[input.name].text.trim()).map(input => {
  const {name} = input, {datatype, text} = given[name];
  return {name, datatype, ...tensor({...input, datatype}, text)};
});

function run(name, body) {
  const abort = new AbortController();
  begin(name, () => abort.abort(), async call => {
    const answer = await request("POST", `play/v2/models/${encodeURIComponent(name)}/infer`, body, abort.signal);
    Object.assign(call, {status: answer.status, id: answer.headers.get("x-request-id") || ""});
    state.watched = call.id;
    for (const output of (await answer.json()).outputs) {
      const text = JSON.stringify(rows(output.data, output.shape));
      came(call, `${output.name} ${output.datatype} ${shown(output.shape)}\n${text.slice(0, SHOWN)}${text.length > SHOWN ? " …" : ""}\n\n`);
    }
  });
}

export function Tensors({model, url}) {
  const told = play.metadata[keyOf(model)], given = play.given[keyOf(model)];
  if (!told) return html`<${Card} label="Call"><p>–</p><//>`;
  const inputs = filled(told, given), problems = Object.fromEntries(inputs.map(input => [input.name, input.problem]));
  const ready = inputs.length > 0 && inputs.every(input => !input.problem);
  const submit = event => {
    event.preventDefault();
    if (ready) run(model.name, {inputs});
  };
  return html`<div class="two"><${Card} label="Call"><form class="stack" onSubmit=${submit} onKeyDown=${keys}>
      ${told.error && html`<p class="refused" role="alert">${told.error}</p>`}
      ${!told.error && !inputs.length && html`<p class="muted">The model declares no inputs, so there is no form for it.</p>`}
      ${told.inputs.map(input => html`<${Input} key=${input.name} input=${input} given=${given[input.name]} problem=${problems[input.name]} />`)}
      <${Buttons} ready=${ready} /></form>
      ${ready && html`<${Examples} examples=${tensorExamples(url, model.name, {inputs})} />`}<//>
    <${Answer} model=${model} name="Output" /></div>`;
}

function Input({input, given, problem}) {
  const put = name => event => {
    given[name] = event.target.value;
    changed();
  };
  const chosen = async event => {
    const [file] = event.target.files;
    if (!file) return;
    given.text = file.size > LARGEST ? `(the file has ${file.size} bytes, and ${LARGEST} are taken at most)` : await file.text();
    changed();
  };
  const id = "rows-" + input.name;
  return html`<div class="field wide"><div class="top"><label for=${id}>${input.name} <small>${input.datatype} ${anyShape(input) ? "any shape" : shown(input.shape)}${optional(input) && ", optional"}</small></label>
      ${!input.datatype && html`<select aria-label=${"Datatype of " + input.name} onChange=${put("datatype")}>${TYPES.map(type => html`<option key=${type} value=${type} selected=${type === given.datatype}>${type}</option>`)}</select>`}</div>
    <textarea id=${id} rows="3" class="mono" spellcheck="false" value=${given.text} onInput=${put("text")} aria-invalid=${problem ? "true" : "false"} aria-describedby=${problem ? id + "-wrong" : undefined}></textarea>
    ${problem && html`<p id=${id + "-wrong"} class="refused">${problem}</p>`}
    <label class="file">or a file of JSON rows <input type="file" accept=".json,application/json" onChange=${chosen} /></label></div>`;
}
