"""What operators changed of the policy. A scheduler has no durable state: frontends keep the changes, and give them
again to one that has started since (`KeptPolicy`)."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from meshift.schemas.errors import InvalidRequest
from meshift.schemas.instances import PolicyStamp
from meshift.schemas.steering import KeptPolicy
from meshift.services.scheduler.policy.settings import PolicySettings

logger = logging.getLogger(__name__)


class Steering:
    """The settings in force."""

    def __init__(self, incarnation: int, start: PolicySettings) -> None:
        self._incarnation = incarnation
        self._start = start
        self.settings = start
        self.stamp = PolicyStamp()

    def change(self, changes: Mapping[str, Any]) -> None:
        """From now on. Raises InvalidRequest naming the field; then nothing has changed."""
        self.settings = self.settings.replaced(changes)
        version = self.stamp.version if self.stamp.incarnation == self._incarnation else 0
        self.stamp = PolicyStamp(self._incarnation, version + 1)

    def adopt(self, kept: KeptPolicy) -> bool:
        """Take what an earlier scheduler, or this one, was told, if it is newer. Returns whether it was taken."""
        if kept.stamp <= self.stamp:
            return False
        try:
            settings = self._start.replaced(kept.changes) if kept.changes else self._start
        except InvalidRequest as error:
            # Kept by a frontend of another release: asked again and again, so the stamp is taken all the same.
            logger.error("the policy that operators set is not valid here, and ignored: %s", error)
            settings = self.settings
        self.settings = settings.model_copy(update={"version": max(self.settings.version, settings.version)})
        self.stamp = kept.stamp
        return True

    def kept(self) -> KeptPolicy:
        """What frontends are to keep."""
        return KeptPolicy(stamp=self.stamp, changes=self.changes())

    def changes(self) -> dict[str, JsonValue]:
        """What differs from the settings that the scheduler was started with, by section."""
        return _difference(self._start.model_dump(mode="json"), self.shown())

    def shown(self) -> dict[str, JsonValue]:
        """All settings, by section."""
        return self.settings.model_dump(mode="json")


def _difference(old: Mapping[str, JsonValue], new: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    changed: dict[str, JsonValue] = {}
    for name, value in new.items():
        before = old.get(name)
        if name == "version" or value == before:
            continue
        changed[name] = _difference(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return changed
