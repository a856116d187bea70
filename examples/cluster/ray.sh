#!/bin/sh
# The same on a Ray cluster that runs already: each instance on a machine with 8 GPUs. Usage: ./ray.sh CHECKPOINT KEYS,
# a folder with two files that only you may read, keys of clients and of administrators:
#   (umask 077; echo "ann a-key-of-ann" > clients; longctx group-secret > admins)
cd "$(dirname "$0")" || exit 1
exec longctx serve --cluster ray.toml --model "$1" --tensor 8 --host 0.0.0.0 --port 8000 \
    --api-key-file "$2/clients" --admin-key-file "$2/admins"
