"""The typed bus. `base` is the contract, `memory` and `nats` keep it."""
