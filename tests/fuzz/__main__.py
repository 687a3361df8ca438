"""`python -m tests.fuzz`: the tests of this folder with new cases, for as long as you like.

Each round is a run of pytest with twenty times as many cases as `make proof` has, drawn from the seed that is printed
before it; `--seed` repeats it. The first round with a failure is the last one.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.fuzz.oracle import FACTOR


def main() -> int:
    """Runs rounds until the minutes are over; returns pytest's exit code of the last one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="New mutated input, round after round.")
    parser.add_argument("--minutes", type=float, default=10.0, help="Start no round after so many (default: 10).")
    parser.add_argument("--seed", type=int, help="Of the first round; the next ones count up from it.")
    parser.add_argument("--factor", type=float, default=20.0, help="Times the cases of `make proof` (default: 20).")
    parser.add_argument("-k", dest="only", default="", help="Only tests that match, as in pytest.")
    args = parser.parse_args()
    seed = random.randrange(2**31) if args.seed is None else args.seed
    end = time.monotonic() + 60 * args.minutes
    while True:
        again = f"python -m tests.fuzz --minutes 0 --factor {args.factor:g} --seed {seed}"
        print(f"\nseed {seed}; to repeat this round: {again}{f' -k {args.only!r}' if args.only else ''}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "proof", f"--hypothesis-seed={seed}"]
        command += [str(Path(__file__).parent), *(["-k", args.only] if args.only else [])]
        code = subprocess.run(command, env=os.environ | {FACTOR: str(args.factor)}).returncode
        if code or time.monotonic() >= end:
            return code
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
