CUDA_VISIBLE_DEVICES=4,5 deepspeed --num_gpus 4 train.py --deepspeed ds.json  #! invalid-device-ordinal
