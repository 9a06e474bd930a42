import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup


class Runner:
    def __init__(self, args):
        self.args = args
        self.acc = Accelerator(gradient_accumulation_steps=args.accum, log_with="wandb")
        set_seed(args.seed)
        self.model = AutoModelForCausalLM.from_pretrained(args.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    @property
    def lead(self):
        return self.acc.is_main_process

    def prepare(self, train, val):
        self.model, self.optim, self.train, self.val = self.acc.prepare(self.model, self.optim, train, val)

    def evaluate(self):
        self.model.eval()
        losses = []
        for batch in self.val:
            with torch.no_grad():
                loss = self.model(**batch).loss
            losses.append(self.acc.gather_for_metrics(loss.repeat(4)))
        return torch.cat(losses).mean()

    def fit(self):
        for epoch in range(self.args.epochs):
            for batch in self.train:
                with self.acc.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.acc.backward(loss)
                    if self.acc.sync_gradients:
                        self.acc.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optim.step()
                    self.optim.zero_grad()
            if self.lead:
                value = self.evaluate()  # expect: collective-mismatch
                self.acc.log({"val": value})
            if self.lead and epoch % 2:
                self.acc.save_state(f"out/{epoch}")
