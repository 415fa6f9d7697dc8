// Rows of JSON as a tensor: its shape, and why it is not one that the model takes. Pure.

const LIMITS = {INT8: [-128, 127], INT16: [-32768, 32767], INT32: [-(2 ** 31), 2 ** 31 - 1], UINT8: [0, 255], UINT16: [0, 65535], UINT32: [0, 2 ** 32 - 1],
  INT64: [Number.MIN_SAFE_INTEGER, Number.MAX_SAFE_INTEGER], UINT64: [0, Number.MAX_SAFE_INTEGER]};

export const shown = shape => `[${shape.join(", ")}]`;

/** True if the model declares no shape of it: the metadata has [-1] then. */
export const anyShape = input => Boolean(input.parameters?.undeclared?.includes("shape"));

/** Rows of zeros of that shape, with 1 where any length is allowed; empty where they would be long. */
export function sample({datatype, shape}) {
  const sizes = shape.map(size => (size < 0 ? 1 : size)), zero = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  if (sizes.reduce((n, size) => n * size, 1) > 64) return "";
  return JSON.stringify(sizes.reduceRight((rows, size) => Array(size).fill(rows), zero));
}

/** {shape, data, problem}: the rows as one flat list; `problem` says what was expected and what came. */
export function tensor(input, text) {
  let rows;
  try {
    rows = JSON.parse(text);
  } catch {
    return {problem: `${input.name}: expected rows in JSON, such as [[1, 2], [3, 4]]`};
  }
  const shape = [];
  for (let row = rows; Array.isArray(row); row = row[0]) shape.push(row.length);
  const data = [], problem = walk(input, rows, shape, 0, data);
  if (problem) return {shape, problem: `${input.name}: ${problem}`};
  const same = shape.length === input.shape.length && shape.every((size, i) => input.shape[i] < 0 || input.shape[i] === size);
  const fits = same || (anyShape(input) && shape.length > 0);
  return fits ? {shape, data} : {shape, problem: `${input.name}: expected shape ${shown(input.shape)}, got ${shown(shape)}`};
}

function walk(input, row, shape, depth, data) {
  if (depth < shape.length) {
    if (!Array.isArray(row) || row.length !== shape[depth]) return `rows of one depth must have one length, ${shape[depth]} here`;
    for (const one of row) {
      const problem = walk(input, one, shape, depth + 1, data);
      if (problem) return problem;
    }
    return "";
  }
  data.push(row);
  return wrong(input.datatype, row);
}

function wrong(datatype, value) {
  const got = `got ${JSON.stringify(value).slice(0, 40)}`;
  if (datatype === "BYTES") return typeof value === "string" ? "" : `expected texts, ${got}`;
  if (datatype === "BOOL") return typeof value === "boolean" ? "" : `expected true or false, ${got}`;
  if (typeof value !== "number") return `expected numbers, ${got}`;
  const limits = LIMITS[datatype];
  return !limits || (Number.isInteger(value) && value >= limits[0] && value <= limits[1]) ? "" : `expected whole numbers from ${limits[0]} to ${limits[1]} (${datatype}), ${got}`;
}

/** A flat list as rows. */
export function rows(data, shape) {
  if (shape.length < 2 || !data.length) return data;
  const size = data.length / shape[0];
  return Array.from({length: shape[0]}, (_, i) => rows(data.slice(i * size, (i + 1) * size), shape.slice(1)));
}
