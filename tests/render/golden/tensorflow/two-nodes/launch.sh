#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# DDP over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# MultiWorkerMirroredStrategy: 2 workers, one a node with all its GPUs.
# Run it on every node, with WORKER the node's number, and HOSTS the hosts of all workers.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
train="${TRAIN_SCRIPT:-train.py}"
: "${WORKER:?set it to the number of this node, 0 to 1}"
TF_CONFIG="$("$python" tf_config.py "$WORKER")"
export TF_CONFIG
exec "$python" "$train" "$@"
