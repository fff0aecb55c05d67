#!/usr/bin/env bash
# One Ray cluster over the nodes of a SLURM allocation, and one job on it.
#
#   export REWARD_TOKEN=...   # the reward server's token, in the variable that the recipe names; SLURM passes it on
#   sbatch --nodes 9 recipes/launch/slurm.sh rl recipes/llama3_70b_grpo_9x8.yaml data.sources.0.path=/shared/train.jsonl \
#     'rewards.0.urls=[http://rewards:5000/get_reward]'
#
# First run, on a disk that all nodes can access (docs/install.md): `make install-cuda VENV=/shared/burnish-venv`, and
# `source /shared/burnish-venv/bin/activate`; SLURM passes PATH on.
# The arguments are those of burnish. Submit from a folder that all nodes can access. To continue a job that SLURM ended
# or requeued, submit it again with --resume RUN_FOLDER instead of the recipe.
#SBATCH --job-name=burnish
#SBATCH --nodes=9
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=72:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --open-mode=append
set -euo pipefail

PORT=${RAY_PORT:-6379}
GPUS=${SLURM_GPUS_ON_NODE:-8}
CPUS=${SLURM_CPUS_PER_TASK:-64}
export RAY_USAGE_STATS_ENABLED=0
# One token for all nodes of this allocation, so that nobody else can join or submit: Ray reads it from this variable.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \n')}

mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=${NODES[0]}
ADDRESS=$(srun --nodes=1 --ntasks=1 --overlap --nodelist="$HEAD" hostname --ip-address | awk '{print $1}'):$PORT
echo "head $HEAD ($ADDRESS), ${#NODES[@]} nodes, $GPUS GPUs each"

# --block: the step runs as long as its Ray node, so srun ends when a node is lost.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$HEAD" \
  ray start --head --block --port "$PORT" --num-gpus "$GPUS" --num-cpus "$CPUS" --include-dashboard=false &
if ((${#NODES[@]} > 1)); then
  sleep 10  # the other nodes fail if the head does not answer yet
  srun --nodes=$((${#NODES[@]} - 1)) --ntasks=$((${#NODES[@]} - 1)) --overlap --exclude="$HEAD" \
    ray start --block --address "$ADDRESS" --num-gpus "$GPUS" --num-cpus "$CPUS" &
fi

# Burnish checks the resources of the cluster at its start, so all nodes must have joined before.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$HEAD" python - "$ADDRESS" "${#NODES[@]}" <<'PYTHON'
import sys, time
import ray
from ray.exceptions import RaySystemError
address, wanted, deadline, alive = sys.argv[1], int(sys.argv[2]), time.monotonic() + 300, []
while len(alive) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"after 300 s {len(alive)} of {wanted} nodes are in the cluster: {', '.join(alive) or 'none'}")
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        alive = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
    except (ConnectionError, RuntimeError, RaySystemError):
        pass  # the head is still starting
    time.sleep(1)
PYTHON

# SLURM's warning, five minutes before the end, reaches the job as SIGTERM: it saves and stops.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$HEAD" burnish "$@" --ray-address "$ADDRESS" &
JOB=$!
trap 'kill -TERM "$JOB" 2>/dev/null || true' TERM
STATUS=0
wait "$JOB" || STATUS=$?
if kill -0 "$JOB" 2>/dev/null; then  # the signal interrupted wait: wait for the save
  STATUS=0
  wait "$JOB" || STATUS=$?
fi
kill $(jobs -p) 2>/dev/null || true
exit "$STATUS"
