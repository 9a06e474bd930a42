#? {"gpu": "H100"}
torchrun --standalone --nproc-per-node=8 sft.py \
  --fp16 True \
  --bf16 True  #! ds-fp16-bf16-both
