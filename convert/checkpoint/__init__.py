"""Reads every container of torch checkpoints, without torch and without running what is in them."""
