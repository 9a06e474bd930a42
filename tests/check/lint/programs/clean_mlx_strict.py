# mlx.launch --hosts mac1,mac2 this.py
import mlx.core as mx

world = mx.distributed.init(strict=True, backend="ring")
print(world.rank(), mx.distributed.all_sum(mx.ones(3)))
