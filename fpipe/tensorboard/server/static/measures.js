/** Sizes shared by several parts of the drawing; pixels. */

export const AXIS = 24; // height of the time axis
export const TICK = 96; // distance of its marks
export const FONT = "Roboto, 'Helvetica Neue', Arial, sans-serif";
