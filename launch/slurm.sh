#!/bin/bash
# Example: one process for each node, all of its GPUs; 4 nodes of 4 GPUs are 16 devices.
# sbatch launch/slurm.sh; after a time-out or a lost node: sbatch launch/slurm.sh resume
#SBATCH --job-name=ott-shard
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
# SIGTERM to every process five minutes before the end: each run then keeps a checkpoint.
#SBATCH --signal=TERM@300
#SBATCH --output=ott-shard-%j.log
set -euo pipefail

OUT=$SLURM_SUBMIT_DIR/run # on a file system that all nodes see
if [ "${1:-}" = resume ]; then
    srun --kill-on-bad-exit=1 ott-shard resume --run="$OUT"
else
    srun --kill-on-bad-exit=1 ott-shard solve --x=x.npy --y=y.npy \
        --epsilon=0.05 --epsilon_unit=std --mesh=8x2 --out="$OUT"
fi
