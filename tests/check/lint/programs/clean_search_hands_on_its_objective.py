"""Rank 0 searches, and its library calls the objective; the others answer each trial."""

import torch.distributed as dist


def search(study, train, trials):
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:

        def objective(trial):
            dist.broadcast_object_list([trial], src=0)
            return train(trial)

        study.optimize(objective, n_trials=trials)
    else:
        for _ in range(trials):
            held = [None]
            dist.broadcast_object_list(held, src=0)
            train(held[0])
