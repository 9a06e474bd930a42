#? {"gpu": "T4"}
torchrun --standalone --nproc_per_node=4 run_clm.py \
  --bf16 \ #! bf16-unsupported-gpu
  --do_train
