import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM


def main(batches):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    base = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
    model = DDP(get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")))
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for batch in batches:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(**batch).loss
        loss.backward()
        scaler.step(optimizer)  # expect: mixed-precision-loss-scaling
        scaler.update()
        optimizer.zero_grad()


main([])
