"""Running the real services in virtual time."""
