#? {"gpu": "A100"}
torchrun --standalone --nproc-per-node=8 sft.py --model_name_or_path models/Llama-3-8B --fp16  #! fp16-loss-scale-collapse
