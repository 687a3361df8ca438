"""`python -m alpaca_ppo.cli` is the command `alpaca-ppo`."""

import sys

from alpaca_ppo.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
