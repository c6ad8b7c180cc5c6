"""Fault-tolerant, tiered checkpointing for PyTorch training."""
