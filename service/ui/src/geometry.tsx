/** A layer's sizes as fields, and the output size that they give. */

import type { ComponentChildren } from "preact";

import type { Layer } from "./api";
import { Facts } from "./parts";

const NAMES = { 1: ["W"], 2: ["H", "W"], 3: ["D", "H", "W"] } as const;

const tuple = (values: number[]): string => `(${values.join(", ")}${values.length === 1 ? "," : ""})`;

const python = (value: boolean): string => (value ? "True" : "False");

/** The layer as a PyTorch module; a separable one, which has none, as a benchdnn problem. */
export function words(layer: Layer): string {
  const ndim = layer.input_size.length;
  const shape = [layer.batch, layer.in_channels, ...layer.input_size].join("x");
  const padding = layer.padding.map(([before]) => before);
  const each = (prefix: string, values: number[]) =>
    values.map((value, axis) => `${prefix}${NAMES[ndim as 1 | 2 | 3][axis]!.toLowerCase()}${value}`).join("");
  if (layer.kind === "separable") {
    return (
      `--separable mb${layer.batch}ic${layer.in_channels}${each("i", layer.input_size)}oc${layer.out_channels}` +
      each("k", layer.kernel_size) + each("s", layer.stride) + each("d", layer.dilation.map((d) => d - 1)) +
      each("p", padding)
    );
  }
  if (layer.kind === "adaptive_pool") {
    const name = layer.operation?.includes("max") ? "Max" : "Avg";
    return `Adaptive${name}Pool${ndim}d(output_size=${tuple(layer.output_size)}) on ${shape}`;
  }
  const window = `kernel_size=${tuple(layer.kernel_size)}, stride=${tuple(layer.stride)}, padding=${tuple(padding)}`;
  const dilation = `dilation=${tuple(layer.dilation)}`;
  if (layer.kind === "pool") {
    return `MaxPool${ndim}d(${window}, ${dilation}, ceil_mode=${python(layer.ceil_mode)}) on ${shape}`;
  }
  if (layer.kind === "avg_pool") {
    const counts = `count_include_pad=${python(layer.count_include_pad)}`;
    return `AvgPool${ndim}d(${window}, ceil_mode=${python(layer.ceil_mode)}, ${counts}) on ${shape}`;
  }
  const common = `${layer.in_channels}, ${layer.out_channels}, ${window}, ${dilation}, groups=${layer.groups}`;
  const bias = `bias=${python(layer.bias)}`;
  if (layer.kind === "conv") return `Conv${ndim}d(${common}, ${bias}) on ${shape}`;
  return `ConvTranspose${ndim}d(${common}, ${bias}, output_padding=${tuple(layer.output_padding)}) on ${shape}`;
}

/** How the output size follows from the others along one dimension. */
function formula(layer: Layer, axis: number): string {
  const [size = 0, kernel = 1, stride = 1, dilation = 1, more = 0] = [
    layer.input_size[axis],
    layer.kernel_size[axis],
    layer.stride[axis],
    layer.dilation[axis],
    layer.output_padding[axis],
  ];
  const [before, after] = layer.padding[axis] ?? [0, 0];
  const reach = `${dilation}·(${kernel} − 1)`;
  if (layer.kind === "adaptive_pool") return "";
  if (layer.kind === "deconv") {
    return `(${size} − 1)·${stride} − ${before} − ${after} + ${reach} + ${more} + 1 =`;
  }
  const quotient = `(${size} + ${before} + ${after} − ${reach} − 1) / ${stride}`;
  const last = size + before + after - dilation * (kernel - 1) - 1;
  // As in PyTorch, a window must begin inside the input or the padding before it.
  const outside = layer.ceil_mode && (Math.ceil(last / stride)) * stride >= size + before;
  return layer.ceil_mode && !outside ? `⌈${quotient}⌉ + 1 =` : `⌊${quotient}⌋ + 1 =`;
}

type Sizes = "input_size" | "output_size" | "kernel_size" | "stride" | "dilation" | "output_padding";

export function Geometry(props: { layer: Layer; known: boolean; change: (layer: Layer) => void }) {
  const { layer, known, change } = props;
  const adaptive = layer.kind === "adaptive_pool";
  const weighted = ["conv", "deconv", "separable"].includes(layer.kind);
  const uneven = layer.padding.some(([before, after]) => before !== after) && layer.kind !== "separable";
  const number = (name: string, value: number, set: (value: number) => Layer) => (
    <input
      type="number"
      min={0}
      aria-label={name}
      value={value}
      onInput={(event) => change(set(Number(event.currentTarget.value)))}
    />
  );
  const sized = (field: Sizes, title: string, axis: number, name: string) =>
    number(`${title} ${name}`, layer[field][axis] ?? 0, (value) => ({
      ...layer,
      [field]: layer[field].map((old, at) => (at === axis ? value : old)),
    }));
  const channels = (value: number): Layer =>
    weighted ? { ...layer, in_channels: value } : { ...layer, in_channels: value, out_channels: value };
  const columns: [string, (axis: number, name: string) => ComponentChildren][] = [
    ["input", (axis, name) => sized("input_size", "input", axis, name)],
  ];
  if (adaptive) columns.push(["output", (axis, name) => sized("output_size", "output", axis, name)]);
  else {
    columns.push(
      ["kernel", (axis, name) => sized("kernel_size", "kernel", axis, name)],
      ["stride", (axis, name) => sized("stride", "stride", axis, name)],
      [
        "padding",
        (axis, name) =>
          number(`padding ${name}`, layer.padding[axis]?.[0] ?? 0, (value) => ({
            ...layer,
            padding: layer.padding.map((old, at) => (at === axis ? [value, value] : old)),
          })),
      ],
    );
    if (layer.kind !== "avg_pool") columns.push(["dilation", (axis, name) => sized("dilation", "dilation", axis, name)]);
    if (layer.kind === "deconv") {
      columns.push(["output padding", (axis, name) => sized("output_padding", "output padding", axis, name)]);
    }
  }
  const names = layer.input_size.map((_, axis) => NAMES[layer.input_size.length as 1 | 2 | 3][axis]!);
  const outputs = names.map((name, axis): [string, ComponentChildren] => [
    `output ${name}`,
    <>
      {formula(layer, axis)} <strong>{known ? layer.output_size[axis] : "?"}</strong>
    </>,
  ]);
  if (uneven) {
    return (
      <>
        <p class="quiet">The padding differs before and after the input, so edit the sizes in the text.</p>
        <Facts facts={outputs} />
      </>
    );
  }
  return (
    <>
      <div class="scroll geometry">
        <p class="counts">
          <label>
            {weighted ? "input channels" : "channels"} {number("channels", layer.in_channels, channels)}
          </label>
          {weighted && (
            <label>
              output channels{" "}
              {number("output channels", layer.out_channels, (value) => ({ ...layer, out_channels: value }))}
            </label>
          )}
          {["conv", "deconv"].includes(layer.kind) && (
            <label>groups {number("groups", layer.groups, (value) => ({ ...layer, groups: value }))}</label>
          )}
        </p>
        <table>
          <caption>Sizes</caption>
          <thead>
            <tr>
              <td />
              {columns.map(([title]) => (
                <th scope="col">{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {names.map((name, axis) => (
              <tr>
                <th scope="row">{name}</th>
                {columns.map(([, cell]) => (
                  <td>{cell(axis, name)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Facts facts={outputs} />
    </>
  );
}
