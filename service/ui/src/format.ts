/** Numbers as people read them. */

function scaled(value: number, units: [number, string][]): string {
  if (!Number.isFinite(value)) return String(value);
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1)!;
  return `${Number((value / size).toPrecision(3))} ${unit}`;
}

export const seconds = (value: number): string =>
  scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);

export const flops = (value: number): string =>
  scaled(value, [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]]);

export const flopRate = (value: number): string => `${flops(value)}/s`;

export const bytes = (value: number): string =>
  scaled(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);

export const rate = (value: number): string =>
  scaled(value, [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1, "B/s"]]);

export const count = (value: number): string => value.toLocaleString("en");

export const shape = (sizes: number[]): string => sizes.join(" × ");

export const plain = (value: number | string): string =>
  typeof value === "number" ? String(Number(value.toPrecision(6))) : value;
