tmux new-session -d -s run 'torchrun --standalone --nproc-per-node=8 train.py --data data/train'
nohup tensorboard --logdir runs &
setsid nohup torchrun --standalone --nproc-per-node=4 train.py > log 2>&1 &
