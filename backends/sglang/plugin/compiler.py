"""xgrammar's compiler with two things mended. Without SGLang."""

from typing import Any, Final

from xgrammar import CompiledGrammar, Grammar, GrammarCompiler

_BOUNDED_CHARACTER: Final = r"[^\"\\\r\n]"
_CHARACTER: Final = r"[^\0-\x1f\"\\\r\n]"
"""Of a JSON string, without escapes, as xgrammar writes its grammars."""


class JsonCompiler(GrammarCompiler):
    """Keeps all control characters out of strings, as JSON wants it. Where the length of a string is bounded, or it has
    a pattern, xgrammar 0.2 keeps out line ends only."""

    def compile_json_schema(self, schema: Any, **settings: Any) -> CompiledGrammar:
        """See xgrammar's. Raises RuntimeError if it can't be obeyed."""
        grammar = str(Grammar.from_json_schema(schema, **settings))
        if _BOUNDED_CHARACTER not in grammar:
            return super().compile_json_schema(schema, **settings)
        return self.compile_grammar(grammar.replace(_BOUNDED_CHARACTER, _CHARACTER))
