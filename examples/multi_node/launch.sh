#!/usr/bin/env bash
# Starts one node's processes of a run on several nodes. Run it on every node, in the folder that contains examples/, with
# the same values except for MACHINE_RANK:
#
#     MACHINE_RANK=0 MAIN_IP=10.0.0.1 examples/multi_node/launch.sh --config run.yaml   # on 10.0.0.1
#     MACHINE_RANK=1 MAIN_IP=10.0.0.1 examples/multi_node/launch.sh --config run.yaml   # on the other
#
# All arguments are passed to examples/train_ppo.py.
set -euo pipefail

: "${MACHINE_RANK:?set it to 0 on the node with the address MAIN_IP, to 1 on the next}"
: "${MAIN_IP:?set it to the address of the node of rank 0, as the other nodes reach it}"
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
