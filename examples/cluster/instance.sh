#!/bin/sh
# One instance of longctx.sbatch, which gives MODEL, SECRETS, ROUTER and PEERS. When it dies it is started again, and
# registers again; the router has its requests go on elsewhere meanwhile.
role=decode
[ "$SLURM_PROCID" -lt 2 ] && role=prefill
host=$(hostname)
trap 'kill -TERM $child; stopped=1' TERM
while [ -z "$stopped" ]; do
    # shellcheck disable=SC2086
    longctx serve --config engine.toml --model "$MODEL" --tensor 8 --host 0.0.0.0 --kv-advertise "$host" $PEERS \
        --join "$ROUTER:8080" --join-role "$role" --join-name "$role-$SLURM_PROCID" --join-url "http://$host:8000" \
        --join-key-file "$SECRETS/cluster" --admin-key-file "$SECRETS/cluster" --api-key-file "$SECRETS/clients" \
        --kv-secret-file "$SECRETS/pages" &
    child=$!
    wait $child
    wait $child
    [ -z "$stopped" ] && sleep 5
done
