"""Measures an instance: how long its steps take, and at which load a class of requests is still as fast as it should
be. `meshift calibrate` runs it."""
