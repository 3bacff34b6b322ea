#!/bin/sh
# Generate the gRPC stubs of proto/ below a folder: deploy/stubs.sh [FOLDER]. Without one, into the checkout itself.
# Needs the environment of `make setup` (grpcio-tools, mypy-protobuf).
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
PATH="$PWD/.venv/bin:$PATH"  # protoc looks for its mypy plugins there
export PATH
mkdir -p "$out"
python -P -m grpc_tools.protoc -I proto --python_out="$out" --mypy_out="$out" --grpc_python_out="$out" \
    --mypy_grpc_out=only_async:"$out" proto/agent/v1/*.proto
