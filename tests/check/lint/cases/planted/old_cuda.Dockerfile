#? {"gpu": "H100-SXM"}
FROM pytorch/pytorch:1.12.1-cuda11.3-cudnn8-runtime  #! no-kernel-image
ENV NCCL_DEBUG=INFO
