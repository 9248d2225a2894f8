/** The server's state: devices, queue, memory, stored tensors, requests. */

import { useEffect, useState } from "preact/hooks";

import { getJson, getText } from "./api";
import * as format from "./format";
import { Facts, Problem, Scroll } from "./parts";

interface Sample {
  name: string;
  labels: Record<string, string>;
  value: number;
}

interface Stored {
  name: string;
  shape: number[];
  dtype: string;
  size_bytes?: number;
}

interface Answered {
  operation?: string;
  transport?: string;
  code?: string;
  count: number;
  mean: number;
}

interface State {
  samples: Sample[];
  tensors: Stored[];
}

const EVERY_MS = 2000;

/** The samples of Prometheus' text format. */
function samplesOf(text: string): Sample[] {
  const samples: Sample[] = [];
  for (const line of text.split("\n")) {
    const parts = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!parts) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (parts[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name!] = value!;
    }
    samples.push({ name: parts[1]!, labels, value: Number(parts[3]) });
  }
  return samples;
}

export function ServerView(props: { refused: (error: unknown) => void }) {
  const [state, setState] = useState<State | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  useEffect(() => {
    let timer = 0;
    const leaving = new AbortController();
    const ask = async () => {
      try {
        const [text, stored] = await Promise.all([
          getText("metrics"),
          getJson<{ tensors: Stored[] }>("tensors", leaving.signal),
        ]);
        setState({ samples: samplesOf(text), tensors: stored.tensors });
        setProblem(null);
      } catch (error) {
        if (leaving.signal.aborted) return;
        props.refused(error);
        setProblem(error);
      }
      if (!leaving.signal.aborted) timer = window.setTimeout(ask, EVERY_MS);
    };
    void ask();
    return () => {
      leaving.abort();
      clearTimeout(timer);
    };
  }, []);
  return (
    <section class="panel" aria-labelledby="server-title">
      <h2 id="server-title">Server</h2>
      {problem ? <Problem error={problem} /> : null}
      {state && <Shown state={state} />}
    </section>
  );
}

function Shown(props: { state: State }) {
  const { samples, tensors } = props.state;
  const sum = (name: string) =>
    samples.filter((one) => one.name === name).reduce((total, one) => total + one.value, 0);
  const labelled = (name: string) => samples.filter((one) => one.name === name);
  const requests: Answered[] = labelled("convgrad_request_seconds_count")
    .filter((one) => one.value > 0)
    .map((one) => {
      const same = (other: Sample) => JSON.stringify(other.labels) === JSON.stringify(one.labels);
      const seconds = labelled("convgrad_request_seconds_sum").find(same)?.value ?? 0;
      return { ...one.labels, count: one.value, mean: seconds / one.value };
    });
  return (
    <>
      <Facts
        facts={[
          ["workers", `${sum("convgrad_workers")}, ${sum("convgrad_workers_lost_total")} lost since the start`],
          ["running", String(sum("convgrad_running"))],
          ["queue", `${sum("convgrad_queue_depth")} waiting`],
          ["memory of requests", format.bytes(sum("convgrad_inflight_bytes"))],
          ["connections", String(sum("convgrad_connections"))],
          ["resident memory", format.bytes(sum("process_resident_memory_bytes"))],
        ]}
      />
      <Scroll label="Devices, requests and stored tensors">
        <table>
          <caption>Devices</caption>
          <thead>
            <tr>
              <th scope="col">device</th>
              <th scope="col">memory in use</th>
              <th scope="col">UUID</th>
            </tr>
          </thead>
          <tbody>
            {labelled("convgrad_device_info").map(({ labels }) => {
              const memory = (name: string) =>
                labelled(name).find((one) => one.labels.device === labels.device)?.value ?? 0;
              const total = memory("convgrad_device_memory_total_bytes");
              return (
                <tr>
                  <th scope="row">
                    {labelled("convgrad_info")[0]?.labels.backend} {labels.device}
                  </th>
                  <td>
                    {total
                      ? `${format.bytes(memory("convgrad_device_memory_used_bytes"))} of ${format.bytes(total)}`
                      : "host memory"}
                  </td>
                  <td>{labels.uuid || "–"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
        <table>
          <caption>Requests</caption>
          <thead>
            <tr>
              <th scope="col">operation</th>
              <th scope="col">requests</th>
              <th scope="col">mean</th>
              <th scope="col">outcome</th>
              <th scope="col">transport</th>
            </tr>
          </thead>
          <tbody>
            {requests.map((one) => (
              <tr>
                <th scope="row">{one.operation}</th>
                <td>{format.count(one.count)}</td>
                <td>{format.seconds(one.mean)}</td>
                <td>{one.code}</td>
                <td>{one.transport}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <table>
          <caption>Stored tensors: {tensors.length || "none"}</caption>
          <tbody>
            {tensors.map((one) => (
              <tr>
                <th scope="row">{one.name}</th>
                <td>
                  {format.shape(one.shape)} {one.dtype}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </>
  );
}
