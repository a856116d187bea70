#!/bin/sh
# One engine in two processes on this machine, with two CPU devices each, as on two hosts.
# Usage: two_processes.sh CHECKPOINT PROMPT
set -eu
run() {
    JAX_PLATFORMS=cpu longctx generate --model "$1" --prompt "$2" --max-tokens 32 --stage 2 --tensor 2 \
        --coordinator 127.0.0.1:9876 --num-processes 2 --process-id "$3"
}
run "$1" "$2" 1 &
run "$1" "$2" 0
wait $!
