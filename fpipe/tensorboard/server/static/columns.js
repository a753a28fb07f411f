/** One rank's spans, as the recorder wrote them: typed views of the received bytes, without a copy. */

const VIEWS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };
const MAGIC = "FPT1";

/**
 * @param {ArrayBuffer} buffer
 * @returns {{header: any, columns: Record<string, ArrayLike<number>>}}
 */
export function parse(buffer) {
  const bytes = new Uint8Array(buffer);
  if (bytes.length < 8 || String.fromCharCode(...bytes.subarray(0, 4)) !== MAGIC) {
    throw new Error("these bytes are no timeline of fpipe's");
  }
  const begin = 8 + new DataView(buffer).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, begin)));
  if (header.format !== 4) throw new Error("the server has been updated: load this page again");
  const columns = {};
  for (const [name, [type, offset, length]] of Object.entries(header.columns)) {
    columns[name] = new VIEWS[type](buffer, begin + offset, length);
  }
  return { header, columns };
}
