"""`python -m alpaca_ppo.migrate`: see `command`."""

import sys

from alpaca_ppo.migrate.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
