"""Helper process: prove the layouts of one request.

    python -m paceline.prove < REQUEST.json

Reads a JSON `Request` on standard input and prints one line of JSON: a `Proof`, or the problems
that kept it from being made. Progress goes to standard error, one line a stage.
"""

import gc
import sys
import warnings

import msgspec

from paceline.errors import PacelineError
from paceline.prove.proof import Request
from paceline.prove.uncompiled import leave_out_compiler


def main() -> None:
    warnings.filterwarnings("ignore")  # torch's own, about devices that are not there
    leave_out_compiler()
    gc.disable()  # imports leave no garbage: 2.8 s of a core with it, 1.7 s without (measured)
    from paceline.prove.prove import prove

    gc.enable()
    gc.freeze()  # what was imported is looked through by no collection, at the end neither
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        proof = prove(request, lambda line: print(line, file=sys.stderr, flush=True))
    except PacelineError as error:
        answer = {"exit_code": error.exit_code, "problems": list(error.problems)}
        sys.stdout.buffer.write(b"\n" + msgspec.json.encode(answer) + b"\n")
        return
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(proof) + b"\n")


if __name__ == "__main__":
    main()
