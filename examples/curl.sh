#!/bin/sh
# The gradient of a 2x2 convolution with curl alone: tensors as nested lists.
set -eu
url=${CONVGRAD_URL:-http://127.0.0.1:8000}

curl --fail-with-body -sS -w '\n' "$url/conv_bwd_data" -H 'Content-Type: application/json' -d '{
  "grad_output": {"values": [[[[1, 2], [3, 4]]]], "dtype": "float32"},
  "weight":      {"values": [[[[1, 0], [0, -1]]]], "dtype": "float32"},
  "response": "values"}'
