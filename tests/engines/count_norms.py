"""Runs `train.py`, and says how many norms each rank computed: recomputed ones count twice."""

import json
import os
import runpy

from transformers.models.llama.modeling_llama import LlamaRMSNorm

count = 0
forward = LlamaRMSNorm.forward


def counted(self, x):
    global count
    count += 1
    return forward(self, x)


LlamaRMSNorm.forward = counted
runpy.run_path("train.py", run_name="__main__")
print(json.dumps({"rank_of_norms": int(os.environ["RANK"]), "norms": count}) + "\n", end="")
