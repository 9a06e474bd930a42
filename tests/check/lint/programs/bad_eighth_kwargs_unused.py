from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
acc = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])  # expect: ddp-find-unused-overhead
