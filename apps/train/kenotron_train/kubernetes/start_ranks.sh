# Written by `python apps/train kubernetes`: starts the ranks of one pod.
# One process is one rank. Ranks end one another when one fails.
ranks=()
for ((i = 0; i < LOCAL_WORLD_SIZE; i++)); do
    RANK=$((JOB_COMPLETION_INDEX * LOCAL_WORLD_SIZE + i)) LOCAL_RANK=$i \
        {{program}} --config-file {{config}}{{flags}} &
    ranks+=($!)
done
# The pod is told to leave its node: ranks save, and end with status 85.
trap 'again=yes; kill -TERM "${ranks[@]}" 2>/dev/null' TERM INT
highest=0
for rank in "${ranks[@]}"; do
    again=yes # a signal interrupts wait
    while [[ $again ]]; do
        again=
        wait "$rank"
        status=$?
    done
    if ((status > highest)); then highest=$status; fi
done
exit "$highest"
