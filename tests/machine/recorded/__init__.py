"""Recorded machines: short descriptions of real computers, and the /proc and /sys that they have."""
