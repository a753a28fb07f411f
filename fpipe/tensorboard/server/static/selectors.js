/** The lists of runs and steps: of what is shown, and of what stands beside it. */

import { options } from "./panes.js";

/**
 * @param {Record<string, HTMLElement>} shell
 * @param {import("./library.js").Library} library
 * @param {object} choice
 * @param {object} entry that is shown; it may no longer be listed
 * @param {object | null} other that stands beside it
 */
export function selectors(shell, library, choice, entry, other) {
  const runs = [...new Set([...library.runs, entry.run])].map((run) => [run, run]);
  const listed = library.steps(entry.run);
  const steps = listed.some(({ step }) => step === entry.step) ? listed : [...listed, entry];
  options(shell.run, runs, entry.run);
  options(shell.step, numbers(steps), String(entry.step));
  shell["step-prev"].disabled = steps[0].step === entry.step;
  shell["step-next"].disabled = steps.at(-1).step === entry.step;
  shell.follow.checked = choice.follow;
  besideRuns(shell, library, entry, other);
  besideSteps(shell["other-step"], library, choice, entry, other);
}

const numbers = (entries) => entries.map(({ step }) => [String(step), String(step)]);

/** The runs that can stand beside; the shown one too, if it has other steps. */
function besideRuns(shell, library, entry, other) {
  const key = (run) => JSON.stringify({ run, step: null });
  const runs = library.runs.filter((run) => run !== entry.run || library.steps(run).length > 1);
  const { run, step, what } = other ?? {};
  const imagined = what ? [[JSON.stringify({ run, step, what }), `this step, if ${what} were ideal`]] : [];
  const pairs = [["null", "nothing"], ...imagined, ...runs.map((one) => [key(one), one])];
  options(shell.other, pairs, imagined[0]?.[0] ?? (other ? key(run) : "null"));
}

/** The steps of the run beside, and the one that is nearest to the shown one, whichever that is. */
function besideSteps(list, library, choice, entry, other) {
  list.hidden = !other || Boolean(other.what);
  if (list.hidden) return;
  const steps = library.steps(other.run).filter(({ step }) => other.run !== entry.run || step !== entry.step);
  const nearest = choice.other === "auto" || choice.other?.step === null;
  options(list, [["null", `nearest: ${other.step}`], ...numbers(steps)], nearest ? "null" : String(other.step));
}
