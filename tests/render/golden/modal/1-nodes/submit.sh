#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 8 ranks on 1 node x 8 H100-SXM.
# micro-batch 8 x 1 accumulation step x 8 data ranks = 64 samples a step.
# Runs app.py on Modal; what it prints is printed here.
set -euo pipefail
cd "$(dirname "$0")"
: "${HF_TOKEN:?set it in your environment}"
exec modal run "$@" app.py
