# mlx.launch -n 4 this.py
import mlx.core as mx

world = mx.distributed.init()
if world.size() != 4:
    raise SystemExit(f"{world.size()} of 4 processes met")
