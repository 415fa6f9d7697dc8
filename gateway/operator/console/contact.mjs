// Asks the plane, and reads its event stream: again and again while the page is shown, with pauses where it does not answer.

import {appended, fromStart, pointOf} from "./figures.mjs";
import {changed, state} from "./state.mjs";

const KEY = "everywire token";
const LONGEST = 30, EACH = 5; // seconds: between two attempts, and between two looks where the event stream has no place
let token = sessionStorage.getItem(KEY) || "";
let reading = null; // what ends the attempt, or the pause, that is under way
let pause = 1;
let held = []; // events that came while the page is paused

/** An answer that is none: with the plane's own words. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** An answer. Refused where it is an error. */
export async function request(method, path, body, signal) {
  const headers = {"content-type": "application/json"};
  if (token) headers.authorization = "Bearer " + token;
  const answer = await fetch(path, {method, headers, body: body && JSON.stringify(body), cache: "no-store", signal});
  if (answer.ok) return answer;
  const text = await answer.text();
  let said = `${answer.status} ${answer.statusText}`;
  try {
    said = JSON.parse(text).error || said;
  } catch {
    // not the plane's: a proxy's
  }
  if (answer.status === 401) lock();
  throw new Refused(answer.status, said);
}

/** The JSON of an answer. Refused where it is an error. */
export async function ask(method, path, body, signal) {
  return (await request(method, path, body, signal)).json();
}

function lock() {
  state.contact.locked = true;
  state.contact.wrong = Boolean(token);
  changed();
}

/** Tries this token. */
export function unlock(word) {
  token = word;
  sessionStorage.setItem(KEY, word);
  Object.assign(state.contact, {locked: false, wrong: false, told: false, since: performance.now()});
  again();
}

/** Attempts at once what it waits to attempt. */
export function again() {
  pause = 1;
  if (reading) reading.abort();
}

function alive() {
  Object.assign(state.contact, {since: performance.now(), told: true, error: ""});
}

/** While it is paused what comes is kept, and nothing of what is shown moves. */
export function setPaused(paused) {
  state.paused = paused;
  if (!paused) {
    for (const [name, data] of held) take(name, data);
    held = [];
  }
  changed();
}

function tell(name, data) {
  alive();
  if (state.paused && (name === "stats" || name === "models")) held = [...held.filter(([other]) => other !== name), [name, data]];
  else take(name, data);
  changed();
}

function take(name, data) {
  if (name === "stats") {
    if (state.stats && data.uptime < state.stats.uptime) begun();
    state.stats = data;
    const first = !state.points.length;
    state.points = appended(state.points, pointOf(data));
    if (first) state.points = fromStart(state.points, data);
  } else if (name === "models") {
    const served = new Set(data.map(model => model.name)), known = state.models || [];
    const others = known.filter(model => model.capacity === undefined && !served.has(model.name));
    state.models = [...data, ...others].sort((a, b) => (a.name < b.name ? -1 : 1));
    state.modelsAt = performance.now();
    // events are of models in service alone
    if (known.some(model => model.capacity !== undefined && !served.has(model.name)) || !known.length) askModels();
  } else if (name === "incident") {
    const others = (state.incidents || []).filter(group => group.id !== data.id);
    state.incidents = [data, ...others].slice(0, 100);
  } else if (name === "draining") state.draining = data;
  else if (name === "drained") {
    state.report = data;
    state.contact.over = true;
  }
}

async function askModels() {
  try {
    const {models} = await ask("GET", "models");
    Object.assign(state, {models, modelsAt: performance.now()});
  } catch {
    // those in service are known
  }
  changed();
}

/** The server is another one: what was counted is no more. */
function begun() {
  Object.assign(state, {points: [], draining: null, report: null});
  state.contact.over = false;
}

async function past(signal) {
  const history = await ask("GET", "history?seconds=360", undefined, signal);
  const newest = state.points.at(-1);
  // a server that has begun anew has no past before it
  const points = history.points.filter(point => !state.stats || point.at > state.stats.at - state.stats.uptime - 1);
  const all = newest ? [...points.filter(point => point.at < newest.at), newest] : points;
  state.points = state.stats ? fromStart(all, state.stats) : all;
  changed();
}

async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const end = event.indexOf("\n"), name = event.slice(7, end);
      // the rows of streams come from /streams, sorted: here they only say that the server is there
      if (name === "opened" || name === "changed" || name === "closed") {
        alive();
        if (state.watched && event.includes(state.watched)) state.row = JSON.parse(event.slice(end + 7));
      }
      else if (event.startsWith("event: ")) tell(name, JSON.parse(event.slice(end + 7)));
    }
  }
}

async function look(signal) {
  const of = path => ask("GET", path, undefined, signal);
  const [stats, models, incidents] = await Promise.all([of("stats"), of("models"), of("incidents")]);
  state.incidents = incidents.incidents;
  Object.assign(state, {models: models.models, modelsAt: performance.now()});
  tell("stats", stats);
}

async function attempt(signal) {
  try {
    const answer = await request("GET", "streams/events", undefined, signal);
    pause = 1;
    state.contact.polling = "";
    Object.assign(state, {incidents: [], models: null}); // its first events tell them
    past(signal).catch(() => {}); // the stream says it if the server is gone
    await read(answer);
    if (!state.contact.over) throw new Error("The server has ended the stream of events");
  } catch (error) {
    if (!(error instanceof Refused && error.status === 503)) throw error;
    if (!state.contact.polling) await past(signal);
    state.contact.polling = error.message;
    await look(signal);
    pause = EACH;
  }
}

function wait(seconds, signal) {
  return new Promise(resolve => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Reads for ever; while the page is hidden, or a token is to be typed, it does not. */
export async function watch() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) state.contact.since = performance.now();
    again();
  });
  for (;;) {
    reading = new AbortController();
    const {signal} = reading;
    if (document.hidden || state.contact.locked) await wait(3600, signal);
    else {
      try {
        await attempt(signal);
      } catch (error) {
        if (!signal.aborted) state.contact.error = error instanceof TypeError ? "The server does not answer" : error.message;
      }
      if (!signal.aborted && !state.contact.locked) {
        state.contact.retryAt = performance.now() + pause * 1000;
        changed();
        await wait(pause, signal);
        if (!signal.aborted && !state.contact.polling) pause = Math.min(pause * 2, LONGEST);
      }
    }
    changed();
  }
}
