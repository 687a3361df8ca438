"""AlpacaFarm (arXiv:2305.14387) in miniature: a small language, simulated annotators, and all stages from supervised
fine-tuning to over-optimisation, on a laptop's CPU.

    python -m examples.mini_farm.quickstart    every stage, one seed of PPO, a table and a figure
    python -m examples.mini_farm.results       three seeds of PPO on the same models, RESULTS.md
    python -m examples.mini_farm.overopt       one long run with a weak KL penalty
    python -m examples.mini_farm.compare       critics, KL penalties and estimators without a critic
    python -m examples.mini_farm.lora          LoRA in four critic layouts
    python -m examples.mini_farm.against_trl   the same training by TRL

The language and its annotators are in `lexicon`, `grammar`, `demonstrations` and `annotators`, the experiment is in
`pipeline`.
"""
