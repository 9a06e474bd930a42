import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main(first_epoch=2, first_step=10):
    accelerator = Accelerator()
    data = TensorDataset(torch.zeros(100, 4))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.load_state("last")
    for epoch in range(first_epoch, 5):
        batches = loader
        if epoch == first_epoch:
            batches = accelerator.skip_first_batches(  # expect: skip-first-batches-epoch-reset
                loader, first_step
            )
        for (x,) in batches:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()


main()
