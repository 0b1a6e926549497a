"""What schedulers and frontends know of the instances, from their reports."""

from meshift.services.instances.view import InstanceView, KnownInstance

__all__ = ["InstanceView", "KnownInstance"]
