"""A gradient through Triton's gRPC client: an operation is a model of the protocol."""

from __future__ import annotations

import os

import numpy as np
import tritonclient.grpc as triton

arrays = {
    "grad_output": np.ones((1, 4, 8, 8), np.float32),
    "weight": np.ones((4, 2, 3, 3), np.float32),
}
inputs = [
    triton.InferInput(name, array.shape, "FP32").set_data_from_numpy(array)
    for name, array in arrays.items()
]
with triton.InferenceServerClient(os.environ.get("CONVGRAD_GRPC", "127.0.0.1:8001")) as client:
    result = client.infer("conv_bwd_data", inputs, parameters={"padding": 1})
gradient = result.as_numpy("grad_input")
print("x".join(map(str, gradient.shape)), gradient.max())  # 1x2x8x8 36.0
