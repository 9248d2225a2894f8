/** Compare a result with float64: upload .npy files, see what is wrong and where. */

import { useEffect, useRef, useState } from "preact/hooks";

import { postJson, type OutputReport, type Value, type VerifyAnswer } from "./api";
import * as format from "./format";
import type { Question } from "./layer";
import { Again, Facts, Problem } from "./parts";

const DISTRIBUTIONS = ["normal", "uniform", "integers"];

async function base64(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onerror = () => reject(reader.error);
    reader.onload = () => resolve(String(reader.result).replace(/^[^,]*,/, ""));
    reader.readAsDataURL(file);
  });
}

export function VerifyPanel(props: {
  question: Question;
  outputs: string[];
  refused: (error: unknown) => void;
}) {
  const [files, setFiles] = useState<Record<string, File>>({});
  const [seed, setSeed] = useState("0");
  const [distribution, setDistribution] = useState("normal");
  const [busy, setBusy] = useState(false);
  const [answer, setAnswer] = useState<VerifyAnswer | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const running = useRef<AbortController | null>(null);
  useEffect(() => () => running.current?.abort(), []);
  const { operation, fields } = props.question;

  const start = async () => {
    const mine = new AbortController();
    running.current = mine;
    setBusy(true);
    setProblem(null);
    try {
      const body: Record<string, unknown> = { ...fields, seed: Number(seed), distribution };
      for (const [output, file] of Object.entries(files)) {
        body[`result_${output}`] = { npy: await base64(file) };
      }
      setAnswer(await postJson<VerifyAnswer>(`verify/${operation}`, body, mine.signal));
    } catch (error) {
      if (!mine.signal.aborted) {
        props.refused(error);
        setProblem(error);
      }
    } finally {
      setBusy(false);
      running.current = null;
    }
  };

  return (
    <section class="panel" aria-labelledby="verify-title">
      <h2 id="verify-title">Verify</h2>
      <p>
        Draw the tensors from this seed with <code>convgrad.check.draw</code>, compute the layer with your
        kernel and upload the result. The server compares every element with a float64 reference.
      </p>
      <form
        class="fields"
        onSubmit={(event) => {
          event.preventDefault();
          void start();
        }}
      >
        <label>
          Seed
          <input type="number" min={0} value={seed} onInput={(event) => setSeed(event.currentTarget.value)} />
        </label>
        <label>
          Distribution
          <select value={distribution} onChange={(event) => setDistribution(event.currentTarget.value)}>
            {DISTRIBUTIONS.map((name) => (
              <option value={name}>{name}</option>
            ))}
          </select>
        </label>
        {props.outputs.map((output) => (
          <label>
            Your {output} (.npy)
            <input
              type="file"
              accept=".npy"
              onChange={(event) => {
                const file = event.currentTarget.files?.[0];
                setFiles(({ [output]: _, ...others }) => (file ? { ...others, [output]: file } : others));
              }}
            />
          </label>
        ))}
        <div class="actions">
          <button type="submit" class="main" disabled={busy || Object.keys(files).length === 0}>
            Verify it
          </button>
          {busy && (
            <button type="button" onClick={() => running.current?.abort()}>
              Cancel
            </button>
          )}
          <span role="status">{busy ? "computing the reference" : ""}</span>
        </div>
      </form>
      {problem ? <Problem error={problem} /> : null}
      {answer && <Verdict answer={answer} />}
    </section>
  );
}

function Verdict(props: { answer: VerifyAnswer }) {
  const { answer } = props;
  return (
    <div aria-live="polite">
      <p class={answer.passed ? "verdict passed" : "verdict failed"}>
        {answer.passed ? "Passed: every element is within its bound." : "Failed:"}
      </p>
      {answer.findings.length > 0 && (
        <ul>
          {answer.findings.map((finding) => (
            <li>
              <code>{finding.code}</code>: {finding.sentence}
            </li>
          ))}
        </ul>
      )}
      {Object.entries(answer.outputs).map(([name, output]) => (
        <Output name={name} output={output} adjoint={answer.adjointness[name]} />
      ))}
      <Again command={answer.again.command} />
    </div>
  );
}

function Output(props: {
  name: string;
  output: OutputReport;
  adjoint: VerifyAnswer["adjointness"][string] | undefined;
}) {
  const { name, output } = props;
  const { worst } = output;
  const facts: [string, string][] = [
    ["elements", `${format.count(output.elements)}, of which ${format.count(output.exceeding)} exceed their bound`],
    ["exact gate", outcome(output.exact, "every bit is equal", "some bits differ")],
    ["bits", `${same(output.bits.equal_to_ours)}, digest ${output.bits.digest}`],
  ];
  if (output.ulps) facts.push(["largest distance", `${format.count(output.ulps.max)} ULP from the rounded reference`]);
  if (props.adjoint) facts.push(["adjointness", outcome(props.adjoint, "holds", "does not hold")]);
  if (worst) {
    facts.push([
      "worst element",
      `(${worst.index.join(", ")}): ${format.plain(worst.value)}, expected ${format.plain(worst.reference)} ` +
        `within ${format.plain(worst.bound)}, ${format.plain(worst.share)} of its bound`,
    ]);
  }
  return (
    <article>
      <h3>
        {name} {format.shape(output.shape)}
      </h3>
      <Facts facts={facts} />
      <Shares output={output} />
      {output.heat_map && <HeatMap name={name} map={output.heat_map} />}
    </article>
  );
}

function outcome(
  check: { applies: boolean; reason: string | null; passed: boolean | null },
  passed: string,
  failed: string,
): string {
  if (!check.applies) return `does not apply: ${check.reason}`;
  return check.passed ? passed : failed;
}

function same(equal: boolean | null): string {
  if (equal === null) return "the server has no kernel to compare with";
  return equal ? "equal to the server's own result" : "different from the server's own result";
}

function Shares(props: { output: OutputReport }) {
  const { edges, counts } = props.output.shares;
  const most = Math.log1p(Math.max(...counts));
  const rows = counts
    .map((count, bar) => ({ count, low: edges[bar - 1], high: edges[bar] }))
    .filter((row) => row.count > 0);
  return (
    <table class="bars">
      <caption>Error divided by bound; above 1 is wrong. Bars have a logarithmic scale.</caption>
      <tbody>
        {rows.map(({ count, low, high }) => (
          <tr class={(low ?? 0) >= 1 ? "wrong" : ""}>
            <th scope="row">
              {low === undefined ? "0" : high === undefined ? `> ${low}` : `≤ ${Number(high.toPrecision(3))}`}
            </th>
            <td>
              <span class="bar" style={{ width: `${(60 * Math.log1p(count)) / most}%` }} /> {format.count(count)}
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** A grid coloured by share; wrong cells stand out in both colour schemes. */
function HeatMap(props: { name: string; map: NonNullable<OutputReport["heat_map"]> }) {
  const { axes, extents, values } = props.map;
  const columns = Math.max(...values.map((row) => row.length));
  const level = (value: Value) => {
    const share = typeof value === "number" ? value : Infinity;
    if (share > 1) return "wrong";
    return `level-${share <= 0 ? 0 : Math.max(0, Math.min(5, 6 + Math.floor(Math.log2(share) / 2)))}`;
  };
  const wrong = values.flat().filter((value) => level(value) === "wrong").length;
  return (
    <figure>
      <figcaption>
        The largest error, relative to its bound, in each cell. Rows: {axes[0]} ({extents[0]}); columns:{" "}
        {axes[1]} ({extents[1]}). {wrong === 0 ? "No cell is wrong." : `${wrong} of ${values.length * columns} cells are wrong.`}
      </figcaption>
      <svg
        class="heat"
        viewBox={`0 0 ${columns} ${values.length}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`Error of ${props.name}: ${wrong} of ${values.length * columns} cells are wrong.`}
      >
        {values.flatMap((row, y) =>
          row.map((value, x) => (
            <rect x={x} y={y} width={1.02} height={1.02} class={level(value)}>
              <title>{format.plain(value)}</title>
            </rect>
          )),
        )}
      </svg>
    </figure>
  );
}
