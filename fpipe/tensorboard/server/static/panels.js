/**
 * The panels below the timeline, in the order of their tabs. To add one, write its module and list it here.
 *
 * @typedef {object} State the parts of the page that panels show; another object in place of a part is a change of it
 * @property {import("./model.js").Capture} capture
 * @property {number} ranks how many of its ranks have arrived
 * @property {object | null | undefined} summary of the capture; undefined until it arrives, null if it can't be had
 * @property {import("./model.js").Capture | null} other the capture beside it
 * @property {number} later by how much its times are later, from the first compute of each
 * @property {object | null | undefined} whatIf what would help; undefined until it arrives, null if it can't be had
 * @property {() => void} ask for what would help a large capture
 * @property {(what: string) => void} imagine shows the capture in which something is ideal, beside
 * @property {{run: string, rows: object[], all: number, most: number, reason: string | null} | null} steps the figures of
 *   a run's captured steps, as far as they have arrived
 * @property {(run: string) => void} askSteps fetches those that are missing
 * @property {(step: number) => void} go shows another step of the run
 * @property {boolean} dark whether the page is dark
 * @property {object | null} answer the comparison of the two; null until it arrives
 * @property {string[]} names of the two
 * @property {{from: number, to: number} | null} range that is measured
 * @property {import("./search.js").Matches | null} matches of the search
 * @property {{from: number, to: number, ranks: number[]} | null} sight the time and the ranks in view, once they rest
 * @property {object | null} flight what the ranks of the run's newest job did last; null if there is no record of it
 * @property {(spot: {rank: number, row: number}) => void} select selects an effect, and moves it into view
 *
 * @typedef {object} Panel
 * @property {string} id of its elements, `tab-ID` and `panel-ID`
 * @property {string} title of its tab
 * @property {(keyof State)[]} reads the parts of the state that it shows: a change of one fills it again
 * @property {(state: State) => Node[]} content
 * @property {(state: State) => boolean} [absent] whether it has no tab at present
 * @property {keyof State} [opens] a part of the state that opens the panel when it comes
 */

import { bubbles } from "./panel_bubbles.js";
import { critical } from "./panel_critical.js";
import { difference } from "./panel_difference.js";
import { effects } from "./panel_effects.js";
import { flight } from "./panel_flight.js";
import { microbatches } from "./panel_microbatches.js";
import { range } from "./panel_range.js";
import { replicas } from "./panel_replicas.js";
import { steps } from "./panel_steps.js";
import { whatIf } from "./panel_what_if.js";

/** @type {Panel[]} */
export const PANELS = [bubbles, whatIf, replicas, critical, difference, steps, microbatches, range, effects, flight];
