// Markup in scripts: htm's templates make Preact's elements, and nothing is ever parsed as HTML.

import {h, render} from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export {render};
