"""LoRA: several adapters on one base model, the checks on them, and their files on disk."""
