"""AlpacaFarm (arXiv:2305.14387) in miniature: a small language, simulated annotators, and the whole way from supervised
fine-tuning to over-optimisation on a laptop's CPU.

    python -m examples.mini_farm.quickstart    every stage, one seed of PPO, a table and a figure
    python -m examples.mini_farm.results       three seeds of PPO on the same models, RESULTS.md
    python -m examples.mini_farm.overopt       one long run with a weak KL penalty

Read `lexicon`, `grammar`, `demonstrations` and `annotators` for the world, `pipeline` for the experiment.
"""

import os

# OpenMP reads this when torch is first imported. Matrices are small here, and threads that wait for one another in a
# busy loop take ten times as long as soon as another program wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
