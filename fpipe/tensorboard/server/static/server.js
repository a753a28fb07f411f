/** The server: where its files and routes are, and how they are asked. `standalone.js` takes its place in a single file. */

/** @param {string} name of a file or route */
export const place = (name) => new URL(`./${name}`, import.meta.url);

/** Whether files of a step are made on demand. */
export const makesFiles = true;

/** @returns {Promise<Response>} */
export const ask = (url, options) => fetch(url, options);
