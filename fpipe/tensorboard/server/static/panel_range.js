/** Each rank's busy and idle time within a measured range. */

import { table } from "./dom.js";
import { percent, time } from "./format.js";

export const range = {
  id: "range",
  title: "Range",
  reads: ["capture", "range"],
  opens: "range",
  content({ capture, range: bounds }) {
    if (!bounds) return [table("Shift+drag on the timeline measures a range")];
    const { from, to } = bounds;
    const span = to - from;
    const ranks = [...capture.ranks.values()].sort((a, b) => a.number - b.number);
    const rows = ranks.map((rank) => {
      const levels = rank.tracks.compute.levels("kind");
      const sum = levels.reduce((total, lane) => total + lane.busy(from, to), 0);
      const busy = Math.min(span, sum);
      const shares = [busy, span - busy].flatMap((part) => [time(part, capture.unit), percent(part / span)]);
      return [`rank ${rank.number}`, ...shares];
    });
    const ends = [from, to].map((when) => time(when, capture.unit, 6));
    const caption = `${ends.join(" to ")}: ${time(span, capture.unit)}`;
    return [table(caption, ["", "busy", "share", "idle", "share"], rows)];
  },
};
