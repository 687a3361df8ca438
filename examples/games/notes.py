"""The parts of RESULTS.md that are written by hand: what the runs mean, and how their settings were chosen.

They hold numbers that the tables do not have, and are about the runs in the repository: revise them when those change.
"""

NOTES = """\
## What it means

Written by hand (`notes.py`), about the three seeds of the tables in the repository.

**Rewards by turns** help: the row that has them comes nearest to optimal play. Half of what it still lacks is
bookkeeping: 0.34 guesses a game that an earlier answer rules out. Its other guesses are a tenth of the interval from
the middle. In one of its three runs, games grew longer for a thousand games before they became shorter (the grey band
in the figure); the KL of this run is 27 nats, that of the others 13. On another processor, whose rounding differs, the
same three seeds end at 6.02, 5.91 and 5.85 turns: 1.12 ± 0.05 nearer to optimal play than the demonstrations, 21
standard errors.

**Credit by turns** without such rewards makes no difference here. A turn has 4 tokens in one game and about 11 in the
other, so that `lam: 0.95` is 0.81 or 0.57 a turn, not far from `turn_lam: 0.9`. With the calculator, the critic
explains 1 to 10 % of the returns: it has seen too few questions to tell a wrong argument from a right one, and is
little more than the mean, which any lambda takes away alike.

**With the calculator**, the policy learns to call always, and twice: of 1150 conversations of the first model without a
call, one ended with the right number.

**The best of 8** guessing games of the first model are lucky ones. A guess that hits by chance looks better than the
middle, so that imitation of them learns little about guessing. With the calculator, where luck does not help, they are
right as often as a single answer of PPO's model.

## How the settings were chosen

With seed 11, which the tables do not have, in few runs: nothing was searched for long. Turns of the guessing game after
12800 games, from 7.34:

| row | setting | turns |
|---|---|---|
| PPO, credit and rewards by turns | 64 games a step, learning rate 4e-4, four epochs of the critic | 5.88 |
| | 64 games a step, 6e-4, four epochs of the critic, KL penalty of 0.005 | 6.02, with 99.4 % won |
| | 64 games a step, 4e-4, `turn_lam: 1` | 6.00 |
| | 128 games a step, 8e-4, 9600 games | 6.06 |
| GRPO, 8 games | 128 games a step, 2.5e-4 | **6.64** |
| | 128 games a step, 4e-4 | 6.85 |

The table has 128 games a step, which is a quarter cheaper a game, and 7e-4 for PPO. With that rate, GRPO ended at 7.23
turns (seed 1), where it began: it gets the table's 2.5e-4. There is no KL penalty. With the calculator, four epochs of
the critic in steps of 8 questions at a rate of 1e-3 came to 81.4 % (seed 11): the critic follows the few questions of a
step, with an explained variance below 0 for the first twenty steps.
"""
