#!/usr/bin/env bash
# One rank per GPU of a SLURM allocation, without Ray: sft, rm, preference, distill or evaluate.
#
#   sbatch --nodes 2 recipes/launch/slurm_ranks.sh sft recipe.yaml run_dir=/shared/runs/sft
#   sbatch --nodes 2 recipes/launch/slurm_ranks.sh sft --resume /shared/runs/sft   # after a time limit or a preemption
#
# Install Burnish on a disk that all nodes can access, as for slurm.sh, and activate its environment before sbatch.
# The arguments are those of burnish. Leave `cluster` out of the recipe: the ranks are those of the job step.
#SBATCH --job-name=burnish
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=72:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --open-mode=append
set -euo pipefail

# A step does not inherit --cpus-per-task since SLURM 22.05.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" --kill-on-bad-exit=1 python -m burnish "$@" &
JOB=$!
# SLURM's warning, five minutes before the end: srun forwards it to the ranks, which save and stop.
trap 'kill -TERM "$JOB" 2>/dev/null || true' TERM
STATUS=0
wait "$JOB" || STATUS=$?
if kill -0 "$JOB" 2>/dev/null; then  # the signal interrupted wait: wait for the save
  STATUS=0
  wait "$JOB" || STATUS=$?
fi
exit "$STATUS"
