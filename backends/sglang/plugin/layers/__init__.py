"""Layers that move between the ranks of a running instance: weights, KV, and the point at which all ranks switch."""
