/** What each operation takes and gives, from the generated types of the OpenAPI document. */

import type { components, operations, paths } from "./openapi.js";
import type { Stored, Tensor } from "./tensor.js";

type Schemas = components["schemas"];
type Forms = Schemas["FloatTensor"] | Schemas["IndexTensor"];

/** The operations by name: those whose paths are their names. */
export type OperationName = {
  [O in keyof operations]: `/${O}` extends keyof paths ? O : never;
}[keyof operations] &
  keyof Answers;

// The forms that a tensor has in JSON are for who writes JSON; here it is a Tensor, or Stored.
type Given<T> = T extends Forms ? Tensor | Stored : T;
type Body<O extends OperationName> = operations[O]["requestBody"]["content"]["application/json"];

/** The tensors and parameters of a request. */
export type Request<O extends OperationName> = {
  [Field in keyof Body<O> as Exclude<Field, "response" | "stored" | "store">]: Given<Body<O>[Field]>;
};

/** How an answer was computed. */
export type Report = Schemas["Report"];

type Answers = {
  [O in keyof operations]: operations[O] extends {
    responses: { 200: { content: { "application/json": infer Answer extends { report: Report } } } };
  }
    ? { [Field in keyof Answer as Exclude<Field, "report">]: Tensor }
    : never;
};

/** The tensors of an answer by name. */
export type Outputs<O extends OperationName> = Answers[O];

/** The tensors of an answer, and how they were computed. */
export type Answer<O extends OperationName> = Outputs<O> & {
  readonly report: Report;
  readonly requestId: string;
};
