/** The last effects of each rank of the job that recorded the shown run, and why it hangs or has ended. */

import { flightContent } from "./flights.js";

export const flight = {
  id: "flight",
  title: "Last effects",
  reads: ["flight"],
  absent: (state) => !state.flight,
  content: (state) => (state.flight ? flightContent(state.flight) : []),
};
