/** Whole networks, as measured: convgrad, cuDNN and the roofline. */

import { useEffect, useState } from "preact/hooks";

import { GroupedBars } from "./charts";
import { Problem, Scroll } from "./parts";

interface Networks {
  device: string;
  peer: string;
  dtype: string;
  layout: string;
  commits: string[];
  sums: { network: string; batch: number; ours_ms: number; peer_ms: number; reference_ms: number }[];
}

const milliseconds = (value: number): string => `${Number(value.toPrecision(3))} ms`;

export function NetworksView() {
  const [networks, setNetworks] = useState<Networks | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const [batch, setBatch] = useState<number | null>(null);
  useEffect(() => {
    fetch(new URL("networks.json", document.baseURI))
      .then((answer) => answer.json())
      .then(setNetworks)
      .catch(setProblem);
  }, []);
  if (problem) return <Problem error={problem} />;
  if (!networks) return <p role="status">Loading</p>;
  const batches = [...new Set(networks.sums.map((sum) => sum.batch))];
  const shown = batch ?? batches.at(-1) ?? 1;
  const rows = networks.sums.filter((sum) => sum.batch === shown);
  return (
    <section class="panel" aria-labelledby="networks-title">
      <h2 id="networks-title">Networks</h2>
      <p>
        Time of both gradients of every convolution of a network, measured on an {networks.device} ({networks.dtype},{" "}
        {networks.layout}), compared with {networks.peer}. The last bar is the roofline: the limit of the device's
        memory bandwidth and arithmetic.
      </p>
      <fieldset class="choice">
        <legend>Batch</legend>
        {batches.map((one) => (
          <label>
            <input type="radio" name="batch" checked={one === shown} onChange={() => setBatch(one)} /> {one}
          </label>
        ))}
      </fieldset>
      <GroupedBars
        label={`Times of ${rows.length} networks at batch ${shown} relative to cuDNN's; the table below has the numbers.`}
        names={rows.map((row) => row.network)}
        unit={(share) => `${Math.round(100 * share)} %`}
        series={[
          { label: "convgrad, relative to cuDNN", values: rows.map((row) => row.ours_ms / row.peer_ms) },
          { label: "cuDNN", values: rows.map(() => 1) },
          { label: "roofline", values: rows.map((row) => row.reference_ms / row.peer_ms) },
        ]}
      />
      <Scroll label="Times of the networks">
        <table>
          <caption>Batch {shown}</caption>
          <thead>
            <tr>
              <th scope="col">network</th>
              <th scope="col">convgrad</th>
              <th scope="col">cuDNN</th>
              <th scope="col">speedup</th>
              <th scope="col">roofline</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr>
                <th scope="row">{row.network}</th>
                <td>{milliseconds(row.ours_ms)}</td>
                <td>{milliseconds(row.peer_ms)}</td>
                <td>{(row.peer_ms / row.ours_ms).toFixed(2)}x</td>
                <td>{milliseconds(row.reference_ms)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <p class="quiet">
        Measured at {networks.commits.join(", ")}. A network is left out if one of its layers was not measured at
        this batch.
      </p>
    </section>
  );
}
