"""Search learning rate and weight decay with Ray Tune and ASHA. `python tune_ray.py [SAMPLES]`.

Every trial is a whole Ray Train run of `train.py` on as many workers as `ray.json` says at least;
bad ones are stopped early. Passing a trainer to the Tuner is deprecated in Ray: the trainer is made
inside the trial's function.
"""

import json
import math
import sys
from typing import Any

import lm
import ray.train
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from train import connect, read_options, scaling, storage, train_loop
from train_torchrun import check

REPORTS = 10
"""Times that a trial reports its loss; ASHA decides at some of them."""


def trial(config: dict[str, Any]) -> None:
    """One trial: a small driver that starts its workers."""
    options = config.pop("options")
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=config,
        scaling_config=scaling(options),
        run_config=ray.train.RunConfig(
            name=f"{options['name']}-{tune.get_context().get_trial_id()}",
            storage_path=storage(options),
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def main() -> None:
    """The search. The last line is JSON: the best trial, and how many there were."""
    options, settings = read_options(), lm.read_settings()
    check(settings)
    workers = options["num_workers"]
    least = workers[0] if isinstance(workers, list) else workers
    options |= {"num_workers": least, "storage": storage(options)}
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else options["tune"]["samples"]
    connect()
    resources = ray.cluster_resources()
    kind = "GPU" if options["use_gpu"] else "CPU"
    at_once = max(1, int(resources.get(kind, 1) // (least * options["resources_per_worker"][kind])))
    peak, decay = settings["learning_rate"], settings["weight_decay"]
    tuner = tune.Tuner(
        # The trial itself is a small driver: its workers ask for what they need. Ray takes no
        # empty request, and a byte of memory is next to none.
        tune.with_resources(trial, {"memory": 1}),
        param_space={
            "learning_rate": tune.loguniform(peak / 10, peak * 10),
            "weight_decay": tune.choice([0.0, decay / 3, decay]),
            "report_every": max(1, math.ceil(settings["steps"] / REPORTS)),
            "options": options,
        },
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=samples,
            max_concurrent_trials=at_once,
            scheduler=ASHAScheduler(max_t=REPORTS, grace_period=2, reduction_factor=3),
        ),
        run_config=tune.RunConfig(name=f"{options['name']}-tune", storage_path=options["storage"]),
    )
    results = tuner.fit()
    best = results.get_best_result()
    found = {name: best.config[name] for name in ("learning_rate", "weight_decay")}
    print(
        json.dumps(
            {
                "trials": len(results),
                "errors": results.num_errors,
                "best": found,
                "loss": best.metrics["loss"],
            }
        )
    )


if __name__ == "__main__":
    main()
