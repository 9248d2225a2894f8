/** Choose an operation and a layer; see the sizes, the plan; time and verify. */

import { useEffect, useState } from "preact/hooks";

import { getJson, type Layer, type Operation, type PlanAnswer } from "./api";
import * as format from "./format";
import { Geometry, words as wordsOf } from "./geometry";
import { TimePanel } from "./timing";
import { VerifyPanel } from "./verify";
import { Facts, Problem, Scroll } from "./parts";

const FIRST = "mb8ic64ih28oc64oh28kh3ph1";
const DTYPES = ["float32", "bfloat16", "float16", "float64"];

/** An operation and the fields that state its problem. */
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
  // Whether `layer` is the server's answer to what stands in the field.
  const [known, setKnown] = useState(false);
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

  // Requested while the user types; a newer request cancels the older one.
  useEffect(() => {
    const leaving = new AbortController();
    const soon = setTimeout(async () => {
      let found: Layer | null = null;
      try {
        const query = new URLSearchParams({ layer: words, ...(batch && { batch }) });
        found = await getJson<Layer>(`layers?${query}`, leaving.signal);
        setLayer(found);
        setKnown(true);
        const texts = Object.entries(fields).map(([name, value]) => [name, String(value)]);
        const path = `plan/${operation}?${new URLSearchParams(texts)}`;
        setPlan(await getJson<PlanAnswer>(path, leaving.signal));
        setProblem(null);
      } catch (error) {
        if (leaving.signal.aborted) return;
        props.refused(error);
        if (found === null) setKnown(false);
        setPlan(null);
        setProblem(error);
      }
    }, 250);
    return () => {
      clearTimeout(soon);
      leaving.abort();
    };
  }, [asked, rank]);

  const names = operations.length ? operations.map((one) => one.name) : [operation];
  const fits = (name: string) => layer === null || layer.operations.includes(name);
  const summary = operations.find((one) => one.name === operation)?.summary;
  return (
    <>
      <section class="panel" aria-labelledby="layer-title">
        <h2 id="layer-title">Layer</h2>
        <form class="fields" onSubmit={(event) => event.preventDefault()}>
          <label>
            Operation
            <select value={operation} onChange={(event) => setOperation(event.currentTarget.value)}>
              <optgroup label="For this layer">
                {names.filter(fits).map((name) => (
                  <option value={name}>{name}</option>
                ))}
              </optgroup>
              <optgroup label="For other layers">
                {names.filter((name) => !fits(name)).map((name) => (
                  <option value={name}>{name}</option>
                ))}
              </optgroup>
            </select>
          </label>
          <label class="wide">
            Layer: a benchdnn problem, MIOpenDriver command, PyTorch module, ONNX node or name from a suite
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
              <option value="">that of the layer, or float32</option>
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
        {layer && (
          <Geometry
            layer={layer}
            known={known}
            change={(changed) => {
              setLayer(changed);
              setKnown(false);
              setBatch("");
              setWords(wordsOf(changed));
            }}
          />
        )}
        {layer && known && (
          <details>
            <summary>The layer in every notation</summary>
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

function PlanPanel(props: { answer: PlanAnswer }) {
  const { plan, device, reference, inputs, outputs } = props.answer;
  const tensors = [...Object.entries(inputs), ...Object.entries(outputs)];
  return (
    <section class="panel" aria-labelledby="plan-title">
      <h2 id="plan-title">Plan</h2>
      <Facts
        facts={[
          ["kernel", <code>{plan.kernel}</code>],
          ["device", `${device.name} (${device.backend} ${device.index})`],
          ["work", `${format.flops(props.answer.flops)}, ${format.bytes(props.answer.bytes)} to read and write`],
          ["workspace", format.bytes(plan.workspace_bytes)],
          [
            "roofline",
            `${format.seconds(reference.seconds)}, limited by ${reference.limited_by} (${reference.source})`,
          ],
          ...tensors.map(([name, one]): [string, string] => [name, `${format.shape(one.shape)} ${one.dtype}`]),
        ]}
      />
      {plan.passed_over.length > 0 && (
        <Scroll label="Other kernels">
          <table>
            <caption>Other kernels, and why the plan passed over them</caption>
            <tbody>
              {plan.passed_over.map((one) => (
                <tr>
                  <th scope="row">
                    <code>{one.kernel}</code>
                  </th>
                  <td class="words">{one.reason}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </section>
  );
}
