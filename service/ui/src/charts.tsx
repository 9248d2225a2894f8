/** uPlot as components. A chart's numbers are also in a table or a sentence beside it. */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import * as format from "./format";
import { useScheme } from "./theme";

interface Colours {
  text: string;
  grid: string;
  series: string[];
}

function colours(): Colours {
  const style = getComputedStyle(document.documentElement);
  const of = (name: string) => style.getPropertyValue(name).trim();
  return {
    text: of("--text"),
    grid: of("--line"),
    series: [of("--series-1"), of("--series-2"), of("--series-3")],
  };
}

type Draw = (colours: Colours) => { options: Omit<uPlot.Options, "width" | "height">; data: uPlot.AlignedData };

/** Draws again when its data, the width or the colour scheme changes. */
function Chart(props: { label: string; height: number; draw: Draw; of: unknown }) {
  const place = useRef<HTMLDivElement>(null);
  const scheme = useScheme();
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const { options, data } = props.draw(colours());
    const size = () => ({ width: element.clientWidth, height: props.height });
    const plot = new uPlot({ ...options, ...size(), legend: { live: false, ...options.legend } }, data, element);
    const watch = new ResizeObserver(() => plot.setSize(size()));
    watch.observe(element);
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [props.of, scheme]);
  return <div class="chart" role="img" aria-label={props.label} ref={place} />;
}

function axis(colours: Colours, label: string, values: uPlot.Axis.Values, size = 62): uPlot.Axis {
  const line = { stroke: colours.grid, width: 1 };
  return { stroke: colours.text, grid: line, ticks: line, label, labelSize: 18, values, size, font: "12px system-ui" };
}

const texts =
  (of: (value: number) => string): uPlot.Axis.Values =>
  (_, splits) =>
    splits.map((value) => (value === null ? "" : of(value)));

/** FLOP/s over FLOP per byte: the device's limit, and what was measured. */
export function RooflineChart(props: {
  flopsPerS: number;
  bytesPerS: number;
  intensity: number;
  measured: number | null;
}) {
  const ridge = props.flopsPerS / props.bytesPerS;
  const low = 10 ** Math.floor(Math.log10(Math.min(ridge, props.intensity) / 4));
  const high = 10 ** Math.ceil(Math.log10(Math.max(ridge, props.intensity) * 4));
  const xs = [...new Set([low, ridge, props.intensity, high])].sort((a, b) => a - b);
  const roof = xs.map((x) => Math.min(props.flopsPerS, x * props.bytesPerS));
  const here = xs.map((x) => (x === props.intensity ? props.measured : null));
  const bound = Math.min(props.flopsPerS, props.intensity * props.bytesPerS);
  const label =
    `Roofline. At ${props.intensity.toPrecision(3)} FLOP per byte the limit is ${format.flopRate(bound)}` +
    (props.measured === null ? "." : `; measured: ${format.flopRate(props.measured)}.`);
  return (
    <Chart
      label={label}
      height={260}
      of={JSON.stringify(props)}
      draw={(c) => ({
        options: {
          scales: { x: { time: false, distr: 3 }, y: { distr: 3 } },
          axes: [
            axis(c, "FLOP per byte", texts((v) => (Number.isInteger(Math.log10(v)) ? String(v) : "")), 46),
            axis(c, "", texts((v) => (Number.isInteger(Math.log10(v)) ? format.flopRate(v) : "")), 84),
          ],
          series: [
            { label: "FLOP per byte" },
            { label: "roofline", stroke: c.series[1]!, width: 2, points: { show: false } },
            {
              label: "this layer, warm",
              stroke: c.series[0]!,
              points: { show: true, size: 12, fill: c.series[0]! },
              paths: () => null,
            },
          ],
        },
        data: [xs, roof, here],
      })}
    />
  );
}

/** A histogram of samples. */
export function DistributionChart(props: { samples: number[]; median: number }) {
  const sorted = [...props.samples].sort((a, b) => a - b);
  const low = sorted[0] ?? 0;
  // The slowest twentieth would squeeze the rest; it is counted in the last bar.
  const high = Math.max(sorted[Math.floor(sorted.length * 0.95)] ?? low, low * 1.001);
  const bars = Math.max(4, Math.min(40, Math.ceil(Math.sqrt(sorted.length) * 1.5)));
  const width = (high - low) / bars;
  const counts = new Array<number>(bars + 1).fill(0);
  for (const sample of sorted) {
    const bar = Math.min(bars, Math.floor((sample - low) / width));
    counts[bar] = (counts[bar] ?? 0) + 1;
  }
  const xs = counts.map((_, bar) => low + (bar + 0.5) * width);
  return (
    <Chart
      label={`Distribution of ${sorted.length} samples, median ${format.seconds(props.median)}, the last bar contains all slower ones.`}
      height={220}
      of={props.samples}
      draw={(c) => ({
        options: {
          scales: { x: { time: false, range: [low, low + counts.length * width] }, y: { range: (_u, _min, max) => [0, max * 1.05] } },
          axes: [
            axis(c, "time of a call", texts(format.seconds), 46),
            { ...axis(c, "samples", texts(String), 50), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] },
          ],
          series: [
            { label: "time" },
            { label: "samples; the last bar contains all slower ones", fill: c.series[0]!, stroke: c.series[0]!, points: { show: false }, paths: uPlot.paths.bars!({ size: [0.9, 100] }) },
          ],
        },
        data: [xs, counts],
      })}
    />
  );
}

/** Grouped bars: one group for each name, one colour for each series. */
export function GroupedBars(props: { names: string[]; series: { label: string; values: (number | null)[] }[]; unit: (value: number) => string; label: string }) {
  const { names, series } = props;
  // Bars lie beside each other: each series has the positions of its own.
  const slots = series.length + 1;
  const xs = Array.from({ length: names.length * slots }, (_, index) => index);
  const data = series.map((one, number) =>
    xs.map((x) => (x % slots === number ? (one.values[Math.floor(x / slots)] ?? null) : null)),
  );
  const longest = Math.max(...names.map((name) => name.length));
  // Names stand level where all have room, or else aslant; on a phone, many of them hang down.
  const slant = (plot: uPlot) => {
    const each = (plot.width - 90) / names.length;
    return each > longest * 8 ? 0 : each > 30 ? -35 : -90;
  };
  return (
    <Chart
      label={props.label}
      height={320}
      of={JSON.stringify(props)}
      draw={(c) => ({
        options: {
          padding: [8, (plot) => (slant(plot) === -35 ? 60 : 0), 0, 0], // the last name reaches beyond its bars
          scales: { x: { time: false, range: [-0.8, xs.length - 1 + 0.3] }, y: { range: (_u, _min, max) => [0, max * 1.05] } },
          axes: [
            {
              ...axis(c, "", (_, splits) => splits.map((x) => names[Math.floor(x / slots)] ?? "")),
              size: (plot) => ({ 0: 34, [-35]: 90, [-90]: 150 })[slant(plot)] ?? 90,
              splits: () => names.map((_, name) => name * slots + (series.length - 1) / 2),
              rotate: slant,
              grid: { show: false },
            },
            axis(c, "", texts(props.unit), 72),
          ],
          series: [
            { label: "network" },
            ...series.map((one, number) => ({
              label: one.label,
              fill: c.series[number]!,
              stroke: c.series[number]!,
              points: { show: false },
              paths: uPlot.paths.bars!({ size: [0.95, 60] }),
            })),
          ],
        },
        data: [xs, ...data] as uPlot.AlignedData,
      })}
    />
  );
}
