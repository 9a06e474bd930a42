deepspeed --hostfile hostfile --master_port 29500 train.py --deepspeed ds_config.json
deepspeed --include localhost:0,1 train.py --deepspeed --deepspeed_config ds.json
