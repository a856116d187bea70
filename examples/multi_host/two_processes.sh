#!/bin/sh
# One engine in two processes on this machine, with two CPU devices each, as on two hosts.
# Usage: two_processes.sh [CHECKPOINT [PROMPT]]; by default the built-in model, and a question that it answers.
# Set LONGCTX for another program than the one on the PATH or in the .venv of the repository, PORT for a port of choice.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
longctx=${LONGCTX:-$(command -v longctx || echo "$root/.venv/bin/longctx")}
if ! command -v "$longctx" > /dev/null; then
    echo "two_processes.sh: no longctx on the PATH, and no $longctx: run make .venv/installed, or set LONGCTX" >&2
    exit 1
fi
port=${PORT:-$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')}
model=${1:-$root/longctx/models/tiny}
prompt=${2:-The pass key of lemon is 48213. The old road crossed the field.
Q: What is the pass key of lemon?
A: }

export JAX_PLATFORMS=cpu
run() {
    exec "$longctx" generate --model "$model" --prompt "$prompt" --max-tokens 32 --stage 2 --tensor 2 \
        --coordinator "127.0.0.1:$port" --num-processes 2 --process-id "$1"
}
run 1 &
trap 'kill $! 2> /dev/null || true' EXIT # where process 0 fails before it has met process 1
(run 0)
wait $!
