"""Requests and answers of the four skills that the engineer's contract names: ray trainer, PyTorch
trainer, TensorFlow trainer and Kubeflow pipelines.

Keys are the contracts', word for word, so they are written as there. What a contract has no place
for is an addition, and its help says so. Each module has a `Request` and an `Answer`.
"""
