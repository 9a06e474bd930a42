import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--local-rank", "--local_rank", type=int)
args = parser.parse_args()
print(args.lr, os.environ["LOCAL_RANK"])
