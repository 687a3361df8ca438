#!/usr/bin/env bash
# Starts a run on several nodes under Slurm. Submit it in the folder that contains examples/:
#
#     sbatch examples/multi_node/slurm.sh --config run.yaml
#     sbatch --nodes 4 --gpus-per-node 4 examples/multi_node/slurm.sh --config run.yaml
#
#SBATCH --job-name=alpaca_ppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# SIGTERM two minutes before the time limit, for a last checkpoint.
#SBATCH --signal=TERM@120
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MAIN_IP=${hosts%%$'\n'*}
# Another job on the same node may use the default port.
MAIN_PORT=$((20000 + SLURM_JOB_ID % 10000))
NODES=$SLURM_JOB_NUM_NODES
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
export MAIN_IP MAIN_PORT NODES PROCESSES_PER_NODE

# One launcher per node starts the processes; SLURM_NODEID exists only inside a task. A node that fails ends the others.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    bash -c 'MACHINE_RANK=$SLURM_NODEID exec examples/multi_node/launch.sh "$@"' launch "$@"
