/** Choose an operation and a layer; see the sizes, the plan; time and verify. */

import { useEffect, useState } from "preact/hooks";

import { getJson, type Layer, type Operation, type PlanAnswer } from "./api";
import * as format from "./format";
import { TimePanel } from "./timing";
import { VerifyPanel } from "./verify";
import { Facts, Problem } from "./parts";

const FIRST = "mb8ic64ih28oc64oh28kh3ph1";
const DTYPES = ["float32", "bfloat16", "float16", "float64"];

/** What the operations are asked with. */
export interface Question {
  operation: string;
  fields: Record<string, string | number>;
}

export function LayerView(props: { refused: (error: unknown) => void }) {
  const [operations, setOperations] = useState<Operation[]>([]);
  const [operation, setOperation] = useState("conv_bwd_data");
  const [words, setWords] = useState(FIRST);
  const [batch, setBatch] = useState("");
  const [dtype, setDtype] = useState("");
  const [lastChannels, setLastChannels] = useState(false);
  const [layer, setLayer] = useState<Layer | null>(null);
  const [plan, setPlan] = useState<PlanAnswer | null>(null);
  const [problem, setProblem] = useState<unknown>(null);

  const fields: Record<string, string | number> = { layer: words };
  if (batch) fields.batch = Number(batch);
  if (dtype) fields.dtype = dtype;
  const rank = layer?.input_size.length ?? 2;
  if (lastChannels) fields.layout = rank === 1 ? "NWC" : rank === 2 ? "NHWC" : "NDHWC";
  const question: Question = { operation, fields };
  const asked = JSON.stringify(question);

  useEffect(() => {
    getJson<{ operations: Operation[] }>("operations")
      .then((answer) => setOperations(answer.operations))
      .catch((error) => {
        props.refused(error);
        setProblem(error);
      });
  }, []);

  // Asked while it is typed: the last question alone is answered.
  useEffect(() => {
    const leaving = new AbortController();
    const soon = setTimeout(async () => {
      try {
        const query = new URLSearchParams({ layer: words, ...(batch && { batch }) });
        const found = await getJson<Layer>(`layers?${query}`, leaving.signal);
        setLayer(found);
        const texts = Object.entries(fields).map(([name, value]) => [name, String(value)]);
        const path = `plan/${operation}?${new URLSearchParams(texts)}`;
        setPlan(await getJson<PlanAnswer>(path, leaving.signal));
        setProblem(null);
      } catch (error) {
        if (leaving.signal.aborted) return;
        props.refused(error);
        setPlan(null);
        setProblem(error);
      }
    }, 250);
    return () => {
      clearTimeout(soon);
      leaving.abort();
    };
  }, [asked, rank]);

  const known = operations.length ? operations : [{ name: operation, summary: "", tensors: {} }];
  const summary = operations.find((one) => one.name === operation)?.summary;
  return (
    <>
      <section class="panel" aria-labelledby="layer-title">
        <h2 id="layer-title">Layer</h2>
        <form class="fields" onSubmit={(event) => event.preventDefault()}>
          <label>
            Operation
            <select value={operation} onChange={(event) => setOperation(event.currentTarget.value)}>
              {known.map((one) => (
                <option value={one.name}>{one.name}</option>
              ))}
            </select>
          </label>
          <label class="wide">
            Layer, in benchdnn's, MIOpen's, PyTorch's or ONNX' words, or a suite's name
            <input
              value={words}
              spellcheck={false}
              autocomplete="off"
              aria-describedby="layer-found"
              onInput={(event) => setWords(event.currentTarget.value)}
            />
          </label>
          <label>
            Batch
            <input
              type="number"
              min={1}
              placeholder={layer ? String(layer.batch) : ""}
              value={batch}
              onInput={(event) => setBatch(event.currentTarget.value)}
            />
          </label>
          <label>
            Element type
            <select value={dtype} onChange={(event) => setDtype(event.currentTarget.value)}>
              <option value="">the layer's, or float32</option>
              {DTYPES.map((name) => (
                <option value={name}>{name}</option>
              ))}
            </select>
          </label>
          <label class="check">
            <input
              type="checkbox"
              checked={lastChannels}
              onChange={(event) => setLastChannels(event.currentTarget.checked)}
            />
            channels last
          </label>
        </form>
        {summary && <p class="quiet">{summary}</p>}
        <div id="layer-found" aria-live="polite">
          {problem ? <Problem error={problem} /> : layer && <p>{layer.title}</p>}
        </div>
        {layer && !problem && <Sizes layer={layer} />}
        {layer && !problem && (
          <details>
            <summary>The same layer in every dialect</summary>
            <Facts
              facts={Object.entries(layer.spellings).map(([name, text]) => [name, <code>{text}</code>])}
            />
          </details>
        )}
      </section>
      {plan && <PlanPanel answer={plan} />}
      {plan && <TimePanel key={`time ${asked}`} question={question} refused={props.refused} />}
      {plan && (
        <VerifyPanel
          key={`verify ${asked}`}
          question={question}
          outputs={Object.keys(plan.outputs)}
          refused={props.refused}
        />
      )}
    </>
  );
}

/** The output's size, worked out. */
function Sizes(props: { layer: Layer }) {
  const { layer } = props;
  const transposed = layer.kind.includes("transpose");
  return (
    <table>
      <caption>{transposed ? "Sizes of the convolution that it transposes" : "Output sizes"}</caption>
      <tbody>
        {layer.output_size.map((found, axis) => {
          const size = layer.input_size[axis] ?? 0;
          const kernel = layer.kernel_size[axis] ?? 1;
          const stride = layer.stride[axis] ?? 1;
          const dilation = layer.dilation[axis] ?? 1;
          const [before, after] = layer.padding[axis] ?? [0, 0];
          const name = "DHW".slice(-layer.output_size.length)[axis];
          return (
            <tr>
              <th scope="row">{name}</th>
              <td>
                ⌊({size} + {before} + {after} − {dilation}·({kernel} − 1) − 1) / {stride}⌋ + 1 ={" "}
                <strong>{found}</strong>
              </td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

function PlanPanel(props: { answer: PlanAnswer }) {
  const { plan, device, reference, inputs, outputs } = props.answer;
  const tensors = [...Object.entries(inputs), ...Object.entries(outputs)];
  return (
    <section class="panel" aria-labelledby="plan-title">
      <h2 id="plan-title">Plan</h2>
      <Facts
        facts={[
          ["kernel", <code>{plan.kernel}</code>],
          ["on", `${device.name} (${device.backend} ${device.index})`],
          ["work", `${format.flops(props.answer.flops)}, ${format.bytes(props.answer.bytes)} to read and write`],
          ["workspace", format.bytes(plan.workspace_bytes)],
          [
            "at best",
            `${format.seconds(reference.seconds)}, limited by ${reference.limited_by} (${reference.source})`,
          ],
          ...tensors.map(([name, one]): [string, string] => [name, `${format.shape(one.shape)} ${one.dtype}`]),
        ]}
      />
      {plan.passed_over.length > 0 && (
        <table>
          <caption>Kernels that were passed over</caption>
          <tbody>
            {plan.passed_over.map((one) => (
              <tr>
                <th scope="row">
                  <code>{one.kernel}</code>
                </th>
                <td>{one.reason}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
