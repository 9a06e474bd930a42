mlx.launch --hosts 192.168.1.2,192.168.1.2 train.py  #! mlx-ring-connect
