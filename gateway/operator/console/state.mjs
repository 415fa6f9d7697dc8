// The one object that the page draws, and when it is drawn.

export const state = {
  page: "overview", // by the address: #/PAGE/OF?QUERY
  of: "",
  query: new URLSearchParams(),
  paused: false,
  contact: {since: performance.now(), told: false, locked: false, wrong: false, polling: "", error: "", retryAt: 0, over: false},
  stats: null, // as the plane has them
  models: null,
  modelsAt: 0, // on the page's clock, as `since`
  model: null, // the one that is shown, with what is told of one alone
  points: [], // of the last minutes, the oldest first
  incidents: null,
  incident: null, // the one that is shown
  draining: null,
  report: null,
  streams: {rows: null, live: 0, matched: 0, at: 0, shown: 100, opened: "", error: ""},
  watched: "", // the id of a stream whose row is kept as it is told
  row: null,
  chosen: "", // the model whose latency is shown
  dialog: null,
};

let due = false, drawing = () => {};

/** Says what draws. */
export function drawnBy(draw) {
  drawing = draw;
}

/** Draws with the next frame, however often it is called before. */
export function changed() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    drawing();
  });
}

/** Seconds since the last sign of the server. */
export const silence = () => (performance.now() - state.contact.since) / 1000;

/** live, stale, lost, polling, locked, loading, drained or paused: what the page knows of the server. */
export function phase() {
  const {contact} = state;
  if (contact.locked) return "locked";
  if (contact.over) return "drained";
  if (silence() >= 10) return "lost";
  if (silence() >= 5) return "stale";
  if (!contact.told) return "loading";
  if (state.paused) return "paused";
  return contact.polling ? "polling" : "live";
}
