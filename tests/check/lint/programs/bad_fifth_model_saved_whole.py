import argparse
import torch


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    return p.parse_args()


def main():
    args = parse()
    model = torch.nn.Linear(4, 4)
    torch.save({"model": model.state_dict(), "args": args}, "ck.pt")
    ck = torch.load("ck.pt", map_location="cpu")  # expect: weights-only-load
    model.load_state_dict(ck["model"])


if __name__ == "__main__":
    main()
