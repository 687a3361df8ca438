"""The parts of RESULTS.md that are written by hand: what the runs mean, and how their settings were chosen.

They hold numbers that the tables do not have, and are about the runs in the repository: revise them when those change.
"""

NOTES = """\
## What it means

Written by hand (`notes.py`), about the seeds of the tables in the repository.

**A rate and steps of the critic's own** matter most here, and are not the paper's. Without them, VAPO is behind GRPO
and hardly ahead of plain PPO: lambdas below 1 pay only with a critic that has learned something, and this one has 1024
samples to learn from. Given to plain PPO alone, they lift it above every estimator without a critic, to 1.7 ± 0.7
points behind VAPO.

**The other parts.** With several responses a prompt, the critic sees what separates them. Adaptive lambdas add to
decoupled ones. Imitation of successes and clip-higher are within the noise. Value pretraining is worth nothing: a
critic this fast learns beside the policy in the samples that pretraining takes. These samples count: VAPO's policy
trains on 26 of 32 steps.

**Why a critic helps.** With a group baseline, or with none, every decision gets the credit for all 30. That is
unbiased, but 29 parts of it are noise. A critic that reads the marks knows what the steps so far are worth, which
removes the noise of the past (lambda 1) and, with a lambda below 1, most of that of the future. A critic that has
learned nothing yet gives the same noise as no critic, and a lambda below 1 then hides the reward from all but the last
tokens: the case of plain PPO at its start.

## How the settings were chosen

With the seeds 11 and 12, which the tables do not have. Shared by all main rows: samples, passes over a rollout, the
linear schedule, the KL penalty of 0.05, and the learning rate of 6e-4, except for plain PPO. Right steps after the run
in percent, with seed 11 and a model of fewer demonstrations (56.7 before the run); bold: the rate of the main rows:

| learning rate | 1e-4 | 3e-4 | 6e-4 | 1e-3 |
|---|---|---|---|---|
| PPO, lam 0.95 | 59.2 | 59.6 (without KL penalty) | 62.9 | **68.6** |
| GRPO, 4 samples | | 65.8 | **67.5** | 60.1 |
| VAPO | | 73.2 | **76.8** | 78.0 |

With seed 12 and the final model, PPO with lam 1 reached 83.0 at 6e-4 and 83.4 at 1e-3 (at a KL of 7.6 and 11.6), GRPO
with 4 samples 79.9 at 1e-3. Without the KL penalty, at 3e-4, GRPO reached 65.3 and VAPO 70.0 where the table above has
65.8 and 73.2; at 6e-4, with critic steps of 8 responses, VAPO fell from 58 to 43 before the run was stopped. The
settings of VAPO's critic were chosen by how well its advantages correlate with right decisions after 256 of the
teacher's texts.

VAPO departs from its preset where the size asks for it: 8 responses a prompt instead of 16, 6 steps of value
pretraining instead of 50, learning rates 600 and 500 times as high, no warm-up of them, two passes over a rollout; by
the KL penalty; and by optimizer steps of the critic's own, which the paper does not have.
"""
