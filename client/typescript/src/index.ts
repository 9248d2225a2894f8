export { Client, type CallOptions, type ClientOptions } from "./client.js";
export type { DType, Elements } from "./dtypes.js";
export { ConvgradError, type ErrorCode } from "./errors.js";
export type { Answer, OperationName, Outputs, Report, Request } from "./operations.js";
export { Stored, Tensor, type Nested } from "./tensor.js";
