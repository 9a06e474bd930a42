mlx.launch --hosts mac1.local,mac2.local --backend ring train.py
mlx.launch -n 4 train.py
