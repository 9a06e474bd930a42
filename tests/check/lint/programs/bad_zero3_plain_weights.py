import deepspeed, torch, torch.nn as nn
CFG = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        nn.init.normal_(self.head.weight)
    def forward(self, x):
        return self.head(self.emb(x))
def main(loader):
    with deepspeed.zero.Init(config_dict_or_path=CFG):
        net = Net()
    nn.init.xavier_uniform_(net.head.weight)  # expect: zero3-zero-size-params
    engine, opt, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CFG)
    for x, y in loader:
        loss = nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        print(engine.module.head.weight.norm())  # expect: zero3-zero-size-params
        norms = {n: p.norm().item() for n, p in engine.module.named_parameters()}  # expect: zero3-zero-size-params
main(None)
