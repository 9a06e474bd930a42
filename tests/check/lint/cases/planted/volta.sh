#? {"gpu": "V100"}
accelerate launch --num_processes 8 --mixed_precision bf16 train.py  #! bf16-unsupported-gpu
