from tests.contract.engine_suite import EngineGenerationSuite
def test_x(): assert EngineGenerationSuite
