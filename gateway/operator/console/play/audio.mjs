// A model of parts: a WAV file or the microphone over a WebSocket, sent no faster than the model takes it.

import {ask} from "../contact.mjs";
import {Gauge} from "../charts.mjs";
import {html} from "../html.mjs";
import {changed, state} from "../state.mjs";
import {bytes} from "../units.mjs";
import {Card} from "../widgets.mjs";
import {Answer, Buttons, Examples, begin, came, keys, play, running} from "./call.mjs";
import {audioExamples} from "./examples.mjs";

const ROOM = 64 * 1024; // bytes that the browser may hold: nothing is sent while it holds more
const PIECE = 16 * 1024, RATE = 16000, HELD = 10 * RATE * 2; // of a file; samples a second; of the microphone while nothing is sent
const LOOK = 20, PATIENCE = 1000; // milliseconds: between two looks, and until a stream that does not end is ended by the plane

const pause = () => new Promise(resolve => setTimeout(resolve, LOOK));

/** Why there is no microphone; empty where there may be one. */
const noMicrophone = () => (window.isSecureContext && navigator.mediaDevices ? "" : "A microphone needs HTTPS or localhost. Open this page there, or choose a WAV file.");

function note(call, more) {
  Object.assign(call, more);
  call.facts = [["Sent", bytes(call.sent)], ["Not sent yet", bytes(call.held)]];
  if (call.lost) call.facts.push(["Lost", bytes(call.lost)]);
  changed();
}

/** Opens the WebSocket, with a ticket in place of the token that it cannot carry. */
async function connect(call, model) {
  const {ticket, path, end} = await ask("POST", "play/ticket", {});
  const url = new URL("play/" + path.replace("{name}", encodeURIComponent(model)), document.baseURI);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url, ["everywire.play", "everywire.ticket." + ticket]);
  socket.binaryType = "arraybuffer";
  socket.onmessage = ({data}) => {
    if (!call.id) state.watched = call.id = JSON.parse(data).stream; // the first message is the plane's
    else came(call, typeof data === "string" ? data + "\n" : `(${bytes(data.byteLength)})\n`);
  };
  const closed = new Promise(resolve => socket.addEventListener("close", resolve));
  await Promise.race([new Promise(resolve => socket.addEventListener("open", resolve)), closed]);
  if (socket.readyState !== WebSocket.OPEN) throw new Error("The server refused the WebSocket: its log says why");
  note(call, {status: 101, word: "streaming"});
  return {socket, closed, end};
}

async function room(call, socket) {
  while (socket.readyState === WebSocket.OPEN && socket.bufferedAmount >= ROOM) {
    note(call, {buffered: socket.bufferedAmount});
    await pause();
  }
  return socket.readyState === WebSocket.OPEN && !call.stopped;
}

/** Sends what `next` gives, until that is nothing, and waits for the answer's end. */
async function send(call, model, next) {
  const {socket, closed, end} = await connect(call, model);
  const stopped = new Promise(resolve => {
    call.stop = () => {
      socket.close(1000);
      resolve({});
      // a Close waits behind what the model does not take
      setTimeout(() => socket.readyState !== WebSocket.CLOSED && ask("POST", `streams/${call.id}/end`, {}).catch(() => {}), PATIENCE);
    };
  });
  if (call.stopped) call.stop();
  while (await room(call, socket)) {
    const piece = await next(call);
    if (!piece) break;
    socket.send(piece);
    note(call, {sent: call.sent + piece.byteLength, buffered: socket.bufferedAmount});
  }
  if (socket.readyState === WebSocket.OPEN && !call.stopped) {
    socket.send(end);
    call.word = "the end was sent";
  }
  const {code, reason} = await Promise.race([closed, stopped]);
  call.buffered = 0;
  if (call.stopped) throw new Error("stopped");
  if (code !== 1000) throw new Error(`The server closed with ${code}${reason && ": " + reason}`);
}

function sendFile(model, file) {
  let at = 0;
  begin(model, () => {}, call => send(call, model, async () => {
    if (at >= file.size) return null;
    const piece = await file.slice(at, (at += PIECE)).arrayBuffer();
    call.held = Math.max(file.size - at, 0);
    return piece;
  }));
}

function sendMicrophone(model) {
  begin(model, () => {}, async call => {
    let microphone;
    try {
      microphone = await navigator.mediaDevices.getUserMedia({audio: {channelCount: 1}});
    } catch (error) {
      throw new Error(`The browser gives no microphone (${error.name}): allow it for this page, or choose a WAV file`);
    }
    const context = new AudioContext({sampleRate: RATE}), frames = [];
    try {
      await context.audioWorklet.addModule(new URL("pcm.mjs", import.meta.url));
      const pcm = new AudioWorkletNode(context, "pcm");
      pcm.port.onmessage = ({data}) => {
        frames.push(data);
        call.held += data.byteLength;
        while (call.held > HELD) {
          const {byteLength} = frames.shift();
          Object.assign(call, {held: call.held - byteLength, lost: call.lost + byteLength});
        }
      };
      context.createMediaStreamSource(microphone).connect(pcm);
      call.speaking = true;
      await send(call, model, async () => {
        while (call.speaking && !call.stopped && !frames.length) await pause();
        const frame = frames.shift();
        if (frame) call.held -= frame.byteLength;
        return frame;
      });
    } finally {
      call.speaking = false;
      for (const track of microphone.getTracks()) track.stop();
      await context.close();
    }
  });
}

export function Audio({model, url}) {
  const {call, file} = play, without = noMicrophone(), speaking = running() && call.speaking;
  const submit = event => {
    event.preventDefault();
    if (file) sendFile(model.name, file);
  };
  const chosen = event => {
    play.file = event.target.files[0] || null;
    changed();
  };
  const speak = () => {
    if (speaking) call.speaking = false;
    else sendMicrophone(model.name);
    changed();
  };
  const buffered = call ? call.buffered : 0;
  return html`<div class="two"><${Card} label="Call"><form class="stack" onSubmit=${submit} onKeyDown=${keys}>
      <p class="muted">The model gets the bytes as they are. That of the library wants 16 kHz, mono, 16 bits.</p>
      <label class="field wide">WAV file<input id="wav" type="file" accept=".wav,audio/wav" onChange=${chosen} /></label>
      ${without ? html`<p class="muted" data-play="no-microphone">${without}</p>`
        : html`<p><button type="button" id="microphone" disabled=${running() && !speaking} onClick=${speak}>${speaking ? "End of speech" : "Speak"}</button></p>`}
      <div><p class="small">Held by the browser: ${bytes(buffered)}. At ${bytes(ROOM)} the page waits for the model.</p>
        <${Gauge} kind="room" held=${buffered} limit=${ROOM} title=${`Held by the browser: ${bytes(buffered)} of ${bytes(ROOM)}`} /></div>
      <${Buttons} ready=${Boolean(file)} word="Send the file" /></form>
      <${Examples} examples=${audioExamples(url, model.name)} /><//>
    <${Answer} model=${model} name="Part" /></div>`;
}
