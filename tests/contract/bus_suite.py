"""What every bus does. A subclass gives a fixture `buses` and, if it wants, another `run_loop`."""

from tests.contract.bus_life_suite import LifeSuite
from tests.contract.bus_publish_suite import PublishSuite
from tests.contract.bus_request_suite import RequestSuite


class BusSuite(PublishSuite, RequestSuite, LifeSuite):
    """The whole suite."""
