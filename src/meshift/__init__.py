"""meshift: an LLM serving mesh on SGLang in which work moves while it runs."""

__version__ = "0.1.0"
