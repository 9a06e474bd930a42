#? {"nodes": 4}
accelerate launch --num_processes 32 --num_machines 4 --machine_rank $NODE_RANK --main_process_ip $HEAD sft.py \
  --model_name_or_path Qwen/Qwen3-8B \ #! hub-rate-limit
  --output_dir out
