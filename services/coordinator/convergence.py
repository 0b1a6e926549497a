"""Whether little enough lags to commit (PipeLive, phase 4). Pure."""

from meshift.schemas.reconfiguring import ChangeStatus

STEPS = 2


def is_close(change: ChangeStatus, running: int) -> bool:
    """Weights are there, and less lags at every destination than `tau_tokens`; or than two steps of the `running`
    requests write, since a patch on its way is always that late, however fast the link."""
    flags = change.orders.flags
    if flags.restart:
        return True
    if not flags.no_async and not change.weights_loaded:
        return False
    return flags.no_patch or change.lag_tokens < max(change.orders.tau_tokens, STEPS * running)
