#!/usr/bin/env bash
# One node's share of a run on several. Start it where examples/ is on every node, all values but MACHINE_RANK the same:
#
#     MACHINE_RANK=0 MAIN_IP=10.0.0.1 examples/multi_node/launch.sh --config run.yaml   # on 10.0.0.1
#     MACHINE_RANK=1 MAIN_IP=10.0.0.1 examples/multi_node/launch.sh --config run.yaml   # on the other
#
# Everything after the name goes to examples/train_ppo.py.
set -euo pipefail

: "${MACHINE_RANK:?0 on the node that MAIN_IP belongs to, 1 on the next}"
: "${MAIN_IP:?the address of the node of rank 0, as the others reach it}"
NODES=${NODES:-2}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-1}
MAIN_PORT=${MAIN_PORT:-29500}
CONFIG_FILE=${CONFIG_FILE:-examples/accelerate_configs/two_nodes.yaml}

exec accelerate launch \
    --config_file "$CONFIG_FILE" \
    --num_machines "$NODES" \
    --num_processes "$((NODES * PROCESSES_PER_NODE))" \
    --machine_rank "$MACHINE_RANK" \
    --main_process_ip "$MAIN_IP" \
    --main_process_port "$MAIN_PORT" \
    examples/train_ppo.py "$@"
