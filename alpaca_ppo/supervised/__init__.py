"""What comes before PPO: supervised fine-tuning and reward models, with the `Trainer` of transformers."""
