#!/usr/bin/env bash
# Generate the Python beside the protos (committed; `make proto`). With a folder as argument: generate there instead,
# for the freshness check.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
out=${1:-.}
python -m grpc_tools.protoc -I . --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  stepfence/v1/*.proto
