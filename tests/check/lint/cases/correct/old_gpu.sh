#? {"gpu": "V100"}
torchrun --standalone --nproc-per-node=8 run_clm.py --fp16 --bf16 False
