"""Tool calls: how models write them, and how a model is made to write one."""

from meshift.services.frontend.text.tools.base import Call, ToolEnd, ToolFormat, ToolText
from meshift.services.frontend.text.tools.forced import ConflictingDefinitions, forced_schema
from meshift.services.frontend.text.tools.formats import Forced, Hermes, Llama3, Mistral

FORMATS: dict[str, ToolFormat] = {form.name: form for form in (Hermes(), Llama3(), Mistral())}
"""By the name that `tool_parser` knows."""

FORCED: ToolFormat = Forced()


def detect_format(template: str) -> ToolFormat | None:
    """The format that a chat template tells its model to use, where it is one of ours."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>")):
        return FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template:
        return FORMATS["llama3"]
    return None


__all__ = [
    "FORCED",
    "FORMATS",
    "Call",
    "ConflictingDefinitions",
    "ToolEnd",
    "ToolFormat",
    "ToolText",
    "detect_format",
    "forced_schema",
]
