#!/bin/bash
accelerate launch --config_file zero3.yaml --main_process_port 29700 train.py
