import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Sync(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if state.is_world_process_zero:
            t = torch.tensor(metrics["eval_loss"], device=args.device)
            dist.all_reduce(t)  # expect: collective-mismatch
            print(t)


class Report(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        print(logs)


args = TrainingArguments("out", bf16=True, gradient_checkpointing=True, fsdp="full_shard auto_wrap")
trainer = Trainer(AutoModelForCausalLM.from_pretrained("gpt2"), args, callbacks=[Sync(), Report()])
trainer.train()
if trainer.is_world_process_zero():
    trainer.save_model("final")
