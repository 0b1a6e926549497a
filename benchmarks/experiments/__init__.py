"""The experiments of Llumnix's evaluation (section 6) on the simulated mesh."""
