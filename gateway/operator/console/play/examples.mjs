// The same call by other programs, at the data port: texts to copy. Pure.

const quoted = text => "'" + text.replaceAll("'", "'\\''") + "'";

const posted = (url, path, body) => ({
  curl: `curl -N ${quoted(url + path)} -H 'content-type: application/json' -d ${quoted(body)}`,
  Python: `import urllib.request

call = urllib.request.Request(${JSON.stringify(url + path)}, ${JSON.stringify(body)}.encode(), {"content-type": "application/json"})
for line in urllib.request.urlopen(call):
    print(line.decode(), end="")`,
});

const call = (url, model, more) => `everywire call --url ${quoted(url)} ${quoted(model)} ${more}`;

export function textExamples(url, model, body) {
  const {inputs, parameters} = body, temperature = parameters.temperature === undefined ? "" : `, temperature=${parameters.temperature}`;
  const params = ["max_new_tokens", "temperature", "do_sample"].filter(name => name in parameters).map(name => ` --param ${name}=${parameters[name]}`);
  return {
    ...posted(url, "/predictions/" + encodeURIComponent(model), JSON.stringify(body)),
    openai: `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(url + "/v1")}, api_key="a key, if the server wants one")
for chunk in client.completions.create(model=${JSON.stringify(model)}, prompt=${JSON.stringify(inputs)}, max_tokens=${parameters.max_new_tokens}${temperature}, stream=True):
    print(chunk.choices[0].text, end="", flush=True)`,
    "everywire call": call(url, model, "--text " + quoted(inputs) + params.join("")),
  };
}

export const tensorExamples = (url, model, body) => ({
  ...posted(url, `/v2/models/${encodeURIComponent(model)}/infer`, JSON.stringify(body)),
  "everywire call": call(url, model, body.inputs.map(input => `--tensor ${quoted(`${input.name}=${input.name}.npy`)}`).join(" ")),
});

export const audioExamples = (url, model) => ({
  "everywire call": call(url, model, "--wire websocket --wav speech.wav"),
  microphone: `arecord -f S16_LE -r 16000 | ${call(url, model, "--wire websocket --file -")}`,
});
