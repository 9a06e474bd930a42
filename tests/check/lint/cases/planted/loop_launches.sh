for seed in 1 2 3; do
  CUDA_VISIBLE_DEVICES=$seed accelerate launch --num_processes 1 --main_process_port 29501 train.py --seed $seed &  #! port-in-use
done
wait
