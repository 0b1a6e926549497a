"""The global scheduler (Llumnix, section 4): knows instances, never requests."""
