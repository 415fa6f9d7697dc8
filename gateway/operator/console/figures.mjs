// What the counters of two moments say together: rates, shares, quantiles. Pure.

export const PARTS = ["room", "model", "slot", "input", "flush", "begin"];
/** In the order in which they are drawn, with what each means. */
export const PART_WORDS = {
  room: "client does not read",
  model: "model",
  slot: "queue",
  input: "client does not send",
  flush: "last bytes",
  begin: "before start",
};
const FAILED = ["model-error", "deadline"];
export const KEPT = 180; // points, two seconds apart

/** The figures of now in the form of a point of the history. */
export function pointOf(stats) {
  const waiting = {};
  for (const parts of Object.values(stats.waiting))
    for (const [part, n] of Object.entries(parts)) waiting[part] = (waiting[part] || 0) + n;
  const models = {};
  for (const [name, m] of Object.entries(stats.models))
    models[name] = {...m, duration: m.duration.buckets, first: m.first.buckets};
  return {
    at: stats.at,
    live: sum(stats.live),
    waiting,
    connections: sum(stats.connections),
    refusals: stats.refusals,
    memory: stats.memory.used,
    process: stats.memory.process,
    lag: stats.lag.buckets,
    models,
  };
}

export const sum = counts => Object.values(counts || {}).reduce((a, b) => a + b, 0);

/** Points with one more: the last is always the newest, the others are two seconds apart, and there are KEPT at most. */
export function appended(points, point) {
  const kept = points.filter(p => p.at < point.at).slice(-KEPT);
  const [last, before] = [kept.at(-1), kept.at(-2)];
  if (last && before && last.at - before.at < 1.9) kept.pop();
  return [...kept, point];
}

/** Points with the one of the server's start before them, when all counters were 0, if they reach back to it. */
export function fromStart(points, stats) {
  const at = stats.at - stats.uptime;
  if (!points.length || points[0].at - at > 5 || points[0].at <= at) return points;
  return [{at, live: 0, waiting: {}, connections: 0, refusals: {}, memory: 0, process: 0, lag: [], models: {}}, ...points];
}

/** The two points that enclose so many seconds up to the newest one: {now, before, seconds}; null where there are not two. */
export function over(points, seconds) {
  const now = points.at(-1);
  if (!now) return null;
  const before = points.find(p => p.at >= now.at - seconds - 0.5);
  return before && before !== now ? {now, before, seconds: now.at - before.at} : null;
}

const failedOf = endings => FAILED.reduce((n, name) => n + (endings[name] || 0), 0);

const grown = (now, before) => Object.fromEntries(Object.keys(now).map(key => [key, now[key] - ((before || {})[key] || 0)]));

const minus = (now, before) => now.map((n, i) => n - ((before && before[i]) || 0));

/** What one model did between two points; all of it may be 0. */
export function change(span, name) {
  const now = span.now.models[name], before = span.before.models[name];
  if (!now) return null;
  const endings = grown(now.endings, before && before.endings);
  return {
    ended: sum(endings),
    failed: failedOf(endings),
    refused: endings.refused || 0,
    items_in: now.items_in - (before ? before.items_in : 0),
    items_out: now.items_out - (before ? before.items_out : 0),
    bytes_in: now.bytes_in - (before ? before.bytes_in : 0),
    bytes_out: now.bytes_out - (before ? before.bytes_out : 0),
    spent: grown(now.spent, before && before.spent),
    duration: minus(now.duration, before && before.duration),
    first: minus(now.first, before && before.first),
  };
}

/** Of all models together: what can be added. */
export function changes(span) {
  const total = {ended: 0, failed: 0, refused: 0, items_out: 0, bytes_in: 0, bytes_out: 0};
  for (const name of Object.keys(span.now.models)) {
    const one = change(span, name);
    for (const key of ["ended", "failed", "refused", "items_out", "bytes_in", "bytes_out"]) total[key] += one[key];
  }
  return total;
}

/** A quantile of a histogram by linear interpolation; null where it is empty. What is beyond the last bound is that bound. */
export function quantile(buckets, bounds, q) {
  const all = buckets.reduce((a, b) => a + b, 0);
  if (all <= 0) return null;
  let below = 0;
  for (let i = 0; i < buckets.length; i++) {
    if (buckets[i] > 0 && below + buckets[i] >= q * all) {
      if (i >= bounds.length) return bounds.at(-1);
      const lower = i ? bounds[i - 1] : 0;
      return lower + (bounds[i] - lower) * ((q * all - below) / buckets[i]);
    }
    below += buckets[i];
  }
  return bounds.at(-1);
}

/** One value a point of the last `seconds`: `of` the span of `width` seconds that ends there; null where there is none. */
export function series(points, seconds, width, of) {
  const now = points.at(-1);
  if (!now) return [];
  const found = [];
  let from = 0;
  for (let i = 0; i < points.length; i++) {
    const point = points[i];
    while (points[from].at < point.at - width - 0.5) from++;
    if (point.at < now.at - seconds) continue;
    const before = points[from];
    found.push({at: point.at, value: before === point ? null : of({now: point, before, seconds: point.at - before.at})});
  }
  return found;
}

/** What the page says about the last minute, from the points and the figures of now. */
export function summary(points, stats, chosen) {
  const span = over(points, 60);
  const total = span ? changes(span) : null;
  const byModel = {};
  if (span) for (const name of Object.keys(span.now.models)) byModel[name] = change(span, name);
  const model = chosen && byModel[chosen] ? chosen : busiest(byModel, stats);
  const bounds = stats.bounds;
  const quantiles = name => {
    const one = byModel[name];
    return one && {
      first50: quantile(one.first, bounds.first, 0.5), first99: quantile(one.first, bounds.first, 0.99),
      duration50: quantile(one.duration, bounds.duration, 0.5), duration99: quantile(one.duration, bounds.duration, 0.99),
    };
  };
  return {
    seconds: span ? span.seconds : 0,
    live: sum(stats.live),
    ever: Object.values(stats.models).reduce((n, m) => n + sum(m.endings), 0),
    total,
    byModel,
    refused: span ? sum(grown(span.now.refusals, span.before.refusals)) : 0,
    lag99: span ? quantile(minus(span.now.lag, span.before.lag), bounds.lag, 0.99) : null,
    model,
    quantiles,
  };
}

/** The model whose latency is shown where nobody has chosen: the one with most requests in the last minute, or ever. */
function busiest(byModel, stats) {
  const all = name => sum(stats.models[name].endings);
  const names = Object.keys(stats.models).filter(name => name);
  names.sort((a, b) => (byModel[b]?.ended || 0) - (byModel[a]?.ended || 0) || all(b) - all(a) || (a < b ? -1 : 1));
  return names[0] || "";
}
