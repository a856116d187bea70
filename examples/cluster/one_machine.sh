#!/bin/sh
# Four engines of the built-in model behind one address, as processes of this machine. Usage: ./one_machine.sh [FLAGS]
cd "$(dirname "$0")" || exit 1
exec longctx serve --cluster cluster.toml --port 8000 "$@"
