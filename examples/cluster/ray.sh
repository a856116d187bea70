#!/bin/sh
# The same on a Ray cluster that runs already: each instance on a machine with 8 GPUs. Usage: ./ray.sh CHECKPOINT KEY_FILE
cd "$(dirname "$0")" || exit 1
exec longctx serve --cluster ray.toml --model "$1" --tensor 8 --host 0.0.0.0 --port 8000 --api-key-file "$2"
