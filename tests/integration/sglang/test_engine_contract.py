"""The real engine passes the generation suite that every engine must pass, on one rank."""

import pytest

from tests.contract.engine_kit import Rig
from tests.contract.engine_suite import EngineGenerationSuite

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]


class TestGeneration(EngineGenerationSuite):
    @pytest.fixture
    def rig(self, base: Rig) -> Rig:
        return base
