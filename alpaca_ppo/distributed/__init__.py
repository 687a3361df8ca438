"""Processes: one, DDP or DeepSpeed ZeRO; collectives, gradients and signals."""
