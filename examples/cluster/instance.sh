#!/bin/sh
# One process of longctx.sbatch, which gives MODEL, SECRETS, ROUTER, HOSTS and PEERS. Hosts 0 and 1 together are an
# instance that reads prompts, with a pipeline stage each, so are 2 and 3; all others are instances that decode. When a
# process dies, its instance ends and is started again, and registers again; the router has its requests go on
# elsewhere meanwhile.
role=decode number=$((SLURM_PROCID - 4)) plan="--tensor 8"
if [ "$SLURM_PROCID" -lt 4 ]; then
    role=prefill number=$((SLURM_PROCID / 2))
    first=$(echo "$HOSTS" | sed -n "$((2 * number + 1))p")
    plan="--tensor 8 --stage 2 --coordinator $first:9876 --num-processes 2 --process-id $((SLURM_PROCID % 2))"
fi
host=$(hostname)
trap 'kill -TERM $child; stopped=1' TERM
while [ -z "$stopped" ]; do
    # shellcheck disable=SC2086
    longctx serve --config engine.toml --model "$MODEL" $plan --host 0.0.0.0 --kv-advertise "$host" $PEERS \
        --join "$ROUTER:8080" --join-role "$role" --join-name "$role-$number" --join-url "http://$host:8000" \
        --join-key-file "$SECRETS/$role-$number" --api-key-file "$SECRETS/$role-$number" \
        --kv-secret-file "$SECRETS/pages" &
    child=$!
    wait $child
    wait $child
    if [ -z "$stopped" ]; then
        sleep 5
    fi
done
