#!/bin/sh
# One server in two processes on this machine, with two CPU devices each, as on two hosts. Ctrl-C ends both in order.
# Usage: two_processes.sh [CHECKPOINT [FLAG ...]]; by default the built-in model.
# Set LONGCTX for another program than the one on the PATH or in the .venv of the repository, PORT for the port of HTTP.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
longctx=${LONGCTX:-$(command -v longctx || echo "$root/.venv/bin/longctx")}
if ! command -v "$longctx" > /dev/null; then
    echo "two_processes.sh: no longctx on the PATH, and no $longctx: run make .venv/installed, or set LONGCTX" >&2
    exit 1
fi
coordinator=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
model=${1:-$root/longctx/models/tiny}
[ $# -eq 0 ] || shift

export JAX_PLATFORMS=cpu
run() {
    id=$1
    shift
    exec "$longctx" serve --model "$model" --port "${PORT:-8000}" --stage 2 --tensor 2 \
        --coordinator "127.0.0.1:$coordinator" --num-processes 2 --process-id "$id" "$@"
}
run 0 "$@" &
first=$!
run 1 "$@" &
second=$!
# The first process lets requests finish; the second ends with it, and is not to outlive it.
trap 'kill "$first" 2> /dev/null || true' INT TERM
trap 'kill -9 "$first" "$second" 2> /dev/null || true' EXIT
status=0
wait "$first" || status=$?
while kill -0 "$first" 2> /dev/null; do # a signal has interrupted the wait
    status=0
    wait "$first" || status=$?
done
wait "$second" || [ "$status" -ne 0 ] || status=$?
exit "$status"
