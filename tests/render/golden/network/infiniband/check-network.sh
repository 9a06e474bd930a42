#!/usr/bin/env bash
# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 16 ranks on 2 nodes x 8 H100-SXM.
# micro-batch 4 x 1 accumulation step x 16 data ranks = 64 samples a step.
# Usage: check-network.sh LOG...
# The logs of all ranks, written with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET.
# Ends with 1 where they say something else than the plan expects.
set -euo pipefail
[ "$#" -gt 0 ] || { echo "usage: check-network.sh LOG..." >&2; exit 2; }
logs=("$@")
failed=0
check() {  # yes, no, better or worse; what is looked for; what it means
  local found
  found="$(cat -- "${logs[@]}" | grep -cE -- "$2" || true)"
  case "$1:$((found > 0))" in
    yes:1 | better:1) echo "ok    $found x $2" ;;
    no:0 | worse:0) echo "ok    never $2" ;;
    worse:1) echo "slow  $found x $2: $3" ;;
    better:0) echo "slow  never $2: $3" ;;
    yes:0) echo "FAIL  never $2: $3"; failed=1 ;;
    no:1) echo "FAIL  $found x $2: $3"; failed=1 ;;
  esac
}
check yes 'Using network (IB)' 'every rank found the RDMA ports. Without it: is /dev/infiniband in the container, may it lock memory (ulimit -l unlimited), is NCCL_IB_DISABLE set?'
check no 'Using network Socket|via NET/Socket' 'some ranks talk over TCP, and all wait for them'
check yes 'via NET/(IB)' 'channels between nodes. Without it no rank has sent to another node yet'
check better 'via NET/(IB)[^ ]*/GDRDMA' 'the NIC reads the GPU'"'"'s memory (GPUDirect RDMA). Without it every byte goes through the host: load nvidia_peermem or use a driver with dma-buf, and put NIC and GPU on one PCIe switch'
check worse 'GPU Direct RDMA Disabled for' 'a NIC that cannot read the GPU'"'"'s memory; no harm where it is for storage'
exit "$failed"
