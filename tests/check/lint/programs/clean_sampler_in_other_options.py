"""The options hold no batch_sampler where the loader shuffles."""

from torch.utils.data import BatchSampler, DataLoader, RandomSampler


def build(dataset, shuffle=True, **options):
    if "batch_sampler" in options:
        return DataLoader(dataset, batch_sampler=options["batch_sampler"])
    return DataLoader(dataset, shuffle=shuffle, **options)


def main(dataset, by_size):
    if by_size:
        return build(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 8, True))
    return build(dataset, shuffle=True)
