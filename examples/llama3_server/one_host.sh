#!/bin/sh
# Llama 3.1 on one host with 8 GPUs, for other machines too: whoever has a key of the file may use it.
# Usage: one_host.sh CHECKPOINT KEY_FILE [FLAG ...]; a key is a line of the file, `KEY` or `NAME KEY`, of mode 600.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
checkpoint=$1 keys=$2
shift 2
exec longctx serve --config "$here/server.toml" --model "$checkpoint" --tensor 8 \
    --host 0.0.0.0 --api-key-file "$keys" "$@"
