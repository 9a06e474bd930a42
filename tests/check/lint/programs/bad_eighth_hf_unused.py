from transformers import TrainingArguments
a = TrainingArguments("o", ddp_find_unused_parameters=True)  # expect: ddp-find-unused-overhead
