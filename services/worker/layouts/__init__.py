"""Changes of the layout of this worker's instance, as the coordinator orders them."""
