#!/bin/sh
# Make the Python environment of a checkout: called by `make setup` with PYTHON, UV and STAMP.
# All packages come from requirements.lock, uv from deploy/installer.lock, and the tools that build everstep itself from
# deploy/build.lock. The stamp holds a checksum of these files. A uv on PATH is used in whatever version it has.
set -eu

step() { printf '[setup %s] %s\n' "$1" "$2"; }

still_running() { # on a terminal, uv shows its progress itself; in a pipe, it prints nothing for a long time
    seconds=0
    while sleep 10 >/dev/null 2>&1; do
        seconds=$((seconds + 10))
        printf '[setup 3/4] still installing (%s s)\n' "$seconds"
    done
}

if [ -z "${PYTHON:-}" ]; then
    echo 'everstep needs Python 3.11 or newer with the venv module; none was found on PATH.' >&2
    echo "Install one (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12 $*" >&2
    exit 1
fi

wanted=$(cat requirements.lock deploy/*.lock pyproject.toml deploy/setup.sh | cksum)
if [ -x .venv/bin/everstep ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if [ ! -x "$UV" ]; then
    step 1/4 "uv, the installer, into .tools/uv (seconds)"
    "$PYTHON" -m venv .tools/uv
    .tools/uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/installer.lock
else
    step 1/4 "uv: $UV"
fi

if [ ! -x .venv/bin/python ]; then
    step 2/4 "environment .venv on $($PYTHON --version)"
    "$UV" venv --quiet --no-python-downloads --python "$PYTHON" .venv
else
    step 2/4 "environment .venv: there already"
fi

step 3/4 "packages of requirements.lock (torch with CUDA: about 3 GB to load, 5 GB on disk; half a minute on a fast line)"
# The packages are compiled now. Otherwise, if PYTHONDONTWRITEBYTECODE is set, every import of torch compiles it again,
# and takes 3.3 s instead of 1.3 s. By default uv gives up after 60 s of compiling, or after 30 s without a received
# byte; a busy machine or a slow line takes longer.
export UV_COMPILE_BYTECODE_TIMEOUT=600 UV_HTTP_TIMEOUT=300
ticker=
if [ ! -t 2 ]; then
    still_running &
    ticker=$!
    trap 'kill "$ticker" 2>/dev/null || true' EXIT
fi
"$UV" pip install --compile-bytecode --python .venv/bin/python -r requirements.lock
if [ -n "$ticker" ]; then
    kill "$ticker"
    trap - EXIT
fi

step 4/4 "everstep itself, editable"
"$UV" pip install --quiet --python .venv/bin/python --no-deps --build-constraints deploy/build.lock -e .

printf '%s\n' "$wanted" > "$STAMP"
