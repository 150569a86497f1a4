#!/usr/bin/env bash
# Generate the Python beside the protos (committed). With --check: generate elsewhere and say whether what is committed is
# what the protos give.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

generate() {
  python -m grpc_tools.protoc -I . \
    --python_out="$1" --grpc_python_out="$1" --mypy_out="quiet:$1" --mypy_grpc_out="quiet:$1" \
    stepfence/v1/*.proto
}

if [[ ${1:-} != --check ]]; then
  generate .
  exit
fi
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
generate "$fresh"
if ! diff -r -q -x '*.proto' -x '__init__.py' -x '__pycache__' "$fresh/stepfence" stepfence; then
  echo "The generated code is not what the protos give: run make proto." >&2
  exit 1
fi
