/** The safetensors format, both ways: a header's length, the header as JSON, the data end to end. */

import { type DType, KINDS } from "./dtypes.js";
import { Tensor, count } from "./tensor.js";

export const MEDIA_TYPE = "application/vnd.safetensors";

const METADATA = "__metadata__";
const DTYPES = new Map(
  (Object.keys(KINDS) as DType[]).map((dtype) => [KINDS[dtype].safetensors, dtype]),
);

interface Entry {
  dtype: string;
  shape: number[];
  data_offsets: [number, number];
}

/** The bytes of a file with these tensors and texts. */
export function encode(
  tensors: Readonly<Record<string, Tensor>>,
  metadata: Readonly<Record<string, string>> = {},
): Uint8Array<ArrayBuffer> {
  // Wider elements first, so that all are aligned.
  const order = Object.keys(tensors).sort(
    (a, b) => tensors[b]!.data.BYTES_PER_ELEMENT - tensors[a]!.data.BYTES_PER_ELEMENT,
  );
  const header: Record<string, unknown> = {};
  if (Object.keys(metadata).length > 0) header[METADATA] = metadata;
  let end = 0;
  for (const name of order) {
    const { dtype, shape, data } = tensors[name]!;
    const begin = end;
    end += data.byteLength;
    header[name] = { dtype: KINDS[dtype].safetensors, shape, data_offsets: [begin, end] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const headerBytes = Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(8 + headerBytes + end);
  new DataView(file.buffer).setBigUint64(0, BigInt(headerBytes), true);
  file.fill(0x20, 8, 8 + headerBytes);
  file.set(text, 8);
  let at = 8 + headerBytes;
  for (const name of order) {
    const { data } = tensors[name]!;
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return file;
}

/** The tensors and texts of a file; the tensors' data lies in `file`, unless it is not aligned.
 *
 * @throws RangeError or SyntaxError where it is no safetensors file. */
export function decode(file: ArrayBuffer): {
  tensors: Record<string, Tensor>;
  metadata: Record<string, string>;
} {
  if (file.byteLength < 8) throw new RangeError("a safetensors file has 8 bytes or more");
  const headerBytes = Number(new DataView(file).getBigUint64(0, true));
  const data = 8 + headerBytes;
  if (data > file.byteLength) throw new RangeError("the safetensors file ends inside its header");
  const text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(file, 8, headerBytes));
  const { [METADATA]: metadata, ...entries } = JSON.parse(text) as Record<string, unknown>;
  const tensors: Record<string, Tensor> = {};
  for (const [name, entry] of Object.entries(entries)) {
    tensors[name] = tensorAt(file, data, name, entry as Entry);
  }
  return { tensors, metadata: (metadata ?? {}) as Record<string, string> };
}

function tensorAt(file: ArrayBuffer, data: number, name: string, entry: Entry): Tensor {
  const dtype = DTYPES.get(entry.dtype);
  if (dtype === undefined) throw new RangeError(`${name}: unknown dtype ${entry.dtype}`);
  const { array } = KINDS[dtype];
  const [begin, end] = entry.data_offsets;
  const elements = count(entry.shape);
  if (end - begin !== elements * array.BYTES_PER_ELEMENT || begin < 0 || data + end > file.byteLength) {
    throw new RangeError(`${name}: its offsets are not those of ${entry.dtype}[${entry.shape.join(", ")}]`);
  }
  const at = data + begin;
  const held =
    at % array.BYTES_PER_ELEMENT === 0
      ? new array(file, at, elements)
      : new array(file.slice(at, data + end), 0, elements);
  return new Tensor(dtype, entry.shape, held);
}
