/** Sizes that several parts of the drawing share; pixels. */

export const AXIS = 24; // the height of the times along the top
export const TICK = 96; // between two of them
export const FONT = "Roboto, 'Helvetica Neue', Arial, sans-serif";
