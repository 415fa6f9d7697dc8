// One sentence that names the culprit of the last minute. Pure: see `summary` in figures.mjs for what it is given.

import {PARTS} from "./figures.mjs";
import {count, duration, rate, several, share} from "./units.mjs";

const WORTH = 1; // seconds of exchanges: of less no share means anything

const WHY = {
  "queue-full": model => [`queue of ${model} is full`],
  "queue-timeout": model => [`${model} has no slot in time`],
  "party-share": () => ["keys have their share already"],
  "idle-when-wanted": () => ["silent streams are ended for those that wait"],
  rate: () => ["keys call too often"],
  "in-flight": () => ["keys have too many streams at once"],
  connections: () => ["too many connections"],
  memory: () => ["memory is short"],
  "memory-reset": () => ["memory is short, and streams are ended for it"],
  draining: () => ["the server drains"],
  "model-not-ready": model => [`${model} is not ready`],
  "no-place-for-model": () => ["a model finds no memory"],
  "no-time-left": () => ["requests come too late"],
};

const link = (text, href) => ({text, href});
export const modelLink = name => link(name, "#/models/" + encodeURIComponent(name));
const most = (names, of) => names.reduce((best, name) => (best === null || of(name) > of(best) ? name : best), null);

/** {level, rule, title, detail}: `level` is good, warn or bad, `detail` a list of texts and {text, href}. */
export function verdict(f) {
  const named = Object.keys(f.byModel).filter(name => name);
  const status = name => f.models.find(model => model.name === name) || {};
  if (f.draining) return said("warn", "draining", "Draining: new requests are refused.", f.reasons.length ? [f.reasons.join("; ")] : []);
  if (!f.ready) return said("bad", "unready", "Not ready: " + (f.reasons.join("; ") || "no reason is given"), []);
  if (!f.total || (!f.ever && !f.live)) return said("good", "empty", "Ready. Nothing has called yet.", []);
  const {total} = f;
  const asked = Math.max(total.ended, f.refused);
  if (f.refused > 0.01 * asked) {
    const reason = most(Object.keys(f.refusals), name => f.refusals[name]);
    const model = most(named, name => f.byModel[name].refused) || "a model";
    const why = (WHY[reason] || (() => [reason]))(model);
    const others = Object.entries(f.refusals).filter(([name, n]) => n && name !== reason).map(([name, n]) => `${name} ${count(n)}`);
    const detail = [`${several(f.refused, "request")} of ${count(asked)} in the last minute.`];
    if (named.includes(model)) detail.push(" ", modelLink(model), ` has ${slots(status(model))}.`);
    if (others.length) detail.push(` Also: ${others.join(", ")}.`);
    return said("bad", "refusing", `Refusing: ${why.join("")} (${share(f.refused / asked)})`, detail);
  }
  const spent = PARTS.reduce((n, part) => n + (total.spent[part] || 0), 0);
  const part = name => (spent >= WORTH ? (total.spent[name] || 0) / spent : 0);
  if (part("room") >= 0.3) return slowReaders(f, part("room"));
  if (part("slot") >= 0.2) {
    const model = most(named, name => f.byModel[name].spent.slot || 0) || "";
    const {ended, spent: its} = f.byModel[model] || {ended: 0, spent: {}};
    const each = ended ? `, ${duration((its.slot || 0) / ended)} for a slot` : "";
    return said("warn", "full", `${model} is full: ${slots(status(model))}${each}`, [
      "Requests to ", modelLink(model), ` wait for one of its slots: ${share(part("slot"))} of all time in the last minute.`,
    ]);
  }
  const failing = named.filter(name => f.byModel[name].failed && f.byModel[name].failed >= 0.05 * f.byModel[name].ended);
  if (failing.length) {
    const model = most(failing, name => f.byModel[name].failed / f.byModel[name].ended);
    const {failed, ended} = f.byModel[model], error = status(model).last_error;
    const detail = [`${count(failed)} of ${several(ended, "request")} in the last minute.`];
    if (error) detail.push(" The last: ", link(error.error.slice(0, 200), "#/incidents/" + encodeURIComponent(error.incident)));
    return said("bad", "failing", `${model} fails ${share(failed / ended)} of its requests`, detail);
  }
  if (f.lag99 !== null && f.lag99 >= 0.05) {
    return said("warn", "lag", "Something blocks the event loop", [
      `Its timer is ${duration(f.lag99)} late (p99). Every stream waits while a model, or a thread that holds Python, does not let go.`,
    ]);
  }
  const duplex = f.models.some(model => model.family === "parts");
  if (part("input") >= 0.5 && !duplex) {
    const peer = f.peers.filter(one => one.input).sort((a, b) => b.input - a.input)[0];
    return said("warn", "senders", "Clients send slowly", [
      `${share(part("input"))} of exchange time in the last minute was spent waiting for the rest of requests.`,
      ...(peer ? [" Most of it for ", peerLink(peer.address), ` (${several(peer.streams, "stream")}).`] : []),
    ]);
  }
  return healthy(f, total);
}

const said = (level, rule, title, detail) => ({level, rule, title, detail});

const peerLink = address => link(address, "#/streams?peer=" + encodeURIComponent(address));

const slots = status =>
  status.capacity === undefined ? "no slots" : `${status.slots_in_use} of ${several(status.capacity, "slot")}, ${count(status.queued)} queued`;

function slowReaders(f, part) {
  const all = f.peers.reduce((n, peer) => n + peer.room, 0);
  const peer = f.peers.filter(one => one.room).sort((a, b) => b.room - a.room)[0];
  const detail = [];
  if (peer) {
    detail.push("One address, ", peerLink(peer.address), `, accounts for ${share(peer.room / all)} of what live streams wait: `);
    detail.push(`${several(peer.streams, "stream")} that ${peer.streams === 1 ? "holds" : "hold"} ${several(peer.slots, "slot")}.`);
  }
  for (const model of f.models.filter(one => one.slots_blocked).sort((a, b) => b.slots_blocked - a.slots_blocked).slice(0, 2))
    detail.push(` ${count(model.slots_blocked)} of the ${several(model.capacity, "slot")} of `, modelLink(model.name), " are held by clients that do not read.");
  if (!detail.length) detail.push("The streams that waited are over.");
  return said("warn", "readers", `Slow readers: ${share(part)} of exchange time in the last minute went to clients that do not read.`, detail);
}

function healthy(f, total) {
  const p99 = f.model ? (f.quantiles(f.model) || {}).duration99 : null;
  const latency = p99 === null || p99 === undefined ? "" : `, p99 of ${f.model} ${duration(p99)}`;
  const wrong = Math.max(f.refused, total.refused); // a request that is wrong is refused too, and its client is to blame
  const refused = wrong ? share(wrong / Math.max(total.ended, wrong)) + " refused" : "no refusals";
  const asked = total.ended ? `${rate(total.ended / f.seconds)} requests/s${latency}, ${refused}` : "no request has ended in the last minute";
  return said("good", "healthy", `Healthy: ${asked}`, f.live ? [several(f.live, "stream") + (f.live === 1 ? " is live." : " are live.")] : []);
}
