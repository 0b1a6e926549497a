"""The worker, or llumlet: owns one instance's engine and puts it on the bus."""
