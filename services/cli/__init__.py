"""The `meshift` command: starts a mesh or one of its services, asks it things, prepares models."""
