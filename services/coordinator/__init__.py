"""Changes the layouts of running instances (PipeLive): plans, and drives the five phases."""
