/** Time the layer: queue, distribution, roofline, PyTorch's time. */

import { useEffect, useRef, useState } from "preact/hooks";

import { time, type TimeAnswer, type Timing } from "./api";
import { DistributionChart, RooflineChart } from "./charts";
import * as format from "./format";
import type { Question } from "./layer";
import { Again, Problem, Scroll } from "./parts";

const KINDS = { warm: "warm cache", cold: "cold cache", back_to_back: "back to back" } as const;

export function TimePanel(props: { question: Question; refused: (error: unknown) => void }) {
  const [state, setState] = useState("");
  const [answer, setAnswer] = useState<TimeAnswer | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const [candidates, setCandidates] = useState(false);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);

  const start = async () => {
    const mine = new AbortController();
    running.current = mine;
    setProblem(null);
    setState("sending");
    try {
      const { operation, fields } = props.question;
      setAnswer(await time(operation, { ...fields, candidates }, mine.signal, setState));
    } catch (error) {
      if (!mine.signal.aborted) {
        props.refused(error);
        setProblem(error);
      }
    } finally {
      setState("");
      running.current = null;
    }
  };

  return (
    <section class="panel" aria-labelledby="time-title">
      <h2 id="time-title">Time</h2>
      <div class="actions">
        <button type="button" class="main" disabled={state !== ""} onClick={start}>
          Time it
        </button>
        {state && (
          <button type="button" onClick={() => running.current?.abort()}>
            Cancel
          </button>
        )}
        <label class="check">
          <input
            type="checkbox"
            checked={candidates}
            disabled={state !== ""}
            onChange={(event) => setCandidates(event.currentTarget.checked)}
          />
          also time the kernels that the plan passed over
        </label>
        <span role="status">{state}</span>
      </div>
      {problem ? <Problem error={problem} /> : null}
      {answer && <Times answer={answer} />}
    </section>
  );
}

function Times(props: { answer: TimeAnswer }) {
  const { answer } = props;
  const { timings, reference } = answer;
  const shown = timings.warm ?? timings.back_to_back ?? timings.cold;
  const rows: [string, Timing | null, string | null][] = [];
  for (const [kind, title] of Object.entries(KINDS)) {
    rows.push([`convgrad, ${title}`, timings[kind as keyof typeof KINDS], null]);
  }
  for (const peer of answer.peers) {
    if (peer.reason !== null) rows.push([peer.name, null, peer.reason]);
    else {
      for (const [kind, title] of Object.entries(KINDS)) {
        const timing = peer.timings?.[kind];
        if (timing) rows.push([`${peer.name}, ${title}`, timing, null]);
      }
    }
  }
  return (
    <>
      <Scroll label="Times">
        <table>
          <caption>
            Roofline: {format.seconds(reference.seconds)} ({reference.source})
          </caption>
          <thead>
            <tr>
              <th scope="col">library and cache</th>
              <th scope="col">median</th>
              <th scope="col">5 % to 95 %</th>
              <th scope="col">samples</th>
              <th scope="col">FLOP/s</th>
              <th scope="col">bytes/s</th>
            </tr>
          </thead>
          <tbody>
            {rows.map(([who, timing, reason]) => (
              <tr>
                <th scope="row">{who}</th>
                {timing ? (
                  <>
                    <td>
                      <strong>{format.seconds(timing.median_s)}</strong>
                      {!timing.converged && <span class="quiet"> not converged</span>}
                    </td>
                    <td>
                      {format.seconds(timing.p05_s)} to {format.seconds(timing.p95_s)}
                    </td>
                    <td>{timing.samples}</td>
                    <td>{format.flopRate(timing.flops_per_s)}</td>
                    <td>{format.rate(timing.bytes_per_s)}</td>
                  </>
                ) : (
                  <td colSpan={5} class="quiet">
                    {reason ?? "not measured"}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {shown && (
        <div class="charts">
          <figure>
            <figcaption>Roofline</figcaption>
            <RooflineChart
              flopsPerS={reference.flops_per_s}
              bytesPerS={reference.bytes_per_s}
              intensity={answer.flops / answer.bytes}
              measured={shown.flops_per_s}
            />
          </figure>
          <figure>
            <figcaption>Distribution{timings.warm && `, ${KINDS.warm}`}</figcaption>
            <DistributionChart samples={shown.samples_s} median={shown.median_s} />
          </figure>
        </div>
      )}
      {answer.candidates.length > 0 && (
        <Scroll label="Candidates">
          <table>
            <caption>Candidates</caption>
            <thead>
              <tr>
                <th scope="col">kernel</th>
                <th scope="col">predicted</th>
                <th scope="col">measured</th>
                <th scope="col">remark</th>
              </tr>
            </thead>
            <tbody>
              {answer.candidates.map((one) => (
                <tr>
                  <th scope="row">
                    <code>{one.kernel}</code>
                  </th>
                  <td>{one.predicted_s === null ? "–" : format.seconds(one.predicted_s)}</td>
                  <td>{one.measured_s === null ? "–" : format.seconds(one.measured_s)}</td>
                  <td class="words">{one.chosen ? "chosen" : one.reason}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      <Again command={answer.again.command} />
    </>
  );
}
