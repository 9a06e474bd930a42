import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
args = parser.parse_args()
print(args.lr, os.environ["LOCAL_RANK"])
