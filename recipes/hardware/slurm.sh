#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@600
set -eu
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.rltool-ray-token
test -s "$RAY_AUTH_TOKEN_PATH" || (umask 077; openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | cut -d ' ' -f 1)
srun --nodes=1 --ntasks=1 -w "$head" ray start --head --node-ip-address "$address" --port 6379 --block &
test "$SLURM_NNODES" = 1 || srun --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) -x "$head" ray start --address "$address:6379" --block &
exec rltool train --config run.toml --ray-address "$address:6379" --restarts 3
