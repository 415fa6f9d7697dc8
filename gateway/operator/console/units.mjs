// Numbers as people read them. Pure: a value in, a short text out; "–" for what there is none of.

export const NONE = "–";
const GAP = "\u00a0"; // a number and its unit stay on one line

const missing = value => value === null || value === undefined || Number.isNaN(value);

const digits = value => (value < 9.95 ? value.toFixed(1) : String(Math.round(value)));

/** 7, 812, 2.2 k, 2.1 M. */
export function count(value) {
  if (missing(value)) return NONE;
  for (const [size, unit] of /** @type {[number, string][]} */ ([[1e9, "G"], [1e6, "M"], [1e3, "k"]]))
    if (value >= size * 0.9995) return digits(value / size) + GAP + unit;
  return String(Math.round(value));
}

/** A rate in a second: as a count, but 4.1 below ten, and 0.05 where it is small. */
export function rate(value) {
  if (missing(value)) return NONE;
  if (value === 0) return "0";
  if (value < 0.095) return value < 0.005 ? "0.00" : value.toFixed(2);
  return value < 9.95 ? value.toFixed(1) : count(value);
}

/** 46 B, 279 KiB, 23.1 MiB. */
export function bytes(value) {
  if (missing(value)) return NONE;
  let unit = 0;
  while (value >= 1023.95 && unit < 5) [value, unit] = [value / 1024, unit + 1];
  const short = unit && value < 99.95 && Math.abs(value - Math.round(value)) >= 0.05 ? value.toFixed(1) : String(Math.round(value));
  return short + GAP + ["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit];
}

/** Seconds: 4 ms, 5.8 s, 4m 12s, 3h 05m, 3d 4h. */
export function duration(value) {
  if (missing(value)) return NONE;
  if (value < 0.0095) return (value * 1000 < 0.05 ? "0" : (value * 1000).toFixed(1).replace(".0", "")) + GAP + "ms";
  if (value < 0.9995) return Math.round(value * 1000) + GAP + "ms";
  if (value < 59.95) return value.toFixed(1) + GAP + "s";
  const whole = Math.round(value);
  const two = number => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m${GAP}${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${GAP}${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${GAP}${Math.floor((whole % 86400) / 3600)}h`;
}

/** Roughly so long ago or for so long: 12 s, 41 min, 2 h, 3 d. */
export function roughly(value) {
  if (missing(value)) return NONE;
  if (value < 90) return Math.round(value) + GAP + "s";
  if (value < 5400) return Math.round(value / 60) + GAP + "min";
  if (value < 129600) return Math.round(value / 3600) + GAP + "h";
  return Math.round(value / 86400) + GAP + "d";
}

/** A fraction in per cent: 48 %, 1.0 %. */
export function share(value) {
  if (missing(value)) return NONE;
  const percent = value * 100;
  if (percent === 0) return "0" + GAP + "%";
  return (percent < 9.95 ? percent.toFixed(1) : String(Math.round(percent))) + GAP + "%";
}

/** The time of day of so many seconds since 1970, where the reader is. */
export function clock(at) {
  if (missing(at)) return NONE;
  return new Date(at * 1000).toTimeString().slice(0, 8);
}

/** "1 stream", "2 streams". */
export function several(number, word, plural = word + "s") {
  return `${count(number)}${GAP}${number === 1 ? word : plural}`;
}
