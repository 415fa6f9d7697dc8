// Charts as SVG: bars of shares, sparklines, lines and stacked areas. Each has a title, and its last values are text beside it.

import {html} from "./html.mjs";

const WIDTH = 540, HEIGHT = 150, LEFT = 46, BOTTOM = 18;

/** Shares of one whole beside one another: [{key, value, label}]. */
export function Bar({parts, whole, title, height = 20}) {
  const total = Math.max(whole || 0, parts.reduce((n, part) => n + part.value, 0)) || 1;
  let x = 0;
  const drawn = parts.filter(part => part.value > 0).map(part => {
    const width = (part.value / total) * 1000, at = x;
    x += width;
    return html`<rect key=${part.key} class=${"fill-" + part.key} x=${at} y="0" width=${Math.max(width - 1.5, 0.5)} height="10" />`;
  });
  return html`<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" height=${height} role="img" aria-label=${title}>
    <title>${title}</title><rect class="fill-none" width="1000" height="10" />${drawn}</svg>`;
}

/** How full one thing is, small. */
export function Gauge({held, limit, kind, title}) {
  const width = limit ? Math.min(held / limit, 1) * 100 : 0;
  return html`<svg class="gauge" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${title}>
    <title>${title}</title><rect class="fill-none" width="100" height="10" />
    ${width > 0 && html`<rect class=${"fill-" + kind} width=${Math.max(width, 2)} height="10" />`}</svg>`;
}

/** A line without axes: [{at, value}]. */
export function Sparkline({values, kind = "model", title}) {
  const top = Math.max(...values.map(v => v.value || 0), 0) || 1;
  return html`<svg class="spark" viewBox="0 0 200 30" preserveAspectRatio="none" role="img" aria-label=${title}>
    <title>${title}</title><path class=${"line-" + kind} d=${path(values, scale(values, 0, 200), v => 28 - (v / top) * 25)} /></svg>`;
}

function scale(values, left, right) {
  const first = values.length ? values[0].at : 0, last = values.length ? values.at(-1).at : 1;
  return at => left + ((at - first) / Math.max(last - first, 1)) * (right - left);
}

function path(values, x, y) {
  let drawn = "", pen = false;
  for (const {at, value} of values) {
    if (value === null) pen = false;
    else {
      drawn += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = true;
    }
  }
  return drawn;
}

/** A number at least as large that is easily read: 1, 2, 2.5 or 5 times a power of ten. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find(step => step * power >= value * 0.999) * power;
}

function Frame({top, text, seconds, title, children}) {
  const y = share => HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - 10);
  const minutes = Math.round(seconds / 60);
  const ticks = Array.from({length: minutes + 1}, (_, i) => i);
  const x = i => LEFT + (i / minutes) * (WIDTH - LEFT - 8);
  return html`<svg class="chart" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${title}><title>${title}</title>
    ${[0, 0.5, 1].map(share => html`<line key=${share} class="grid" x1=${LEFT} x2=${WIDTH - 8} y1=${y(share)} y2=${y(share)} />
      <text class="tick" x=${LEFT - 6} y=${y(share) + 3.5} text-anchor="end">${share ? text(top * share) : "0"}</text>`)}
    ${ticks.map(i => html`<text key=${"t" + i} class="tick" x=${x(i)} y=${HEIGHT - 4} text-anchor=${i === minutes ? "end" : i ? "middle" : "start"}>
      ${i === minutes ? "now" : `-${minutes - i}${i ? "" : " min"}`}</text>`)}
    ${children}</svg>`;
}

const across = (now, seconds) => at => LEFT + (1 - (now - at) / seconds) * (WIDTH - LEFT - 8);
const down = top => value => HEIGHT - BOTTOM - Math.min(value / top, 1) * (HEIGHT - BOTTOM - 10);

/** Lines over the last `seconds`: [{key, kind, values: [{at, value}]}]. */
export function Lines({lines, now, seconds, text, title}) {
  const top = ceiling(Math.max(0, ...lines.flatMap(line => line.values.map(v => v.value || 0))));
  return html`<${Frame} top=${top} text=${text} seconds=${seconds} title=${title}>
    ${lines.map(line => html`<path key=${line.key} class=${"line-" + line.kind} d=${path(line.values, across(now, seconds), down(top))} />`)}<//>`;
}

/** Areas on top of one another, of the same moments. */
export function Areas({areas, now, seconds, text, title}) {
  const at = areas.length ? areas[0].values.map(v => v.at) : [];
  let floor = at.map(() => 0);
  const stacked = areas.map(area => {
    const lower = floor;
    floor = lower.map((n, i) => n + (area.values[i].value || 0));
    return {...area, lower, upper: floor};
  });
  const top = ceiling(Math.max(0, ...floor)), x = across(now, seconds), y = down(top);
  const edge = values => values.map((n, i) => `${x(at[i]).toFixed(1)} ${y(n).toFixed(1)}`);
  return html`<${Frame} top=${top} text=${text} seconds=${seconds} title=${title}>
    ${at.length > 1 && stacked.map(area => html`<path key=${area.key} class=${"fill-" + area.kind}
      d=${"M" + edge(area.upper).join("L") + "L" + edge(area.lower).reverse().join("L") + "Z"} />`)}<//>`;
}
