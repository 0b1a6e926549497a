"""Text to tokens and back: tokeniser, chat template, detokeniser, stop strings. Pure, without torch."""
